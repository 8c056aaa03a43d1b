"""What the processor of this machine can do."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

CPU_FLAGS: Final = Path("/proc/cpuinfo")


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_dot_product() -> bool:
    """Whether this machine adds products of 8 bits without saturation: VNNI or AMX, or no x86 at all."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return True
    if not CPU_FLAGS.exists():
        return False  # nothing says that it has
    text = CPU_FLAGS.read_text(errors="replace")
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return any("vnni" in flag or flag == "amx_int8" for flag in flags)
