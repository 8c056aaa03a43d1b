"""Inputs and outputs of ONNX models as entries of sessions, and models with fixed shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from sbonnx.backends.runtime_types import Entry, Runtime, RuntimeSession
from sbonnx.spec import Array


def entries_of(model: onnx.ModelProto) -> tuple[list[Entry], list[Entry]]:
    """Return inputs (without initializers) and outputs in the order of the file."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return _entries(value for value in model.graph.input if value.name not in stored), _entries(model.graph.output)


def _entries(values: Iterable[onnx.ValueInfoProto]) -> list[Entry]:
    entries = []
    for value in values:
        kind = value.type.tensor_type
        sizes = tuple(axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim)
        element = TensorProto.DataType.Name(kind.elem_type).lower()
        entries.append(Entry(value.name, f"tensor({element})", sizes))
    return entries


class FixedShapes:
    """Session of a runtime without free axes: the model is opened for the shapes of each feed, the last is kept."""

    def __init__(self, runtime: Runtime, model: Path | bytes, threads: int | None = None) -> None:
        self._runtime, self._threads = runtime, threads
        self._proto = onnx.load(str(model)) if isinstance(model, Path) else onnx.load_from_string(model)
        self._inputs, self._outputs = entries_of(self._proto)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._session: RuntimeSession | None = None

    def get_inputs(self) -> list[Entry]:
        """Return the inputs in the order of the file."""
        return self._inputs

    def get_outputs(self) -> list[Entry]:
        """Return the outputs in the order of the file."""
        return self._outputs

    def at(self, feeds: Mapping[str, Array]) -> RuntimeSession:
        """Return the session for the shapes of these feeds.

        Raises:
            ModelError: the runtime rejects the model.
        """
        shapes = {entry.name: tuple(feeds[entry.name].shape) for entry in self._inputs}
        if self._session is None or shapes != self._shapes:
            fixed = with_shapes(self._proto, shapes)
            self._session, self._shapes = self._runtime.open(fixed.SerializeToString(), self._threads), shapes
        return self._session

    def run(self, names: Any, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model for the shapes of the feeds; see `RuntimeSession.run`."""
        return self.at(feeds).run(names, feeds)

    def fallback(self) -> tuple[str, ...]:
        """Return the nodes that the last session leaves to another processor."""
        return () if self._session is None else self._session.fallback()


def with_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Return a copy whose inputs have these shapes; axes of the same name have the same size elsewhere too."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sizes: dict[str, int] = {}
    for value in copy.graph.input:
        for axis, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            if axis.dim_param:
                sizes[axis.dim_param] = size
            axis.dim_value = size
    for value in (*copy.graph.output, *copy.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in sizes:
                axis.dim_value = sizes[axis.dim_param]
    return copy


def opened(runtime: Runtime, model: Path | bytes, threads: int | None = None) -> Any:
    """Open a model in a runtime; one without free axes opens it for the shapes of each feed.

    Raises:
        ModelError: the runtime rejects the model, now or for the shapes of a feed.
    """
    return FixedShapes(runtime, model, threads) if runtime.fixed_shapes else runtime.open(model, threads)


def open_for(runtime: Runtime, model: Path | bytes, feeds: Mapping[str, Array]) -> Any:
    """Open a model in a runtime as `opened`, now: for the shapes of these feeds.

    Raises:
        ModelError: the runtime rejects the model.
    """
    session = opened(runtime, model)
    if isinstance(session, FixedShapes):
        session.at(feeds)
    return session
