"""`Session`: onnxruntime session over a serialized model, and `Bound`: runs of it into buffers that are reused."""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from sbonnx.calib.data import InputSpec
from sbonnx.errors import DataError, ModelError, UnknownOperatorError
from sbonnx.graph.protos import first_node
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU
from sbonnx.system.runtime import onnxruntime, open_session, reason, session_options

S = TypeVar("S", bound="Session")

LARGE: Final = 1 << 30
"""Bytes of weights above which a session reads them in place, even if that is slower."""

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
        disabled: onnxruntime's graph transformers that do not run.
    """

    content: bytes = field(repr=False)
    weights: Mapping[str, Array] = field(default_factory=dict, repr=False)
    level: str = "all"
    aliases: Mapping[str, str] = field(default_factory=dict)
    disabled: Sequence[str] = ()


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
        disabled: onnxruntime's graph transformers that do not run.

    Raises:
        ModelError: onnxruntime rejects the model.
    """

    def __init__(self, model: SessionModel, chosen: Sequence[Any], *, threads: int | None, name: str) -> None:
        self.name = name
        self.provider = "none"
        self._chosen, self._threads = chosen, threads
        self._replaced = threading.Lock()
        self._open(model)

    def _open(self, model: SessionModel) -> None:
        self.disabled = tuple(model.disabled)
        self._aliases = dict(model.aliases)
        # the session reads the arrays in place, so they must live as long as it does
        self._weights = ort_values(model.weights)
        options = options_for(self._threads, model.level, self._weights, self._chosen)
        self._session: Any = opened(model.content, options, self._chosen, self.name, model.disabled)
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
            if self.recover(session, given):
                return self.run(feeds, outputs, where=where)
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
            if self.recover(session, feeds):
                return self.run_bound(feeds, places, where=where)
            raise DataError(f"{self.name} cannot run on {where}: {reason(error)}") from error

    def recover(self, failed: Any, feeds: Mapping[str, Array]) -> bool:
        """Replace onnxruntime's session after `failed` could not run `feeds`; return whether another run makes sense.

        Args:
            failed: session in which they were run; another thread may have replaced it.
        """
        with self._replaced:
            if failed is not self._session:
                return self._session is not None
            model = self._repaired(feeds)
            if model is None:
                return False
            self._open(model)
            return True

    def _repaired(self, feeds: Mapping[str, Array]) -> SessionModel | None:
        """Return another form of the model that runs these feeds, or None."""
        return None

    def bind(self, outputs: Sequence[str]) -> Bound:
        """Bind `outputs` to buffers that every run reuses; each thread needs its own."""
        return Bound(self, outputs)

    def opened(self) -> tuple[Any, Mapping[str, str]]:
        """Return onnxruntime's session, and the names in it of outputs that are called otherwise."""
        return self._opened(), self._aliases

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

    def __exit__(self, *exception: object) -> None:
        self.close()


def place_of(device: str) -> tuple[str, int]:
    """Return onnxruntime's (device type, number) of "cpu", "cuda" or "cuda:1"."""
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


def options_for(threads: int | None, level: str, weights: Mapping[str, Any], chosen: Sequence[Any]) -> Any:
    """Create the options of a session that runs floats as they are; `weights`: OrtValues of the external weights."""
    options = session_options(level, threads=threads)
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


def opened(content: bytes, options: Any, chosen: Sequence[Any], name: str, disabled: Sequence[str] = ()) -> Any:
    """Open onnxruntime's session over serialized `content`.

    Args:
        disabled: names of graph transformers that do not run.

    Raises:
        ModelError: onnxruntime rejects the model.
    """
    try:
        return open_session(content, options, chosen, disabled=disabled)
    except UnknownOperatorError as error:
        node = first_node(content, error.domain, error.op)
        raise ModelError(f"onnxruntime cannot load {name}: at node '{node}', {error}") from error
    except Exception as error:  # see `Session.run`
        raise ModelError(f"onnxruntime cannot load {name}: {reason(error)}") from error


def ort_values(weights: Mapping[str, Array]) -> dict[str, Any]:
    """Wrap arrays as OrtValues, without copies of contiguous ones."""
    ort = onnxruntime()
    return {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values)) for name, values in weights.items()}


class Bound:
    """Runs a session for some outputs, without copies and, for a known shape, without allocation.

    Not thread-safe: each thread needs its own.

    Args:
        runner: owner of the session.
        outputs: outputs to compute.
    """

    def __init__(self, runner: Session, outputs: Sequence[str]) -> None:
        self._runner = runner
        self._outputs = tuple(outputs)
        self._bind()

    def _bind(self) -> None:
        """Take over the session that the runner has now."""
        runner = self._runner
        self._session, aliases = runner.opened()
        session = self._session
        self._names = [aliases.get(name, name) for name in self._outputs]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._binding: Any = None
        self._views: list[Array] | None = None
        specs = {spec.name: spec for spec in runner.input_specs}
        types = {value.name: value.type for value in session.get_outputs()}
        # strings and sequences have no buffer, and on a GPU the buffers are not in host memory
        self._plain = (
            runner.provider != "CPUExecutionProvider"
            or any(spec.dtype is None or spec.dtype.kind == "O" for spec in specs.values())
            or any(types[name] not in _TYPES for name in self._names)
        )
        self._dtypes = [] if self._plain else [_TYPES[types[name]] for name in self._names]

    def run(self, feeds: Mapping[str, Array], *, where: str = "this feed") -> list[Array]:
        """Return the outputs in order, valid until the next run.

        The same list object is returned while only values change.

        Raises:
            DataError: the model cannot run on these feeds.
        """
        if self._plain:
            values = self._runner.run(feeds, self._outputs, where=where)
            return [values[name] for name in self._outputs]
        given = {spec.name: np.asarray(feeds[spec.name], order="C") for spec in self._runner.input_specs}
        shapes = {name: x.shape for name, x in given.items()}
        try:
            if self._views is not None and shapes == self._shapes:
                try:
                    self._run_binding(given)
                    return self._views
                except RuntimeError:  # data-dependent shapes: other buffers are needed
                    self._views = None
            return self._first(given, shapes)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            if self._runner.recover(self._session, given):
                self._bind()
                return self.run(feeds, where=where)
            raise DataError(f"{self._runner.name} cannot run on {where}: {reason(error)}") from error

    def _run_binding(self, given: Mapping[str, Array]) -> None:
        for name, x in given.items():
            self._binding.bind_cpu_input(name, x)
        self._session.run_with_iobinding(self._binding)

    def _first(self, given: Mapping[str, Array], shapes: dict[str, tuple[int, ...]]) -> list[Array]:
        """Run into buffers that onnxruntime allocates, and keep those."""
        self._views = None
        self._binding = self._session.io_binding()
        for name in self._names:
            self._binding.bind_output(name, "cpu")
        self._run_binding(given)
        values = self._binding.get_outputs()
        self._views = [_view(value, dtype) for value, dtype in zip(values, self._dtypes, strict=True)]
        self._shapes = shapes
        return self._views


_TYPES: Final = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        "float": "float32", "double": "float64", "float16": "float16", "bool": "bool",
        "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
        "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
    }.items()
}  # fmt: skip
"""Element types whose buffers numpy can view."""


def _view(value: Any, dtype: np.dtype[Any]) -> Array:
    """View the memory of an OrtValue as an array; the binding keeps it alive."""
    shape = tuple(value.shape())
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_byte * size).from_address(value.data_ptr())
    return np.frombuffer(memory, dtype).reshape(shape)


def _spec(value: Any) -> InputSpec:
    matched = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if not matched:
        return InputSpec(value.name, None, None)
    kind = TYPES.get(matched[1], matched[1])
    shape = None if value.shape is None else tuple(value.shape)
    try:
        return InputSpec(value.name, np.dtype(kind), shape)
    except TypeError:  # numpy does not have it: bfloat16, float8
        return InputSpec(value.name, None, shape)
