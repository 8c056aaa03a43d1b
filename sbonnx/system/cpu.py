"""CPU features of this machine, and onnxruntime's names of execution providers."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from sbonnx.errors import RecipeError
from sbonnx.system.input_files import read_json

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
    """Return a kind of CPU.

    Args:
        name: "this": that of the CPU that the process runs on; a key of `CPUS`; or the path of a table of kernel costs:
            that of the machine where it was measured.

    Raises:
        RecipeError: there is neither such a kind nor such a table.
    """
    if name == THIS:
        return _cpu_of(platform.machine().lower(), CPU_FLAGS)
    return CPUS[name] if name in CPUS else CPUS[_kind_of_table(name)]


def _kind_of_table(path: str) -> str:
    try:
        kind = read_json(path)["machine"]["class"]
        if kind not in CPUS:
            raise ValueError(f"kind of CPU '{kind}'")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {str(error)[:100]}"
        raise RecipeError(
            f"CPU: '{path}' is neither a kind of CPU ({', '.join((THIS, *CPUS))}) nor a table of kernel costs that "
            f"names its kind ({reason}): sbonnx tune --output FILE writes one"
        ) from error
    return str(kind)


@cache
def cpu_facts(path: Path) -> tuple[str, frozenset[str]]:
    """Return the model and the flags of the first CPU in a list as that of Linux; empty ones without such a list."""
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines())]
    model = next((value for key, value in lines if key in ("model name", "Processor", "CPU part")), "")
    return model, frozenset(next((value.split() for key, value in lines if key in ("flags", "Features")), ()))


def _cpu_of(machine: str, path: Path) -> TargetCpu:
    """Return the kind of a machine; one without a list of flags counts as the least of its architecture."""
    _, flags = cpu_facts(path)
    if machine not in ("x86_64", "amd64", "i386", "i686"):
        return CPUS["arm64-dot" if "asimddp" in flags else "arm64"]
    if "amx_int8" in flags:
        return CPUS["amx"]
    if flags & {"avx512_vnni", "avx_vnni"}:
        return CPUS["vnni"]
    return CPUS["avx512" if {"avx512bw", "avx512vl"} <= flags else "avx2"]
