"""Simulates what Windows lacks: first on PYTHONPATH, it changes `os`, `signal` and `sys.platform` for later imports.

Modules of the standard library and of third parties are imported before, because they chose their code at that time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import sysconfig
from types import ModuleType

FIRST = (
    *("asyncio", "concurrent.futures", "ctypes", "logging.handlers"),
    *(
        "multiprocessing.popen_spawn_posix",
        "multiprocessing.resource_tracker",
        "multiprocessing.shared_memory",
        "shutil",
    ),
    *("socket", "sqlite3", "subprocess", "tempfile"),
    *("sysconfig", "zoneinfo", "webbrowser", "readline"),
    *("getpass", "concurrent.futures.process", "concurrent.futures.thread", "multiprocessing.managers"),
    *("filelock", "jinja2", "numpy", "numpy.lib.format"),
    *("numpy.random", "onnx.shape_inference", "onnx.version_converter", "onnx_graphsurgeon"),
    *("onnxruntime", "psutil", "pydantic", "rich.console"),
    *("rich.progress", "threadpoolctl", "typer", "yaml"),
    *("pydantic.main", "pydantic.dataclasses", "pydantic.json_schema", "typer.main"),
    *("rich.prompt", "rich.table"),
)
POSIX_OS = (
    *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getpgrp", "getpgid", "setpgid", "setsid", "killpg"),
    *("pread", "pwrite", "preadv", "pwritev", "fwalk", "fchmod", "fchown", "chown", "lchown", "mkfifo", "statvfs"),
    *("fstatvfs", "sched_getaffinity", "sched_setaffinity", "sched_yield", "nice", "wait", "wait3", "wait4", "uname"),
    *("posix_fallocate", "posix_fadvise", "sendfile", "copy_file_range", "memfd_create", "pipe2", "openpty", "sysconf"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_ASYNC", "O_SYNC", "O_DSYNC", "O_NOATIME", "O_TMPFILE"),
    *("WEXITSTATUS", "WIFSIGNALED", "WTERMSIG", "WNOHANG", "getloadavg", "register_at_fork", "confstr", "ttyname"),
)
POSIX_SIGNALS = (
    *("SIGKILL", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGIO", "SIGSTOP"),
    *("pthread_sigmask", "sigwait", "setitimer", "alarm", "pthread_kill", "siginterrupt"),
)
POSIX_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "posix")


def without(module: ModuleType, names: tuple[str, ...]) -> ModuleType:
    """Return a copy of a module without some names."""
    found = ModuleType(module.__name__, module.__doc__)
    vars(found).update({name: value for name, value in vars(module).items() if name not in names})
    return found


class RealSys:
    """`sys` with its real platform, for modules of the standard library that read it when they are called."""

    platform = sys.platform

    def __getattr__(self, name: str) -> object:
        return getattr(sys, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(sys, name, value)


if os.environ.get("SBONNX_TEST_WINDOWS"):
    for name in FIRST:
        importlib.import_module(name)
    sysconfig.get_config_vars()
    os.supports_dir_fd.clear()
    sys.modules["os"] = without(os, POSIX_OS)
    sys.modules["signal"] = without(signal, POSIX_SIGNALS)
    for name in POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    for name in ("multiprocessing.spawn", "multiprocessing.util", "subprocess", "shutil"):
        sys.modules[name].sys = RealSys()  # type: ignore[attr-defined]
    sys.platform = "win32"
