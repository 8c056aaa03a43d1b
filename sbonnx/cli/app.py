"""The typer program: its commands, their help in groups with examples, and shell completion."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperCommand, TyperGroup

from sbonnx.cli.about import completion, doctor, explain, schema, version
from sbonnx.cli.configuration import Configuration
from sbonnx.cli.create import batch, demo, init, llm, prune, qat, quantize, recipe, simplify
from sbonnx.cli.examine import bench, compare, diff, inspect, lint, plan, profile, run, tune, view
from sbonnx.cli.examine import eval as evaluation
from sbonnx.cli.examples import EXAMPLES
from sbonnx.cli.options import CommandOption, command
from sbonnx.cli.output.error_lines import guard
from sbonnx.recipe.sections import other_tools

VERBS: Final = (
    *(quantize, batch, qat, prune, simplify, init, recipe, demo),
    *(inspect, plan, lint, run, bench, compare, diff, evaluation, profile, view, tune),
    *(explain, doctor, schema, version, completion),
)

GROUPS: Final = (llm,)
"""Modules of several commands each, `COMMANDS`."""

NAME: Final = "sbonnx"
HELP: Final = "Any float ONNX model in, a verified quantized ONNX model out."
EPILOG: Final = "Exit codes: 0 done; 1 done, but below the requested quality; 2 error, described in one line."

PANELS: Final = {"create": "Create", "examine": "Examine", "about": "About sbonnx"}
"""Headings of the commands in the help, by package."""

LIST: Final = re.compile(r" <list\[(\w+)\]>")
"""Type of an argument of several values, in the help of click."""

CONTEXT: Final = {"max_content_width": 110, "help_option_names": ["-h", "--help"]}

ONCE: Final = {"--backend": "one a run; sbonnx batch quantizes for several"}
"""Advice for options of one value that are given with several."""

DEFAULT: Final = re.compile(r"\[default: \((.*?)\)\]")
"""typer puts a default that is a text in parentheses."""

Panels = dict[str, list[tuple[str, str]]]


def _rich(command: Any) -> bool:
    """Return whether typer formats the help with rich: boxes and colours, on a terminal."""
    return getattr(command, "rich_markup_mode", None) is not None


def _check_once(words: Sequence[str], flags: Sequence[str], times: int) -> None:
    """Check that an option which is given several times has the same value each time.

    Raises:
        BadParameter: the values differ, or are joined to a short flag.
    """
    values = [
        after if equals else next(iter(words[place + 1 : place + 2]), "")
        for place, (flag, equals, after) in enumerate(word.partition("=") for word in words)
        if flag in flags
    ]
    if len(values) < times or len(set(values)) > 1:
        once = ONCE.get(flags[0], "give it once")
        raise typer.BadParameter(f"{flags[0]} is given {times} times, {', '.join(values)}: {once}")


def _write_panels(formatter: Any, panels: Panels) -> None:
    for heading, rows in panels.items():
        with formatter.section(heading):
            formatter.write_dl(rows)


class Command(TyperCommand):
    """A command whose help shows the panels of options without rich too, and ends with examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line; click takes the last of an option that is given twice.

        Raises:
            UsageError: an option of one value is given with two.
        """
        words = args[: args.index("--")] if "--" in args else args
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for parameter in dict.fromkeys(order):
            times = order.count(parameter)
            if (
                times > 1
                and isinstance(parameter, typer.core.TyperOption)
                and not (parameter.multiple or parameter.is_flag)
            ):
                _check_once(words, parameter.opts, times)
        return list(super().parse_args(ctx, args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: Panels = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
                flags, text = LIST.sub(r"... <\1>", record[0]).replace("<Path>", "<path>"), record[1]
                panels.setdefault(panel, []).append((flags, DEFAULT.sub(r"[default: \1]", text)))
        _write_panels(formatter, panels)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        lines = EXAMPLES.get(ctx.command_path.partition(" ")[2], ())
        if lines and _rich(self):  # rich prints the help itself, and prints no formatter
            typer.echo("\n".join([" Examples:", *(f"   {line}" for line in lines), ""]))
        elif lines:
            formatter.write("\n".join(["", "Examples:", *(f"  {line}" for line in lines), ""]))


class PanelGroup(TyperGroup):
    """A group whose help shows the panels of commands without rich too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names.

        Raises:
            UsageError: there is none. Words of other tools are answered with the command of sbonnx.
        """
        meant = other_tools.VERBS.get(args[0].lower(), "")
        if self.get_command(ctx, args[0]) is None and self.get_command(ctx, meant) is not None:
            ctx.fail(f"No such command '{args[0]}': it is {ctx.command_path} {meant} here")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        width = formatter.width - 6 - max(len(name) for name, _ in commands)
        panels: Panels = {}
        for name, shown in commands:
            if shown is not None and not shown.hidden:
                panel = getattr(shown, "rich_help_panel", None)
                heading = panel if isinstance(panel, str) and panel else "Commands"
                panels.setdefault(heading, []).append((name, shown.get_short_help_str(width)))
        _write_panels(formatter, panels)


def rows_of_commands() -> dict[str, Sequence[CommandOption[Any]]]:
    """Return the options of each command, by its words."""
    verbs = {verb.__name__.rpartition(".")[2]: verb.OPTIONS for verb in VERBS}
    groups = {
        f"{group.__name__.rpartition('.')[2]} {row.name}": row.options for group in GROUPS for row in group.COMMANDS
    }
    return {**verbs, **groups}


def build(configuration: Configuration | None = None) -> typer.Typer:
    """Build the program from its commands. Colours and boxes in the help only on a terminal.

    Args:
        configuration: file whose options are named in the output of commands that use them.
    """
    if completion.VARIABLE in os.environ:  # set by the completion scripts
        completion_init()
    style: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
    app = typer.Typer(name=NAME, help=HELP, epilog=EPILOG, add_completion=False, rich_markup_mode=style, cls=PanelGroup)
    app.callback(cls=PanelGroup, context_settings=CONTEXT)(_program)
    for panel, heading in PANELS.items():
        for verb in VERBS:
            *_, package, name = verb.__name__.split(".")
            if package == panel:
                function = guard(command(verb.OPTIONS, verb.run, configuration))
                settings: Any = {"cls": Command, "context_settings": CONTEXT, "rich_help_panel": heading}
                app.command(name, help=verb.HELP, **settings)(function)
    for group in GROUPS:
        inner = typer.Typer(help=group.HELP, no_args_is_help=True, rich_markup_mode=style, cls=PanelGroup)
        inner.callback(cls=PanelGroup, context_settings=CONTEXT)(_group)
        for member in group.COMMANDS:
            function = guard(command(member.options, member.run, configuration))
            inner.command(member.name, help=member.help, cls=Command, context_settings=CONTEXT)(function)
        name = group.__name__.rpartition(".")[2]
        app.add_typer(inner, name=name, help=group.HELP, rich_help_panel="Language models")
    app.command("help", cls=Command, context_settings=CONTEXT, rich_help_panel=PANELS["about"])(_help)
    return app


def _group() -> None:
    """Accept no options."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version.version_line())
        raise typer.Exit


def _program(
    shown: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Accept the options before the command."""


def _command_names(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    group: Any = ctx.find_root().command
    return [name for name in group.list_commands(ctx) if name.startswith(incomplete)]


def _help(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="The command.", autocompletion=_command_names)
    ] = None,
) -> None:
    """Show the help of a command."""
    root: Any = ctx.find_root().command
    root.main([*(words or ()), "--help"], prog_name=NAME, standalone_mode=False)


__all__ = ["CONTEXT", "EPILOG", "GROUPS", "NAME", "VERBS", "build", "rows_of_commands"]
