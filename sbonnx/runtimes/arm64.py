"""onnxruntime's CPU on ARM64, emulated by QEMU: the kernels of phones, Apple's processors and servers with ARM cores.

QEMU runs Python and onnxruntime of a folder that `sbonnx.runtimes.arm64_folder` writes. The core is Cortex-A57: with a
newer one, onnxruntime 1.24.4 has kernels that give wrong numbers in QEMU 7.2.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Final

from sbonnx.backends.runtime_types import Runtime
from sbonnx.runtimes.child_session import ENGINE_SCRIPT, ChildSession

FOLDER: Final = "SBONNX_ARM64"
"""Environment variable with the folder of `sbonnx.runtimes.arm64_folder`."""

EMULATOR: Final = "qemu-aarch64"
CORE: Final = "cortex-a57"
SYSTEM: Final = "system"
"""Part of the folder with the system: Python and its libraries."""
PACKAGES: Final = "packages"
"""Part of the folder with Python packages."""

NO_EMULATOR: Final = f"{EMULATOR} is not on PATH: apt install qemu-user"
NO_FOLDER: Final = (
    "there is no onnxruntime for ARM64: python -m sbonnx.runtimes.arm64_folder FOLDER (on Debian) downloads it, then "
    f"set {FOLDER} to FOLDER"
)


def _program() -> list[str] | str:
    """Return the command of Python for ARM64, or why there is none."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return [sys.executable]
    emulator, folder = shutil.which(EMULATOR), os.environ.get(FOLDER)
    if emulator is None:
        return NO_EMULATOR
    python = next(Path(folder, SYSTEM, "usr", "bin").glob("python3.*"), None) if folder else None
    if not folder or python is None:
        return NO_FOLDER
    packages = f"PYTHONPATH={Path(folder, PACKAGES)}"
    return [emulator, "-cpu", CORE, "-E", packages, "-L", str(Path(folder, SYSTEM)), str(python)]


def absent() -> str | None:
    """Return why ARM64 cannot run here, or None."""
    program = _program()
    return program if isinstance(program, str) else None


class Arm64Session(ChildSession):
    """Model opened by onnxruntime for ARM64.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: ignored: one thread.

    Raises:
        ModelError: onnxruntime rejects the model, crashes, or does not answer in time.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        super().__init__(model, [*_program(), str(ENGINE_SCRIPT), "cpu"], "onnxruntime for ARM64")


ARM64: Final = Runtime("onnxruntime, ARM64", absent, Arm64Session, name="arm64")
