"""Run a command as on an x86 CPU without AVX-512, VNNI and AMX, as far as onnxruntime and /proc/cpuinfo say.

    python .ci/mask/run.py [--avx512] COMMAND...

With --avx512, as on a CPU that has AVX-512 but no VNNI and AMX.

Needs Linux on x86-64, a C compiler and objdump. OpenVINO, torch and numpy keep the instructions of this CPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "mask"

FIRST_AVX512: Final = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
"""Flags of the first CPUs with AVX-512, before VNNI."""

LATER: Final = (1 << 21, 1 << 1 | 1 << 6 | 1 << 11 | 1 << 12 | 1 << 14, 0b111 << 2 | 1 << 8 | 0b1111 << 22)
"""Bits of ebx, ecx and edx of leaf 7 of cpuid: extensions of AVX-512 that came with VNNI or later, and AMX."""

ALL_OF_AVX512: Final = (1 << 16 | 1 << 17 | 0b111 << 26 | 0b11 << 30 | LATER[0], *LATER[1:])


def library() -> Path:
    """Return onnxruntime's compiled module."""
    found = importlib.util.find_spec("onnxruntime")
    assert found is not None and found.origin is not None, "onnxruntime is not installed"
    (path,) = (Path(found.origin).parent / "capi").glob("onnxruntime_pybind11_state*.so")
    return path


def prepare(kept: frozenset[str] = frozenset()) -> dict[str, str]:
    """Compile the preloaded library and list the offsets of cpuid; return the variables that activate it.

    Args:
        kept: flags of AVX-512 that remain visible: none, or `FIRST_AVX512`.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    mask, offsets = BUILD / "mask.so", BUILD / "offsets"
    cpuinfo = BUILD / ("cpuinfo-avx512" if kept else "cpuinfo")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", mask, HERE / "mask.c", "-ldl"], check=True)
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library()], check=True, capture_output=True, text=True
    ).stdout
    offsets.write_text("\n".join(re.findall(r"^\s*([0-9a-f]+):\tcpuid\s*$", listing, re.MULTILINE)) + "\n")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpuinfo.write_text("\n".join(_without(line, kept) for line in lines) + "\n")
    bits = " ".join(f"{word:x}" for word in (LATER if kept else ALL_OF_AVX512))
    paths = {"MASKED_OFFSETS": str(offsets), "MASKED_CPUINFO": str(cpuinfo), "LD_PRELOAD": str(mask)}
    return {**paths, "MASKED_BITS": bits}


def _without(line: str, kept: frozenset[str]) -> str:
    key, _, flags = line.partition(":")
    if key.strip() != "flags":
        return line
    hidden = {flag for flag in flags.split() if flag.startswith(("avx512", "amx")) or "vnni" in flag} - kept
    return f"{key}: {' '.join(flag for flag in flags.split() if flag not in hidden)}"


if __name__ == "__main__":
    avx512 = sys.argv[1] == "--avx512"
    os.environ.update(prepare(FIRST_AVX512 if avx512 else frozenset()))
    command = sys.argv[2 if avx512 else 1 :]
    os.execvp(command[0], command)
