"""`Bound`: I/O binding of a session that reuses its output buffers for every run."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.spec import Array

if TYPE_CHECKING:
    from sbonnx.calib.engine.session import Session

_LOGGED: Final = re.compile(r"\S+\.(?:cc|h):\d+\s.*?\)\s+|\[ONNXRuntimeError\] : \d+ : \w+ : ")
"""Source locations and error codes at the start of onnxruntime's messages."""


def reason(error: BaseException) -> str:
    """Return the first useful line of an onnxruntime error."""
    text = _LOGGED.sub("", str(error)).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


class Bound:
    """Runs a session for some outputs, without copies and, for a known shape, without allocation.

    Not thread-safe: each thread needs its own.

    Args:
        runner: owner of the session.
        session: onnxruntime's session.
        outputs: outputs to compute.
        aliases: names of outputs that differ in the session.
    """

    def __init__(self, runner: Session, session: Any, outputs: Sequence[str], aliases: Mapping[str, str]) -> None:
        self._runner = runner
        self._session = session
        self._outputs = tuple(outputs)
        self._names = [aliases.get(name, name) for name in outputs]
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
            found = self._runner.run(feeds, self._outputs, where=where)
            return [found[name] for name in self._outputs]
        given = {spec.name: np.asarray(feeds[spec.name], order="C") for spec in self._runner.input_specs}
        shapes = {name: x.shape for name, x in given.items()}
        try:
            if self._views is not None and shapes == self._shapes:
                try:
                    return self._again(given)
                except RuntimeError:  # data-dependent shapes: other buffers are needed
                    self._views = None
            return self._first(given, shapes)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            raise DataError(f"{self._runner.name} cannot run on {where}: {reason(error)}") from error

    def _again(self, given: Mapping[str, Array]) -> list[Array]:
        """Run into the buffers of the previous run."""
        for name, x in given.items():
            self._binding.bind_cpu_input(name, x)
        self._session.run_with_iobinding(self._binding)
        if self._views is None:
            raise RuntimeError("no buffers are bound")
        return self._views

    def _first(self, given: Mapping[str, Array], shapes: dict[str, tuple[int, ...]]) -> list[Array]:
        """Run into buffers that onnxruntime allocates, and keep those."""
        self._views = None
        self._binding = self._session.io_binding()
        for name, x in given.items():
            self._binding.bind_cpu_input(name, x)
        for name in self._names:
            self._binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._binding)
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
