"""CPU features of this machine, and onnxruntime's names of execution providers."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"

CPU_FLAGS: Final = Path("/proc/cpuinfo")

THIS: Final = "this"
"""Name of the CPU that the process runs on, in settings."""

RECORDED_CPU: Final = "sbonnx.cpu"
"""Entry of a file's metadata that names the kind of CPU that its weights are for."""


@dataclass(frozen=True)
class TargetCpu:
    """A kind of CPU, by what its 8-bit kernels compute.

    Attributes:
        name: as in settings and in the metadata of files.
        title: the kind, for people.
        exact: uint8 x int8 products are added without saturation. Without dot products (VNNI, AMX), x86 kernels add
            two products in 16 bits (VPMADDUBSW), which holds 32,767 and not 2 * 255 * 127.
    """

    name: str
    title: str
    exact: bool


CPUS: Final = {
    cpu.name: cpu
    for cpu in (
        TargetCpu("avx2", "x86 with AVX2", exact=False),
        TargetCpu("avx512", "x86 with AVX-512, without VNNI", exact=False),
        TargetCpu("vnni", "x86 with VNNI", exact=True),
        TargetCpu("amx", "x86 with AMX", exact=True),
        TargetCpu("arm64", "ARM64", exact=True),
        TargetCpu("arm64-dot", "ARM64 with dot products", exact=True),
    )
}
"""Kinds of CPUs by name. ARM64 kernels without dot products widen before they add, so they are exact too."""


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def target_cpu(name: str = THIS) -> TargetCpu:
    """Return a kind of CPU by name; "this": the one that the process runs on.

    Raises:
        KeyError: there is no such kind.
    """
    return _cpu_of(platform.machine().lower(), CPU_FLAGS) if name == THIS else CPUS[name]


@cache
def _cpu_of(machine: str, path: Path) -> TargetCpu:
    """Return the kind of a machine; one without a list of flags counts as the least of its architecture."""
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    flags = next((set(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")), set())
    if machine not in ("x86_64", "amd64", "i386", "i686"):
        return CPUS["arm64-dot" if "asimddp" in flags else "arm64"]
    if "amx_int8" in flags:
        return CPUS["amx"]
    if flags & {"avx512_vnni", "avx_vnni"}:
        return CPUS["vnni"]
    return CPUS["avx512" if {"avx512bw", "avx512vl"} <= flags else "avx2"]
