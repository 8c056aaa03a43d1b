"""Shape arithmetic on Python numbers: integers and short vectors of integers.

A graph with dynamic axes computes shapes from shapes. With tensors, each such operation launches a small kernel, and
its result must be copied to the host before it can be used as a shape. Python numbers avoid both, and sizes stay
symbolic under torch.compile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.torchnet import Call

LONGEST: Final = 32
"""Maximum length of a vector of sizes; longer ones are tensors."""

Value = Any
"""An int, bool or SymInt of torch.compile for rank 0, a tuple of them for rank 1."""


def tuple_of(x: Value) -> tuple[Any, ...]:
    """Return a vector unchanged and a number as a tuple of length 1."""
    return x if isinstance(x, tuple) else (x,)


def shape(call: Call, x: Value) -> Value:
    """ONNX Shape of a tensor or of sizes."""
    sizes = tuple(x.shape) if hasattr(x, "shape") else ((len(x),) if isinstance(x, tuple) else ())
    return sizes[call.integer("start", 0) : call.attributes.get("end")]


def size(call: Call, x: Value) -> Value:
    """ONNX Size of a tensor or of sizes."""
    return math.prod(x.shape) if hasattr(x, "shape") else len(tuple_of(x))


def gather(call: Call, x: Value, picks: Value) -> Value:
    """ONNX Gather of a vector."""
    return tuple(x[pick] for pick in picks) if isinstance(picks, tuple) else x[picks]


def slice_(call: Call, x: Value, begin: Value, end: Value, axes: Value = None, steps: Value = None) -> Value:
    """ONNX Slice of a vector; with a negative step, an end before the start of the vector includes its first value."""
    step = 1 if steps is None else tuple_of(steps)[0]
    start, stop = tuple_of(begin)[0], tuple_of(end)[0]
    return x[slice(start, None if step < 0 and stop < -len(x) else stop, step)]


def squeeze(call: Call, x: Value, axes: Value = None) -> Value:
    """ONNX Squeeze: a vector of length 1 becomes a number."""
    return x[0] if isinstance(x, tuple) and len(x) == 1 else x


def reshape(call: Call, x: Value, shape: Value) -> Value:
    """ONNX Reshape to a vector or a number."""
    return tuple_of(x) if len(shape) else tuple_of(x)[0]


def cast(call: Call, x: Value) -> Value:
    """ONNX Cast between integers and bools."""
    if int(call.attributes["to"]) == onnx.TensorProto.BOOL:
        return _each(lambda value: value != 0, x)
    return _each(lambda value: int(value) if isinstance(value, bool) else value, x)


def _each(function: Callable[..., Any], *inputs: Value) -> Value:
    """Apply a function of numbers to numbers and vectors, with broadcasting."""
    length = max((len(x) for x in inputs if isinstance(x, tuple)), default=None)
    if length is None:
        return function(*inputs)
    if any(isinstance(x, tuple) and not x for x in inputs):
        return ()
    wide = [x if isinstance(x, tuple) and len(x) == length else tuple_of(x)[:1] * length for x in inputs]
    return tuple(function(*values) for values in zip(*wide, strict=True))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Value]:
    """Return the element-wise table entry of a function of numbers."""

    def row(call: Call, *inputs: Value) -> Value:
        return _each(function, *inputs)

    return row


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    """Return the element-wise table entry that folds a binary function over any number of inputs."""

    def row(call: Call, *inputs: Value) -> Value:
        result = inputs[0]
        for other in inputs[1:]:
            result = _each(function, result, other)
        return result

    return row


def _div(a: Any, b: Any) -> Any:
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def mod(call: Call, a: Value, b: Value) -> Value:
    """ONNX Mod: the result has the sign of the divisor, or of the dividend if fmod is set."""
    if call.integer("fmod", 0):
        return _each(lambda x, y: x - _div(x, y) * y, a, b)
    return _each(operator.mod, a, b)


def constant_of_shape(call: Call, shape: Value) -> Value:
    """ONNX ConstantOfShape with a result of rank 0 or 1."""
    value = call.attributes.get("value")
    filled = np.zeros(1) if value is None else np.asarray(value)
    fill = filled.reshape(-1)[0].item()
    return (fill,) * shape[0] if len(shape) else fill


def _reduced(function: Callable[[Any], Any]) -> Callable[..., Value]:
    """Return the table entry that reduces a vector to one number."""

    def row(call: Call, x: Value, axes: Value = None) -> Value:
        result = function(tuple_of(x))
        return (result,) if isinstance(x, tuple) and call.integer("keepdims", 1) else result

    return row


SIZES: Final[dict[str, Callable[..., Value]]] = {
    "Shape": shape,
    "Size": size,
    "Gather": gather,
    "Slice": slice_,
    "Concat": lambda call, *parts: tuple(value for part in parts for value in part),
    "Squeeze": squeeze,
    "Unsqueeze": lambda call, x, axes=None: (x,),
    "Reshape": reshape,
    "Identity": lambda call, x: x,
    "Cast": cast,
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(_div),
    "Mod": mod,
    "Neg": _elementwise(operator.neg),
    "Abs": _elementwise(abs),
    "Max": _folded(max),
    "Min": _folded(min),
    "Sum": _folded(operator.add),
    "Equal": _elementwise(operator.eq),
    "Less": _elementwise(operator.lt),
    "LessOrEqual": _elementwise(operator.le),
    "Greater": _elementwise(operator.gt),
    "GreaterOrEqual": _elementwise(operator.ge),
    "Not": _elementwise(operator.not_),
    "And": _elementwise(lambda a, b: a and b),
    "Or": _elementwise(lambda a, b: a or b),
    "Where": _elementwise(lambda condition, a, b: a if condition else b),
    "ConstantOfShape": constant_of_shape,
    "ReduceProd": _reduced(math.prod),
    "ReduceSum": _reduced(sum),
    "ReduceMax": _reduced(max),
    "ReduceMin": _reduced(min),
}
"""Supported shape arithmetic by op. For any other op, sizes are converted to a tensor."""
