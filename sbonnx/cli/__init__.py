"""Command line interface. One module per subcommand, in three packages; imports are lazy."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import typer

from sbonnx.cli.app import EPILOG, GROUPS, NAME, VERBS, build, rows_of_commands
from sbonnx.cli.configuration import Configuration, find
from sbonnx.cli.create import questions
from sbonnx.cli.output.error_lines import INTERRUPTED, report
from sbonnx.cli.output.streams import standard_streams
from sbonnx.recipe.sections.other_tools import counterpart
from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS
from sbonnx.system.terminal import DONE, FAILED, LINE_LENGTH, one_line

YOUNG_OBJECTS: Final = 50_000
"""New objects after which Python looks for cycles in a process of the command line (its default: 700).

Graphs are many objects that live long. At 9,375 nodes looking at them again and again took a third of planning.
"""

WITHOUT_CONFIGURATION: Final = frozenset({"help", "version", "completion", "explain", "doctor", "schema"})
"""Commands that work with a wrong configuration too."""

REPEAT_SECONDS: Final = 0.05
"""Time after which a discarded interrupt is repeated: callbacks and destructors are shorter."""

INTERRUPT_CODE: Final = 130
"""Exit code of typer for an interrupt while it parses the command line."""


FLAGS: Final = {
    **{keyword: f"--{keyword}" for keyword in ("bits", "data", "backend", "recipe")},
    "model": "MODEL",
    "output": "--output",
    "evaluation": "--eval",
    "ort_libraries": "--ort-library",
}
"""Options of the command line for keywords that are no keys of recipes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: `sys.argv`). Return the exit code, see `EPILOG`."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in arguments
    if argv is None:
        gc.set_threshold(YOUNG_OBJECTS)
        if arguments == questions.ASKING and questions.can_ask():
            try:
                answered = questions.ask()
            except (EOFError, KeyboardInterrupt):
                print(f"\n{INTERRUPTED}", file=sys.stderr)
                return FAILED
            if answered is None:
                return DONE
            arguments = answered
    with standard_streams(capture=argv is None and not debug), _undisturbed(debug):
        return _run(arguments, debug)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        configuration = _configuration(arguments)
        defaults = None if configuration is None else configuration.default_map(rows_of_commands())
        program = typer.main.get_command(build(configuration))
        code = program.main(arguments, prog_name=NAME, standalone_mode=False, default_map=defaults)
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


def _configuration(arguments: list[str]) -> Configuration | None:
    """Return the configuration of the current folder; None if the command takes none.

    Raises:
        RecipeError: it cannot be read.
    """
    if {"--no-config", "--help", "-h", "--version"} & set(arguments) or arguments[0] in WITHOUT_CONFIGURATION:
        return None
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # the folder was removed
        return None
    return find(folder)


def _usage_line(error: Any) -> str:
    """Format an error in the command line as one line, with a hint to the help of the right command."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else NAME
    message = one_line(_counterpart(error) or error.format_message(), LINE_LENGTH)
    if not message.endswith((".", "?", "!")):
        message += "."
    return f"UsageError: {message} See {path} --help"


def _counterpart(error: Any) -> str:
    """Return the option of the command for an unknown one that other tools have; "" for other errors."""
    unknown, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not unknown or context is None:
        return ""
    flags = {flag for parameter in context.command.params for flag in parameter.opts}

    def option(keyword: str) -> str:
        row = KEYS.get(SHORT_FORMS.get(keyword, keyword.upper()))
        flag = FLAGS.get(keyword, row.flag.usage.split()[0] if row is not None and row.flag is not None else "--set")
        set_key = f"{flag} {keyword}=VALUE" if flag == "--set" else flag
        return set_key if flag in flags or not flag.startswith("-") else ""

    return counterpart(str(unknown), option)


@contextmanager
def _undisturbed(debug: bool) -> Iterator[None]:
    """Hide third-party warnings unless ``--debug``, because stderr carries a single line per error.

    SIGTERM cleans up like an interrupt. Python discards an interrupt that arrives in a callback or destructor: it is
    repeated.
    """
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, hook = signal.signal(signal.SIGTERM, signal.default_int_handler), sys.unraisablehook

        def repeat(unraisable: Any) -> None:
            if not issubclass(unraisable.exc_type, KeyboardInterrupt):
                owner = str(getattr(unraisable.object, "__module__", "")).partition(".")[0]
                if debug or owner != "distributed":  # a client without a scheduler fails in its destructor too
                    hook(unraisable)
                return
            again = threading.Timer(REPEAT_SECONDS, _thread.interrupt_main, (signal.SIGTERM,))
            again.daemon = True
            again.start()

        sys.unraisablehook = repeat
        try:
            yield
        finally:
            sys.unraisablehook = hook
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


__all__ = ["EPILOG", "GROUPS", "VERBS", "main"]
