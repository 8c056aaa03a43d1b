"""``sbonnx version``: print the version, as ``--version`` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.version import __version__

HELP: Final = "Show the version."

OPTIONS: Final = options.COMMON


@dataclass(frozen=True)
class VersionOutput:
    """Output of version.

    Attributes:
        version: version of sbonnx.
        missing_compiled_loops: loops that were not compiled.
    """

    version: str
    missing_compiled_loops: tuple[str, ...]


def version_line() -> str:
    """Return name, version, and which compiled loops are installed."""
    from sbonnx.system.native import MODULES, missing

    absent = missing()
    loops = "no" if len(absent) == len(MODULES) else f"all but {', '.join(absent)}" if absent else "yes"
    return f"sbonnx {__version__} (compiled loops: {loops})"


def run(given: Arguments) -> int:
    from sbonnx.system.native import missing

    printer = given.printer()
    printer.value("version", VersionOutput(__version__, tuple(missing())))
    printer.line(version_line())
    return 0
