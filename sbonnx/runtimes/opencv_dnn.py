"""OpenCV's DNN module, which reads the Q/DQ pairs of convolutional networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.backends.fixed_shapes import entries_of
from sbonnx.backends.runtime_types import Entry, ExecutedLayer, Runtime
from sbonnx.errors import DataError, ModelError
from sbonnx.graph.protos import single_line

NOT_INSTALLED: Final = "OpenCV is not installed: pip install opencv-python-headless"


def absent() -> str | None:
    """Return why OpenCV cannot run here, or None."""
    return NOT_INSTALLED if find_spec("cv2") is None else None


def _reason(error: Any) -> str:
    """Return the description and function of an error of OpenCV, without the path of its source file."""
    where = f" in {error.func}" if getattr(error, "func", "") else ""
    return f"{single_line(getattr(error, 'err', '') or error)}{where}"


class OpenCvSession:
    """Network of OpenCV's DNN module on the CPU.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: threads of the whole process; None: OpenCV's default.

    Raises:
        ModelError: OpenCV rejects the model; the message names the node.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        import cv2

        proto = onnx.load(str(model)) if isinstance(model, Path) else onnx.load_from_string(model)
        self._inputs, self._outputs = entries_of(proto)
        if threads is not None:
            cv2.setNumThreads(threads)
        log = cv2.utils.logging
        level = log.setLogLevel(log.LOG_LEVEL_SILENT)  # errors are raised as well
        try:
            self._net = cv2.dnn.readNetFromONNX(np.frombuffer(proto.SerializeToString(), np.uint8))
        except cv2.error as error:
            raise ModelError(f"OpenCV refuses the model: {_reason(error)}") from error
        finally:
            log.setLogLevel(level)

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs in the order of the file."""
        return self._inputs

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs in the order of the file."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model and return the named outputs, or all; inputs that are missing in `feeds` raise KeyError.

        Raises:
            DataError: OpenCV fails on the feeds.
        """
        import cv2

        wanted = [entry.name for entry in self._outputs] if names is None else list(names)
        try:
            for entry in self._inputs:
                self._net.setInput(feeds[entry.name], entry.name)
            return [np.array(values) for values in self._net.forward(wanted)]
        except cv2.error as error:
            raise DataError(f"OpenCV cannot run the model: {_reason(error)}") from error

    def layers(self) -> list[ExecutedLayer]:
        """Return no kernels: OpenCV does not say which compute on integers."""
        return []

    def fallback(self) -> tuple[str, ...]:
        """Return no nodes: all run on the CPU."""
        return ()


OPENCV: Final = Runtime("OpenCV DNN", absent, OpenCvSession, name="opencv", fixed_shapes=True)
