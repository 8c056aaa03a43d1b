"""Start of step processes, by default as forks of a server with preloaded modules, isolated from the caller."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.process.step_main import POOLS, Errand, serve
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.system.isolation import safe_start

PRELOADED: Final = (
    "sbonnx.batch.process.step_main",
    "sbonnx.batch.work",
    "sbonnx.batch.jobs.outputs",
    "sbonnx.api.create",
    "numpy",
    "onnx",
    "onnx_graphsurgeon",
)
"""Modules preloaded by the fork server, so that a step starts in 20 ms instead of a second. onnxruntime is not
preloaded: its import starts a thread, and a process with threads cannot be forked safely. Steps import it in 60 to 120
ms."""

ONE_THREAD: Final = dict.fromkeys(POOLS, "1")
"""Environment of the fork server, because NumPy's BLAS would start threads too. Each step sets its own thread count."""

HOME: Final = str(Path(__file__).resolve().parents[2])
"""The folder that contains the sbonnx package."""

_starting = threading.Lock()


def environment() -> dict[str, str]:
    """Return the environment of this process, without the temporary changes by `started` in another thread."""
    with _starting:
        return dict(os.environ)


def started(errand: Errand, sink: Connection, alive: Connection, method: str | None) -> Any:
    """Start the process of a step. If the fork server was killed, a new one is started."""
    usual = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    ways = [method] if method else [usual, usual, "spawn"]
    for number, way in enumerate(ways):
        context = multiprocessing.get_context(way)
        if way == "forkserver":
            context.set_forkserver_preload(list(PRELOADED))
        process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(errand, sink, alive), name=f"sbonnx {errand.step.title}"
        )
        try:
            with _starting, safe_start(), _isolated_from_caller():
                process.start()
        except (OSError, EOFError) as error:
            if number + 1 == len(ways):
                raise OSError(f"no process can be started for '{errand.step.title}': {error}") from error
        else:
            return process
    raise AssertionError("there is always a way")


@contextlib.contextmanager
def _isolated_from_caller() -> Iterator[None]:
    """Isolate child processes from the caller while they are started.

    The caller's ``__main__`` is hidden: child processes would import it, and without a main guard each would start a
    separate batch. Callers that are daemons (a Dask worker) may start processes, because ours end with their parent
    anyway. PYTHONPATH is set, so that the fork server, which only searches the environment, finds the running sbonnx.
    A working directory on the search path ("", as in an interactive session) is moved to its end.
    """
    main = sys.modules["__main__"]
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    daemon, places, path = config.get("daemon"), os.environ.get("PYTHONPATH"), sys.path
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", *ONE_THREAD)}
    sys.modules["__main__"] = types.ModuleType("__main__")
    config["daemon"] = False
    os.environ.update(ONE_THREAD, PYTHONPATH=os.pathsep.join([HOME, places] if places else [HOME]))
    sys.path = sorted(path, key=lambda entry: entry == "")
    try:
        yield
    finally:
        sys.path = path
        sys.modules["__main__"] = main
        if daemon is None:
            config.pop("daemon", None)
        else:
            config["daemon"] = daemon
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


LONGEST_PATH: Final = 103
"""Maximum bytes of a socket path: the limit of macOS; Linux allows four more (unix(7))."""

NAME_BYTES: Final = len("/sbonnx-12345678.sbonnx/listener-12345678")


@functools.cache
def claim_socket_folder() -> None:
    """Make `multiprocessing` keep its sockets in a temporary folder of sbonnx until this process ends.

    Its own folder (``pymp-*``) would never be removed after a kill. If it already has a folder, that one is kept. If
    TMPDIR is too long for a socket path, `multiprocessing` chooses another place.
    """
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    room = len(os.fsencode(tempfile.gettempdir())) + NAME_BYTES <= LONGEST_PATH
    if room and config.get("tempdir") is None:
        stack = ExitStack()
        config["tempdir"] = str(stack.enter_context(temporary_folder()))
        atexit.register(stack.close)
