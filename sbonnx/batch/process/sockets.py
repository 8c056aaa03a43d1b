"""The folder of the fork server's socket, removed by the next run where its process is killed."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import tempfile
from contextlib import ExitStack
from typing import Any, Final

from sbonnx.graph.storage.temporary import temporary_folder

LONGEST_PATH: Final = 103
"""Bytes of a socket's name: macOS allows so many, Linux four more (unix(7))."""

NAME_BYTES: Final = len("/sbonnx-12345678/listener-12345678")


@functools.cache
def claim_socket_folder() -> None:
    """Have `multiprocessing` keep its sockets in a temporary folder of sbonnx until this process ends.

    It would make one itself (``pymp-*``), which stays for ever after a kill. A folder that it has made is kept, and
    where TMPDIR is too long for a socket's name, it finds another place.
    """
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    room = len(os.fsencode(tempfile.gettempdir())) + NAME_BYTES <= LONGEST_PATH
    if room and config.get("tempdir") is None:
        stack = ExitStack()
        config["tempdir"] = str(stack.enter_context(temporary_folder()))
        atexit.register(stack.close)


__all__ = ["claim_socket_folder"]
