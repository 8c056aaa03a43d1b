"""`Models`: sessions of a float and a quantized model, opened on demand and kept open while both fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import onnx

from sbonnx.calib.engine.runner import providers
from sbonnx.cpu import CPU
from sbonnx.errors import ModelError
from sbonnx.verify.kernels import Kernels, count
from sbonnx.verify.sessions import session

WRITTEN: Final = ("extended", "all")
"""Levels whose optimized graphs are saved, to count kernels in them."""


@dataclass
class Models:
    """Sessions of two models.

    Attributes:
        floats, quantized: files (the float one may be a serialized model).
        device: device to run on.
        without: onnxruntime graph transformers to disable in the quantized model's sessions.
        together: the float and the quantized session may be open at the same time; if so, they are kept open.
        folder: where optimized graphs are written for counting; None: nothing is counted.
    """

    floats: Path | bytes
    quantized: Path
    device: str
    without: Sequence[str]
    together: bool
    folder: Path | None = None
    _open: dict[str, Any] = field(default_factory=dict)
    _unwritten: str = ""

    def open_float(self) -> Any:
        """Return a session of the float model."""
        if "float" not in self._open or not self.together:
            return self._kept("float", session(self.floats, device=self.device))
        return self._open["float"]

    def open_quantized(self, level: str = "all") -> Any:
        """Return a session of the quantized model at a level, and write its optimized graph if that is needed.

        Raises:
            ModelError: onnxruntime rejects the model.
        """
        if level in self._open:
            return self._open[level]
        path = self._place(level) if providers(self.device) == [CPU] else None
        made = self._written(level, path) if path is not None else None
        if made is None:
            made = session(self.quantized, level=level, device=self.device, without=self.without)
        return self._kept(level, made) if level == "all" else made

    def _kept(self, name: str, made: Any) -> Any:
        if self.together:
            self._open[name] = made
        return made

    def _place(self, level: str) -> Path | None:
        """Return the path for the optimized graph of a level, or None if it is not needed."""
        wanted = self.folder is not None and level in WRITTEN and (self.together or level != "all")
        path = None if self.folder is None else self.folder / f"{level}.onnx"
        return path if wanted and path is not None and not path.exists() and not self._unwritten else None

    def _written(self, level: str, path: Path) -> Any | None:
        """Return a session whose optimized graph is written to `path`, or None if that fails."""
        try:
            return session(self.quantized, level=level, without=self.without, write=path)
        except ModelError as error:  # the model itself, or the disk: the caller retries without writing
            self._unwritten = f"its optimised graph could not be written beside temporary files ({error})"
            return None

    def kernels(self, model: onnx.ModelProto) -> Kernels:
        """Count the integer kernels on the CPU.

        Args:
            model: contents of the quantized file.
        """
        found: dict[str, onnx.ModelProto] = {}
        for level in WRITTEN:
            path = self._place(level)
            if path is not None:
                self._written(level, path)
            if self.folder is not None and (self.folder / f"{level}.onnx").exists():
                found[level] = onnx.load(str(self.folder / f"{level}.onnx"), load_external_data=False)
        if WRITTEN[0] not in found:
            return Kernels(skipped=self._unwritten or "onnxruntime wrote no optimised graph")
        return count(model, found[WRITTEN[0]], found.get(WRITTEN[1]))
