"""Tables of kernel costs measured on single machines: which machine this is, and where its table is stored."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from sbonnx.system.cpu import CPU_FLAGS, CPUS, THIS, cpu_facts, target_cpu

CACHE: Final = "SBONNX_CACHE"
"""Environment variable with the folder of files that sbonnx stores for a user."""

RECORDED_COSTS: Final = "sbonnx.kernel_costs"
"""Entry of a file's metadata with the digest of the table of kernel costs, if it was none of the package."""

RUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
"""Packages that contain onnxruntime."""

VECTORS: Final = ("avx", "amx", "fma", "f16c", "sse4", "asimd", "sve", "i8mm", "bf16")
"""Beginnings of the CPU flags on which the choice of kernels depends."""


@dataclass(frozen=True)
class Fingerprint:
    """Properties of a machine on which the times of kernels depend.

    Attributes:
        cpu: model of the CPU.
        architecture: such as "x86_64".
        flags: vector instructions that the CPU lists, sorted.
        onnxruntime: version of the package; "" if it is not installed as one.
    """

    cpu: str
    architecture: str
    flags: tuple[str, ...]
    onnxruntime: str

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def fingerprint() -> Fingerprint:
    """Return the fingerprint of this machine."""
    model, flags = cpu_facts(CPU_FLAGS)
    vectors = sorted(flag for flag in flags if flag.startswith(VECTORS))
    return Fingerprint(model or platform.processor(), platform.machine(), tuple(vectors), _runtime_version())


@cache
def _runtime_version() -> str:
    for name in RUNTIMES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def user_cache() -> Path:
    """Return the folder of files that sbonnx stores for a user; it may not exist.

    SBONNX_CACHE, or else "sbonnx" in the cache folder of the system: LOCALAPPDATA, ~/Library/Caches, or XDG_CACHE_HOME
    (~/.cache).
    """
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~\\AppData\\Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "sbonnx"


def own_table() -> Path:
    """Return the path of the table of this machine, which `sbonnx tune` writes."""
    return user_cache() / "kernel_costs" / f"{target_cpu().name}-{fingerprint().digest}.json"


def table_of(cpu: str) -> Path | None:
    """Return the table of kernel costs of a CPU; None: the bundled one of its kind.

    Args:
        cpu: "this", a key of `CPUS`, or the path of a table.
    """
    if cpu in CPUS:
        return None
    path = own_table() if cpu == THIS else Path(cpu)
    return path if cpu != THIS or os.path.lexists(path) else None
