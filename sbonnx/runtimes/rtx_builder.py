"""TensorRT-RTX, whose parser and builder need no GPU: without one that it supports, an engine is built, and not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sbonnx.backends.runtime_types import Runtime
from sbonnx.errors import DeviceError
from sbonnx.runtimes.child_session import ChildSession, missing_packages, python_program
from sbonnx.system.nvidia import compute_capability

PYTHON: Final = "SBONNX_RTX_PYTHON"
"""Environment variable with the Python interpreter that has TensorRT-RTX; without it, the running one."""

TITLE: Final = "TensorRT-RTX"

NOT_INSTALLED: Final = (
    "TensorRT-RTX is not installed: pip install --no-deps tensorrt-rtx-cu12-bindings tensorrt-rtx-cu12-libs "
    f"nvidia-cuda-runtime-cu12 here, or in an environment whose interpreter {PYTHON} names"
)


def absent() -> str | None:
    """Return why TensorRT-RTX cannot build here, or None."""
    return missing_packages(PYTHON, ("tensorrt_rtx_bindings", "tensorrt_rtx_libs"), NOT_INSTALLED)


CAPABILITIES: Final = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities of GPUs that TensorRT-RTX 1.7 has engines for. An H100 or H200 (9.0) is none of them."""


def on_gpu() -> bool:
    """Return whether engines are built for the first GPU and run on it; else they are built for 8.9 (Ada)."""
    return compute_capability() in CAPABILITIES


class RtxEngine(ChildSession):
    """Engine that TensorRT-RTX has built of a model, for the shapes of its inputs.

    Args:
        model: path of an ONNX file, or a serialized model, without free axes.
        threads: ignored.

    Raises:
        ModelError: the parser refuses nodes, which the message names, or no engine can be built.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        super().__init__(model, python_program(PYTHON, "rtx-gpu" if on_gpu() else "rtx"), "TensorRT-RTX")

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the engine on the first GPU; see `ChildSession.run`.

        Raises:
            DeviceError: there is no GPU that TensorRT-RTX supports.
        """
        if not on_gpu():
            raise DeviceError("TensorRT-RTX builds an engine here, and does not run it: that needs an RTX GPU")
        return super().run(names, feeds)


RTX: Final = Runtime(TITLE, absent, RtxEngine, name="tensorrt-rtx", executes=on_gpu, fixed_shapes=True)
