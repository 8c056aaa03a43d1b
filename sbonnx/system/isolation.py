"""Child interpreters with the search path of this one, which never import from the working folder.

`python -c` puts the working folder, which may hold downloaded files, first on the search path. A file `json.py` there
would be run instead of the standard module. Commands of this program are started with `python_command`.
`multiprocessing` creates its own command lines, so its processes are started within `safe_start`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

_SAFE_PATH: Final = "PYTHONSAFEPATH"
"""Python 3.11 and later: any value keeps the working folder off the search path."""

_OURS: Final = "sbonnx"
"""Value of the variable if `safe_start` set it."""


def python_command(module: str, function: str, *arguments: Any) -> list[str]:
    """Return the command line of a new interpreter that calls a function.

    The interpreter has the flags, the environment (`PYTHONHOME`, user site, import hooks of editable installs) and the
    search path of this one. The path is set before the first import that could read it.

    Args:
        module, function: the function to call; it must be importable.
        arguments: its arguments; Python literals (`ast.literal_eval`).

    Raises:
        OSError: the path of the interpreter is unknown (Python is embedded in another program).
    """
    if not sys.executable:
        raise OSError("Python is embedded in another program that does not give the path of an interpreter")
    code = f"{_path_first()}; from {module} import {function}; {function}(*{list(arguments)!a})"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    safe = ["-P"] if sys.version_info >= (3, 11) and "-P" not in flags else []
    return [sys.executable, *flags, *safe, "-c", code]


@contextlib.contextmanager
def safe_start() -> Iterator[None]:
    """Prevent interpreters that `multiprocessing` starts within the context (spawn, forkserver, its resource tracker)
    from importing from the working folder.

    On Python 3.11 and later the children inherit `PYTHONSAFEPATH`. Scripts that they start in turn could then not
    import from their own folder, so a child that runs user code calls `leave_safe_start` first. Not thread-safe.
    """
    if sys.version_info < (3, 11):
        with _path_handed_over():
            yield
        return
    before = os.environ.get(_SAFE_PATH)
    if not before:
        os.environ[_SAFE_PATH] = _OURS
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE_PATH, None)
        else:
            os.environ[_SAFE_PATH] = before


def leave_safe_start() -> None:
    """Restore Python's default path for programs started by a child that was itself started within `safe_start`."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]


def _path_first() -> str:
    """Return statements that set the search path of a new interpreter to that of this one. `sys` is built in:
    importing it reads no file.
    """
    return f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!a}"


@contextlib.contextmanager
def _path_handed_over() -> Iterator[None]:
    """Make the command lines of `multiprocessing` set the search path first, within the context. Python 3.10 has
    neither the variable nor a flag with this effect alone.
    """
    from multiprocessing import util

    start = util.spawnv_passfds

    def with_path(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        code = args.index("-c") + 1
        return start(path, [*args[:code], f"{_path_first()}; {args[code]}", *args[code + 1 :]], passfds)

    util.spawnv_passfds = with_path
    try:
        yield
    finally:
        util.spawnv_passfds = start
