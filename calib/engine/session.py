"""`Session`: onnxruntime session over a serialized model. Does not import the graph code, so it loads fast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy as np

from sbonnx.calib.data import InputSpec
from sbonnx.calib.engine.io_binding import Bound, reason
from sbonnx.errors import DataError, ModelError
from sbonnx.runtime import onnxruntime
from sbonnx.spec import Array

S = TypeVar("S", bound="Session")

LEVELS: Final[dict[str, str]] = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
    "kept": "ORT_DISABLE_ALL",
}
"""onnxruntime's optimisation levels. "kept": the model was optimised already."""

LARGE: Final = 1 << 30
"""Bytes of weights above which a session reads them in place, even if that is slower."""

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"

TYPES: Final[dict[str, str]] = {"float": "float32", "double": "float64", "string": "object"}
"""onnxruntime's names of element types, where they differ from numpy's."""


@dataclass(frozen=True)
class SessionModel:
    """A model in the form that onnxruntime loads.

    Attributes:
        content: the serialized model.
        weights: large external weights, by name.
        level: key of `LEVELS`.
        aliases: outputs that have another name in `content`, with that name.
    """

    content: bytes = field(repr=False)
    weights: Mapping[str, Array] = field(default_factory=dict, repr=False)
    level: str = "all"
    aliases: Mapping[str, str] = field(default_factory=dict)


class Session:
    """Session over a serialized model. Must be closed.

    A session may be run from several threads at once (not on CUDA). With one thread inside operators the results do not
    depend on the number of cores; with more, sums are split differently and the last bits may differ.

    Args:
        model: its large weights are shared with the session, not copied.
        chosen: execution providers.
        threads: threads inside operators; None: number of cores.
        name: name of the model in messages.

    Attributes:
        input_specs, output_names: inputs and outputs of the session.

    Raises:
        ModelError: onnxruntime rejects the model.
    """

    def __init__(self, model: SessionModel, chosen: Sequence[Any], *, threads: int | None, name: str) -> None:
        self.name = name
        self.provider = "none"
        self._aliases = dict(model.aliases)
        ort = onnxruntime()
        # the session reads the arrays in place, so they must live as long as it does
        weights = {n: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(w)) for n, w in model.weights.items()}
        self._weights = weights
        self._session: Any = open_session(
            model.content, session_options(threads, model.level, weights, chosen), chosen, name
        )
        self.provider = str(self._session.get_providers()[0])
        self.input_specs = tuple(_spec(value) for value in self._session.get_inputs())
        called = {alias: name for name, alias in self._aliases.items()}
        self.output_names = tuple(called.get(value.name, value.name) for value in self._session.get_outputs())

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, where: str = "this feed"
    ) -> dict[str, Any]:
        """Run the model and return outputs by name. Feeds that are not inputs of the model are ignored.

        Args:
            feeds: arrays by input name, in the model's types.
            outputs: which outputs; None: all.
            where: name of the feed in messages.

        Raises:
            DataError: the model cannot run on these feeds.
        """
        session = self._opened()
        given = {spec.name: feeds[spec.name] for spec in self.input_specs if spec.name in feeds}
        names = list(self.output_names if outputs is None else outputs)
        try:
            values = session.run([self._aliases.get(name, name) for name in names], given)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            raise DataError(f"{self.name} cannot run on {where}: {reason(error)}") from error
        return dict(zip(names, values, strict=True))

    __call__ = run

    def run_bound(self, feeds: Mapping[str, Array], places: Mapping[str, str], *, where: str = "this feed") -> Any:
        """Run the model and return the binding, which holds the values of `places` (output to device), in that order.

        Raises:
            DataError: the model cannot run on these feeds.
        """
        session = self._opened()
        try:
            binding = session.io_binding()
            for spec in self.input_specs:
                binding.bind_cpu_input(spec.name, np.asarray(feeds[spec.name], order="C"))
            for name, place in places.items():
                binding.bind_output(self._aliases.get(name, name), *place_of(place))
            session.run_with_iobinding(binding)
            return binding
        except Exception as error:  # see `run`
            raise DataError(f"{self.name} cannot run on {where}: {reason(error)}") from error

    def bind(self, outputs: Sequence[str]) -> Bound:
        """Bind `outputs` to buffers that every run reuses; each thread needs its own."""
        return Bound(self, self._opened(), outputs, self._aliases)

    def close(self) -> None:
        """Free the session. Idempotent."""
        self._session = None
        self._weights = {}

    def _opened(self) -> Any:
        if self._session is None:
            raise ValueError(f"the runner of {self.name} is closed")
        return self._session

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def place_of(device: str) -> tuple[str, int]:
    """Return onnxruntime's (device type, number) of "cpu", "cuda" or "cuda:1"."""
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


def session_options(threads: int | None, level: str, weights: Mapping[str, Any], chosen: Sequence[Any]) -> Any:
    """Build the session options; `weights` are the OrtValues of the external weights."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well, and warnings are for the model's author
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    options.inter_op_num_threads = 1
    if threads is not None:
        options.intra_op_num_threads = threads
    for pool in ("intra_op", "inter_op"):  # idle pools that spin cost more than the work: one per session
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    # Q/DQ pairs are computed unchanged, not moved and not fused into integer kernels: ranges are those of floats
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Packed weights are a second copy and are summed in another order than those of a file whose weights are not
    # constant. A model of this size is not run for speed.
    unpacked = level == "off" or sum(value.tensor_size_in_bytes() for value in weights.values()) > LARGE
    if unpacked:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if weights:
        options.add_external_initializers(list(weights), list(weights.values()))
    # external initializers are copied; share them if nothing packs them, or if they are packed already
    if (unpacked or level == "kept") and list(chosen) == [CPU]:
        for weight, value in weights.items():
            options.add_initializer(weight, value)
    return options


def open_session(content: bytes, options: Any, chosen: Sequence[Any], name: str) -> Any:
    """Open onnxruntime's session over serialized `content`.

    Raises:
        ModelError: onnxruntime rejects the model.
    """
    try:
        return onnxruntime().InferenceSession(content, options, providers=list(chosen))
    except Exception as error:  # see `Session.run`
        raise ModelError(f"onnxruntime cannot load {name}: {reason(error)}") from error


def _spec(value: Any) -> InputSpec:
    found = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if not found:
        return InputSpec(value.name, None, None)
    kind = TYPES.get(found[1], found[1])
    shape = None if value.shape is None else tuple(value.shape)
    return InputSpec(value.name, _numpy_type(kind), shape)


def _numpy_type(kind: str) -> np.dtype[Any] | None:
    """Return the numpy type of that name; None if numpy does not have it (bfloat16, float8)."""
    try:
        return np.dtype(kind)
    except TypeError:
        return None
