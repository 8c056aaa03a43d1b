"""Runtimes that execute or build a file, and whether a file gives the same answer in each.

To add a runtime, add a module with a `Runtime` (`sbonnx.backends.runtime_types`) and an entry in `RUNTIMES`. `absent`
returns why it cannot run here with the command that installs it, or None; `open` returns a session with `get_inputs`,
`get_outputs`, `run`, `layers` and `fallback`, and raises ModelError for a file that the runtime refuses. Where
`executes` returns False, files are only built. One without free axes has ``fixed_shapes=True``. Third parties are
imported inside functions: no runtime is a dependency. One that may crash is a `child_session.ChildSession`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sbonnx.backends.openvino.runtime import OPENVINO_RUNTIME
from sbonnx.backends.runtime_types import Runtime
from sbonnx.errors import DeviceError, RecipeError
from sbonnx.runtimes.arm64 import ARM64
from sbonnx.runtimes.opencv_dnn import OPENCV
from sbonnx.runtimes.ort_variants import ORT_CUDA, ORT_VARIANTS
from sbonnx.runtimes.qnn_emulator import QNN
from sbonnx.runtimes.rtx_builder import RTX
from sbonnx.runtimes.wasm import WASM
from sbonnx.runtimes.webgpu_plugin import WEBGPU

RUNTIMES: Final[dict[str, Runtime]] = {
    runtime.name: runtime
    for runtime in (*ORT_VARIANTS, ORT_CUDA, OPENVINO_RUNTIME, WASM, WEBGPU, ARM64, OPENCV, QNN, RTX)
}
"""Runtimes by name."""

ALL: Final = "all"
GROUPS: Final = {ALL: tuple(RUNTIMES), "onnxruntime": tuple(runtime.name for runtime in ORT_VARIANTS)}
"""Names that stand for several runtimes."""


def chosen_runtimes(names: str | Sequence[str], key: str = "--runtimes") -> tuple[Runtime, ...]:
    """Return the runtimes of a list: names separated by commas, or a sequence of names.

    "all" includes runtimes that are not installed, so that results can name them.

    Args:
        key: name of the list in messages.

    Raises:
        RecipeError: there is no such runtime, or the list is empty.
        DeviceError: one that is named is not installed; the message has the command that installs it.
    """
    parts = [part.strip() for part in (names.split(",") if isinstance(names, str) else names)]
    for part in parts:
        if part not in RUNTIMES and part not in GROUPS:
            raise RecipeError(
                f"{key} '{part}' is not known: choose from {', '.join(dict.fromkeys((*GROUPS, *RUNTIMES)))}"
            )
    for part in parts:
        why = RUNTIMES[part].absent() if part in RUNTIMES else None
        if why is not None:
            raise DeviceError(f"{key} {part}: {why}")
    chosen = dict.fromkeys(name for part in parts for name in GROUPS.get(part, (part,)))
    return tuple(RUNTIMES[name] for name in chosen)


__all__ = ["ALL", "GROUPS", "RUNTIMES", "chosen_runtimes"]
