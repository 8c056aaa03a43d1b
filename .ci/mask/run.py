"""Run a command as on an x86 CPU without AVX-512, VNNI and AMX, as far as onnxruntime and /proc/cpuinfo say.

    python .ci/mask/run.py COMMAND...

Needs Linux on x86-64, a C compiler and objdump. OpenVINO, torch and numpy keep the instructions of this CPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "mask"


def library() -> Path:
    """Return onnxruntime's compiled module."""
    found = importlib.util.find_spec("onnxruntime")
    assert found is not None and found.origin is not None, "onnxruntime is not installed"
    (path,) = (Path(found.origin).parent / "capi").glob("onnxruntime_pybind11_state*.so")
    return path


def prepare() -> dict[str, str]:
    """Compile the preloaded library and list the offsets of cpuid; return the variables that activate it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    mask, offsets, cpuinfo = BUILD / "mask.so", BUILD / "offsets", BUILD / "cpuinfo"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", mask, HERE / "mask.c", "-ldl"], check=True)
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library()], check=True, capture_output=True, text=True
    ).stdout
    offsets.write_text("\n".join(re.findall(r"^\s*([0-9a-f]+):\tcpuid\s*$", listing, re.MULTILINE)) + "\n")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpuinfo.write_text("\n".join(_without(line) for line in lines) + "\n")
    return {"MASKED_OFFSETS": str(offsets), "MASKED_CPUINFO": str(cpuinfo), "LD_PRELOAD": str(mask)}


def _without(line: str) -> str:
    key, _, flags = line.partition(":")
    if key.strip() != "flags":
        return line
    kept = [flag for flag in flags.split() if not flag.startswith(("avx512", "amx")) and "vnni" not in flag]
    return f"{key}: {' '.join(kept)}"


if __name__ == "__main__":
    os.environ.update(prepare())
    os.execvp(sys.argv[1], sys.argv[1:])
