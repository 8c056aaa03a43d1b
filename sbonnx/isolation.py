"""Child interpreters that import from where this one does, and never from the working folder.

`python -c` puts the working folder, which may hold downloaded files, first on the search path: there a file `json.py`
would be run in place of the standard module. Calibration workers are started with `python_command`; processes of
`multiprocessing`, whose command lines it makes itself, within `safe_start`.
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
"""Value of the variable where `safe_start` set it."""


def python_command(module: str, function: str, *arguments: Any) -> list[str]:
    """Command line of a new interpreter that calls a function.

    The interpreter has the flags, the environment (`PYTHONHOME`, user site, import hooks of editable installs) and the
    search path of this one. The path is set before the first import that could read it.

    Args:
        module, function: the function to call; it must be importable.
        arguments: for it; values that are Python literals (`ast.literal_eval`).

    Raises:
        OSError: the path of the interpreter is not known (Python is embedded in another program).
    """
    if not sys.executable:
        raise OSError("Python is embedded in another program that does not give the path of an interpreter")
    code = f"{_path_first()}; from {module} import {function}; {function}(*{list(arguments)!a})"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    safe = ["-P"] if sys.version_info >= (3, 11) and "-P" not in flags else []
    return [sys.executable, *flags, *safe, "-c", code]


@contextlib.contextmanager
def safe_start() -> Iterator[None]:
    """Context in which interpreters that `multiprocessing` starts (spawn, forkserver, its resource tracker) do not
    import from the working folder.

    On Python 3.11 and later the children inherit `PYTHONSAFEPATH`, which would keep scripts that they start in turn
    from their own folder: a child that runs user code calls `leave_safe_start` first. Not for several threads at once.
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
    """In a child that was started within `safe_start`: let the programs that it starts have Python's usual path."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]


def _path_first() -> str:
    """Statements that set the search path of a new interpreter to that of this one. `sys` is built in: importing it
    reads no file."""
    return f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!a}"


@contextlib.contextmanager
def _path_handed_over() -> Iterator[None]:
    """Context in which the command lines of `multiprocessing` set the search path first. For Python 3.10, which has
    neither the variable nor a flag that does nothing else."""
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
