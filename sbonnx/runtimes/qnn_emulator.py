"""Qualcomm's emulator of the HTP (NPU of phones and laptops), in the package onnxruntime-qnn."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sbonnx.backends.runtime_types import Runtime
from sbonnx.runtimes.child_session import ChildSession, missing_packages, python_program

PYTHON: Final = "SBONNX_QNN_PYTHON"
"""Environment variable with the Python interpreter that has onnxruntime-qnn; without it, the running one."""

TITLE: Final = "QNN, HTP emulator"

NOT_INSTALLED: Final = (
    f"onnxruntime-qnn is not installed: pip install onnxruntime onnxruntime-qnn here, or in an environment whose "
    f"interpreter {PYTHON} names"
)


def absent() -> str | None:
    """Return why the emulator cannot run here, or None."""
    return missing_packages(PYTHON, ("onnxruntime", "onnxruntime_qnn"), NOT_INSTALLED)


class QnnSession(ChildSession):
    """Model opened on the HTP emulator. Nodes that it does not take run on onnxruntime's CPU, see `fallback`.

    Args:
        model: path of an ONNX file, or a serialized model, without free axes (of one with free axes it takes no node).
        threads: ignored: the emulator has its own.

    Raises:
        ModelError: QNN rejects the model, crashes, or does not answer in time.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        super().__init__(model, python_program(PYTHON, "qnn"), TITLE)


QNN: Final = Runtime(TITLE, absent, QnnSession, name="qnn", fixed_shapes=True)
