"""Folder of the fork server's socket. If the process is killed, the next run removes the folder."""

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
"""Maximum bytes of a socket path: the limit of macOS; Linux allows four more (unix(7))."""

NAME_BYTES: Final = len("/sbonnx-12345678/listener-12345678")


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


__all__ = ["claim_socket_folder"]
