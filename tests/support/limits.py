"""Processes with limits of the system, set between two `exec`.

A `preexec_fn` runs Python between `fork` and `exec`. In a process with threads, as that of the tests, it may wait for
a lock that no thread will release, and `subprocess` waits for it without a timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

START: Final = """
import os, resource, sys
for name, value in zip(sys.argv[1].split(), map(int, sys.argv[2].split())):
    resource.setrlimit(getattr(resource, name), (value, value))
os.execvp(sys.argv[3], sys.argv[3:])
"""


def limited(command: Sequence[str], **limits: int) -> list[str]:
    """Return a command that sets limits and runs `command`.

    Args:
        command: program and arguments.
        limits: values by the names of `resource`, such as RLIMIT_FSIZE, in bytes.
    """
    if not limits:
        return list(command)
    return [sys.executable, "-S", "-c", START, " ".join(limits), " ".join(map(str, limits.values())), *command]
