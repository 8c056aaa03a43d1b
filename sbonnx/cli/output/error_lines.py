"""Conversion of exceptions to one line on stderr and an exit code."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from sbonnx.cli.output.streams import last_native_message
from sbonnx.errors import DeviceError, Interrupted, SbonnxError, memory_failure, out_of_memory, reason_of
from sbonnx.system.terminal import FAILED, LINE_LENGTH, escaped, one_line

INTERRUPTED: Final = "interrupted; nothing was written"
"""Default message; that of an `Interrupted` overrides it."""

OS_CAUSES: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EFBIG: "a file would be larger than allowed (ulimit -f)",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "symlinks lead in a circle",
    errno.EIO: "the disk cannot be read or written (input/output error)",
}
"""Errors of the operating system that the user can fix."""

REASON_LENGTH: Final = 200
"""Maximum length of a quoted message."""

NO_THREADS: Final = "OpenBLAS"
"""Raises SIGINT in its own process if it cannot start threads, after printing a message."""


def line_of(error: BaseException) -> str:
    """Format the error line of an exception: kind, cause and fix, at most 500 characters."""
    return one_line(_text_of(error), LINE_LENGTH)


def _text_of(error: BaseException) -> str:
    short = memory_failure(error)
    if short is None and isinstance(error, SystemError):  # native code that lost its exception
        short = memory_failure(RuntimeError(last_native_message()))
    if short is not None:
        return out_of_memory(one_line(error if isinstance(error, SbonnxError) else short, REASON_LENGTH))
    if isinstance(error, SbonnxError):
        return f"{error.kind}: {error}{_native(error)}"
    if isinstance(error, KeyboardInterrupt) and NO_THREADS in last_native_message():
        return out_of_memory(f"{NO_THREADS} cannot start its threads")
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; {error}" if isinstance(error, Interrupted) else INTERRUPTED  # codecs add messages too
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "OSError: too many files are open: raise the limit (ulimit -n), or use fewer --workers"
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_working_folder_gone():
        return "OSError: the working folder was removed during the run or before it: change to another folder"
    if isinstance(error, OSError) and error.errno in OS_CAUSES:
        where = f" at '{error.filename}'" if error.filename else ""
        return f"OSError: {OS_CAUSES[error.errno]}{where}: free space or choose another location"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})" if frames else ""
    return f"internal error: {reason_of(error)}{where}{_native(error)}; this is a bug in sbonnx: run again with --debug"


def _is_working_folder_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _native(error: BaseException) -> str:
    """Return the last native message, for errors that native code may cause: internal errors and crashed workers."""
    if isinstance(error, SbonnxError) and not isinstance(error, DeviceError):
        return ""
    message = one_line(last_native_message(), REASON_LENGTH)
    return f" (native message: {message})" if message else ""


def report(error: BaseException, *, debug: bool) -> int:
    """Print the line of `error` on stderr (preceded by the traceback if `debug`) and return the exit code."""
    if debug:
        print(escaped("".join(traceback.format_exception(error)), keep="\n"), end="", file=sys.stderr)
    print(line_of(error), file=sys.stderr, flush=True)
    return FAILED


def guard(run: Callable[..., int]) -> Callable[..., int]:
    """Wrap `run` so that every exception is reported and becomes an exit code."""

    @functools.wraps(run)
    def verb(*args: Any, **keywords: Any) -> int:
        try:
            code = run(*args, **keywords)
            sys.stdout.flush()  # a failed write must be an error with an exit code, not a message at exit
        except BaseException as error:  # foreign code raises SystemExit, and other exceptions that are no Exception
            return report(error, debug=bool(keywords.get("debug")))
        return code

    return verb
