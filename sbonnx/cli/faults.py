"""From an exception to one line on stderr and an exit code."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from sbonnx.errors import SbonnxError

DONE: Final = 0
BELOW_QUALITY: Final = 1
MENDABLE: Final = 2
"""Exit codes. 2 is also that of an internal error, whose line says so."""

INTERRUPTED: Final = "interrupted; nothing was written"
"""Unless the exception itself says what was."""

OS_CAUSES: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}
"""What the machine refuses and the user can mend."""


def one_line(text: object) -> str:
    """`text` with every run of white space as one blank."""
    return " ".join(str(text).split())


def line_of(error: BaseException) -> str:
    """What to say of an exception: the kind, what is wrong and what to do, on one line."""
    if isinstance(error, SbonnxError):
        return one_line(f"{type(error).__name__}: {error}")
    if isinstance(error, KeyboardInterrupt):
        return one_line(f"interrupted; {error}") if error.args else INTERRUPTED
    if isinstance(error, MemoryError):
        return one_line("MemoryError: there is not enough memory: use smaller batches (--split), or a larger machine")
    if isinstance(error, OSError) and error.errno in OS_CAUSES:
        where = f" at '{error.filename}'" if error.filename else ""
        return one_line(f"OSError: {OS_CAUSES[error.errno]}{where}: make room or give another place")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})" if frames else ""
    kind = type(error).__name__
    return one_line(f"internal error: {kind}: {error}{where}; this is a fault of sbonnx: run again with --debug")


def report(error: BaseException, *, debug: bool) -> int:
    """Print the line of `error` on stderr (the traceback above it when `debug`); the exit code."""
    if debug:
        traceback.print_exception(error)
    print(line_of(error), file=sys.stderr, flush=True)
    return MENDABLE


def guard(run: Callable[..., int]) -> Callable[..., int]:
    """`run`, ending in an exit code whatever happens."""

    @functools.wraps(run)
    def verb(*args: Any, **keywords: Any) -> int:
        try:
            code = run(*args, **keywords)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read the output has seen enough (`| head`). What is left must not fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        except (Exception, KeyboardInterrupt) as error:
            return report(error, debug=bool(keywords.get("debug")))
        return code

    return verb
