"""CPU features of this machine, and onnxruntime's names of execution providers."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"

CPU_FLAGS: Final = Path("/proc/cpuinfo")


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_dot_product() -> bool:
    """Whether this CPU accumulates 8-bit products without saturation: x86 with VNNI or AMX, or not x86 at all."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return True
    if not CPU_FLAGS.exists():
        return False  # unknown: assume that it does not
    text = CPU_FLAGS.read_text(errors="replace")
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return any("vnni" in flag or flag == "amx_int8" for flag in flags)
