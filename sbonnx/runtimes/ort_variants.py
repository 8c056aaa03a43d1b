"""onnxruntime's CPU at each optimization level, with exact and saturating 8-bit products, and its CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from sbonnx.backends.runtime_types import Entry, ExecutedLayer, Runtime
from sbonnx.system.cpu import CUDA
from sbonnx.system.nvidia import gpu_count
from sbonnx.system.runtime import nodes_elsewhere, onnxruntime
from sbonnx.verify.sessions import session


class OrtSession:
    """Session of onnxruntime with the interface of a `RuntimeSession`.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: threads inside operators; None: number of cores.
        level, exact, device: see `sbonnx.verify.sessions.session`.

    Raises:
        ModelError: onnxruntime rejects the model.
        DeviceError: the device does not work.
    """

    def __init__(
        self,
        model: Path | bytes,
        threads: int | None = None,
        *,
        level: str = "all",
        exact: bool | None = None,
        device: str = "cpu",
    ) -> None:
        self._session = session(model, level=level, threads=threads, exact=exact, device=device)
        self._device = device

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs in the order of the file."""
        inputs: Sequence[Entry] = self._session.get_inputs()
        return inputs

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs in the order of the file."""
        outputs: Sequence[Entry] = self._session.get_outputs()
        return outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model and return the named outputs, or all."""
        results: list[Any] = self._session.run(names, dict(feeds))
        return results

    def layers(self) -> list[ExecutedLayer]:
        """Return no kernels: onnxruntime names them in its optimized graph, see `sbonnx.verify.kernel_count`."""
        return []

    def fallback(self) -> tuple[str, ...]:
        """Return the nodes that run on the CPU instead of another device."""
        return () if self._device == "cpu" else nodes_elsewhere(self._session, CUDA)


def _no_cuda() -> str | None:
    """Return why onnxruntime cannot run on a GPU here, or None."""
    if CUDA not in onnxruntime().get_available_providers():
        return "this onnxruntime has no CUDA provider: pip install 'sbonnx[gpu]' in an environment without onnxruntime"
    return None if gpu_count() else "there is no NVIDIA GPU here"


def _variant(name: str, title: str, **settings: Any) -> Runtime:
    return Runtime(f"onnxruntime, {title}", lambda: None, partial(OrtSession, **settings), name=f"onnxruntime-{name}")


ORT_REFERENCE: Final = _variant("off", "level off", level="off")
"""Computes each operator as the file has it: the semantics that others are compared with."""

ORT_VARIANTS: Final = (
    ORT_REFERENCE,
    _variant("basic", "level basic", level="basic"),
    _variant("extended", "level extended", level="extended"),
    _variant("exact", "exact products", exact=True),
    _variant("saturating", "saturating products", exact=False),
)
"""The last two are level all, with the 8-bit products of CPUs with and without VNNI."""

ORT_CUDA: Final = Runtime("onnxruntime, CUDA", _no_cuda, partial(OrtSession, device="cuda"), name="onnxruntime-cuda")
"""Computes Q/DQ pairs in float: its kernels of convolutions and products take no 8-bit codes."""
