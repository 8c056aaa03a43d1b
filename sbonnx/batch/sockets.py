"""The folder of the fork server's socket, removed by the next run where its process is killed."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
from contextlib import ExitStack
from typing import Any

from sbonnx.graph.temporary import temporary_folder


@functools.cache
def claim_socket_folder() -> None:
    """Have `multiprocessing` keep its sockets in a temporary folder of sbonnx until this process ends.

    It would make one itself (``pymp-*``), which stays for ever after a kill. A folder that it has made is kept.
    """
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    if config.get("tempdir") is None:
        stack = ExitStack()
        config["tempdir"] = str(stack.enter_context(temporary_folder()))
        atexit.register(stack.close)
