"""Command line interface. One module per subcommand; imports are lazy."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

import typer

from sbonnx.cli.create import batch, demo, llm, prune, qat, quantize, recipe, simplify
from sbonnx.cli.examine import compare, inspect, lint, plan, profile
from sbonnx.cli.examine import eval as evaluation
from sbonnx.cli.options import command
from sbonnx.cli.output.error_lines import DONE, FAILED, INTERRUPTED, guard, report
from sbonnx.cli.output.streams import standard_streams
from sbonnx.terminal import LINE_LENGTH, one_line
from sbonnx.version import __version__

VERBS: Final = (quantize, batch, qat, prune, simplify, inspect, plan, lint, recipe, compare, evaluation, profile, demo)

GROUPS: Final = (llm,)
"""Modules of several commands each, `COMMANDS`."""

NAME: Final = "sbonnx"
HELP: Final = "Any float ONNX model in, a verified quantized ONNX model out."
EPILOG: Final = "Exit codes: 0 done; 1 done, but below the requested quality; 2 error, described in one line."

HELP_WIDTH: Final = 110

YOUNG_OBJECTS: Final = 50_000
"""New objects after which Python looks for cycles in a process of the command line (its default: 700).

Graphs are many objects that live long. At 9,375 nodes looking at them again and again took a third of planning.
"""

INTERRUPT_CODE: Final = 130
"""Exit code of typer for an interrupt while it parses the command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: `sys.argv`). Return the exit code, see `EPILOG`."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in arguments
    if argv is None:
        gc.set_threshold(YOUNG_OBJECTS)
    with standard_streams(capture=argv is None and not debug), _undisturbed(debug):
        return _run(arguments, debug)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = typer.main.get_command(_app()).main(arguments, prog_name=NAME, standalone_mode=False)
        if not code:  # after --help, --version or a command that flushed or reported its error itself: flush stdout
            sys.stdout.flush()
    except Exception as error:
        if not hasattr(error, "format_message"):  # not an error in the command line itself
            return report(error, debug=debug)
        print(_usage_line(error), file=sys.stderr)
        return FAILED
    if code == INTERRUPT_CODE:
        print(INTERRUPTED, file=sys.stderr)
        return FAILED
    return int(code or DONE)


def _app() -> typer.Typer:
    """Build the program from its commands. Colours and boxes in the help only on a terminal."""
    style: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
    app = typer.Typer(name=NAME, help=HELP, epilog=EPILOG, add_completion=False, rich_markup_mode=style)
    app.callback(context_settings={"max_content_width": HELP_WIDTH})(_program)
    for verb in VERBS:
        name = verb.__name__.rpartition(".")[2]
        run = guard(command(verb.OPTIONS, verb.run))
        app.command(name, help=verb.HELP, context_settings={"max_content_width": HELP_WIDTH})(run)
    for group in GROUPS:
        inner = typer.Typer(help=group.HELP, no_args_is_help=True, rich_markup_mode=style)
        for each in group.COMMANDS:
            run = guard(command(each.options, each.run))
            inner.command(each.name, help=each.help, context_settings={"max_content_width": HELP_WIDTH})(run)
        app.add_typer(inner, name=group.__name__.rpartition(".")[2])
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from sbonnx.native import MODULES, missing

        absent = missing()
        loops = "no" if len(absent) == len(MODULES) else f"all but {', '.join(absent)}" if absent else "yes"
        print(f"{NAME} {__version__} (compiled loops: {loops})")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Accept the options before the command."""


def _usage_line(error: Any) -> str:
    """Format an error in the command line as one line, with a hint to the help of the right command."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else NAME
    message = one_line(error.format_message(), LINE_LENGTH)
    if not message.endswith((".", "?", "!")):
        message += "."
    return f"UsageError: {message} See {path} --help"


@contextmanager
def _undisturbed(debug: bool) -> Iterator[None]:
    """Hide third-party warnings unless ``--debug``, because stderr carries a single line per error.

    SIGTERM cleans up like an interrupt.
    """
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


__all__ = ["GROUPS", "VERBS", "main"]
