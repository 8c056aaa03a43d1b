"""`LayerRunner`: a graph, or a piece of one, in an onnxruntime session with a visible life."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np

from sbonnx.calib.readers import InputSpec
from sbonnx.errors import DataError, DeviceError, ModelError
from sbonnx.graph import Graph, serialize
from sbonnx.runtime import onnxruntime
from sbonnx.spec import Array

Optimisation = Literal["off", "basic", "extended", "all"]

LEVELS: Final[dict[str, str]] = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"

DEVICES: Final = ("cpu", "cuda", "cuda:N", "auto")

TYPES: Final[dict[str, str]] = {"float": "float32", "double": "float64", "string": "object"}
"""onnxruntime's names of element types, where they differ from numpy's."""

_LOGGED: Final = re.compile(r"\S+\.(?:cc|h):\d+\s.*?\)\s+|\[ONNXRuntimeError\] : \d+ : \w+ : ")
"""Source places and codes in front of onnxruntime's messages."""


def providers(device: str) -> list[Any]:
    """Execution providers for `device`: "cpu", "cuda", "cuda:1", or "auto" (cuda where onnxruntime has it, else cpu).

    Raises:
        DeviceError: no such device, or onnxruntime was built without it.
    """
    found = re.fullmatch(r"cpu|auto|cuda(?::(\d+))?", device)
    if not found:
        raise DeviceError(f"there is no device '{device}'; there are {', '.join(DEVICES)}")
    available = onnxruntime().get_available_providers()
    if device == "cpu" or (device == "auto" and CUDA not in available):
        return [CPU]
    if CUDA not in available:
        raise DeviceError(
            f"device '{device}' needs {CUDA}, which this onnxruntime does not have ({', '.join(available)}): "
            "pip install 'sbonnx[gpu]', or use device 'cpu'"
        )
    # TF32 keeps 10 bits of mantissa: too few to measure ranges with
    return [(CUDA, {"device_id": found[1] or "0", "use_tf32": "0"}), CPU]


def reason(error: BaseException) -> str:
    """The first useful line of an onnxruntime error."""
    text = _LOGGED.sub("", str(error)).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


class LayerRunner:
    """A session over `graph`, to be closed.

        with LayerRunner(graph, device="cpu", threads=1) as run:
            y = run(feeds)["y"]

    One runner may be called from several threads at once (not on CUDA). With one thread inside operators the numbers
    do not depend on the machine's cores; with more, sums are cut differently and the last bits may differ.

    Args:
        graph: the model; its large weights are shared with the session, not copied.
        device: see `providers`.
        threads: threads inside operators; None: as many as cores.
        optimisation: onnxruntime's level. "off" runs the operators as they stand, weights not packed.
        name: what to call the model in messages.

    Raises:
        ModelError: onnxruntime refuses the model.
        DeviceError: the device is not there, or does not work.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: str = "cpu",
        threads: int | None = None,
        optimisation: Optimisation = "all",
        name: str = "the model",
    ) -> None:
        self.name = name
        self.device = device
        model, weights = serialize(graph)
        ort = onnxruntime()
        # the session reads the arrays where they are, so they live as long as it does
        self._weights = {n: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(w)) for n, w in weights.items()}
        self._session: Any = _open(model, self._weights, device, threads, optimisation, name)
        used = self._session.get_providers()[0]
        if device.startswith("cuda") and used != CUDA:
            self.close()
            raise DeviceError(
                f"device '{device}' was asked for and onnxruntime fell back to {used}: its CUDA libraries do not load; "
                "check the driver, CUDA and cuDNN versions, or use device 'cpu'"
            )
        self.input_specs = tuple(_spec(value) for value in self._session.get_inputs())
        self.output_names = tuple(value.name for value in self._session.get_outputs())

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, where: str = "this feed"
    ) -> dict[str, Any]:
        """Outputs by name. Feeds past the model's inputs are left out.

        Args:
            feeds: arrays by input name, in the model's types.
            outputs: which outputs; None: all.
            where: what to call the feed in messages.

        Raises:
            DataError: the model cannot run on these feeds.
        """
        if self._session is None:
            raise ValueError(f"the runner of {self.name} is closed")
        given = {spec.name: feeds[spec.name] for spec in self.input_specs if spec.name in feeds}
        names = list(self.output_names if outputs is None else outputs)
        try:
            values = self._session.run(names, given)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            raise DataError(f"{self.name} cannot run on {where}: {reason(error)}") from error
        return dict(zip(names, values, strict=True))

    __call__ = run

    def close(self) -> None:
        """Free the session. Twice is once."""
        self._session = None
        self._weights = {}

    def __enter__(self) -> LayerRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(
    model: bytes, weights: Mapping[str, Any], device: str, threads: int | None, optimisation: str, name: str
) -> Any:
    """A session over serialized `model`, with the weights that stand outside it."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised as well, and warnings are for the model's author
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[optimisation])
    options.inter_op_num_threads = 1
    if threads is not None:
        options.intra_op_num_threads = threads
    for pool in ("intra_op", "inter_op"):  # idle pools that spin cost more than the work: one a session
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    if optimisation == "off":  # packed weights are summed in another order: as in a file whose weights are not constant
        options.add_session_config_entry("session.disable_prepacking", "1")
    chosen = providers(device)
    if weights:
        options.add_external_initializers(list(weights), list(weights.values()))
    if optimisation == "off" and chosen == [CPU]:  # external ones are copied; where nothing packs them, share them
        for weight, value in weights.items():
            options.add_initializer(weight, value)
    try:
        return ort.InferenceSession(model, options, providers=chosen)
    except Exception as error:  # see `run`
        raise ModelError(f"onnxruntime cannot load {name}: {reason(error)}") from error


def _spec(value: Any) -> InputSpec:
    """An `InputSpec` of a session's input."""
    found = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if not found:
        return InputSpec(value.name, None, None)
    kind = TYPES.get(found[1], found[1])
    shape = None if value.shape is None else tuple(value.shape)
    return InputSpec(value.name, _numpy_type(kind), shape)


def _numpy_type(kind: str) -> np.dtype[Any] | None:
    """The numpy type of that name, None where numpy has none (bfloat16, float8)."""
    try:
        return np.dtype(kind)
    except TypeError:
        return None
