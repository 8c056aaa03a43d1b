"""Differences of two quantized models: placement, types, scales and zero points of Q/DQ pairs, weights, operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sbonnx.graph import Constant, Graph, query
from sbonnx.qdq.requantize import Pair, read
from sbonnx.report.notebook import Result
from sbonnx.spec import Array
from sbonnx.values import INLINE


@dataclass(frozen=True)
class PairDifference:
    """A tensor that both models quantize, with other parameters or another type.

    Attributes:
        tensor: the float tensor, or the constant that holds quantized values.
        types: type in each model, such as ("int8 axis 0", "int4 axis 0").
        scale_ratio: smallest and largest ratio of the scales, second model over first; None if shapes differ.
        zero_points: number of zero points that differ; None if shapes or types differ.
        channels: number of scales in each model.
    """

    tensor: str
    types: tuple[str, str]
    scale_ratio: tuple[float, float] | None
    zero_points: int | None
    channels: tuple[int, int]


@dataclass(frozen=True)
class ConstantDifference:
    """A constant that both models have, with other values.

    Attributes:
        tensor: its name.
        types: data type and shape in each model.
        changed: number of values that differ; None if shapes differ.
        count: number of values in the first model.
        largest: largest absolute difference of the stored values; None if shapes differ or it is no number.
    """

    tensor: str
    types: tuple[str, str]
    changed: int | None
    count: int
    largest: float | None


@dataclass(frozen=True, repr=False)
class ModelDifference(Result):
    """All differences of two models; equal ones are counted.

    Attributes:
        first_pairs, second_pairs: tensors that only the first or only the second model quantizes, with their types.
        pairs: tensors that both quantize differently.
        equal_pairs: number of tensors that both quantize with equal type, scale and zero point.
        constants: constants of the same name with other values, quantized weights included.
        equal_constants: number of equal ones.
        first_constants, second_constants: names of constants that only one has.
        operators: number of nodes in each model, of operators whose numbers differ.
    """

    json_keys: ClassVar = ("equal", ...)
    frame_of: ClassVar = "pairs"

    first_pairs: dict[str, str]
    second_pairs: dict[str, str]
    pairs: tuple[PairDifference, ...]
    equal_pairs: int
    constants: tuple[ConstantDifference, ...]
    equal_constants: int
    first_constants: tuple[str, ...]
    second_constants: tuple[str, ...]
    operators: dict[str, tuple[int, int]]

    @property
    def equal(self) -> bool:
        """Whether the models have equal pairs, constants and numbers of operators."""
        differences = (self.first_pairs, self.second_pairs, self.pairs, self.constants, self.operators)
        return not any((*differences, self.first_constants, self.second_constants))


@dataclass(frozen=True, repr=False)
class FileDifference(Result):
    """Differences of two files.

    Attributes:
        first, second: the files.
        difference: their differences.
    """

    frame_of: ClassVar = "difference.pairs"

    first: str
    second: str
    difference: ModelDifference = field(metadata=INLINE)

    @property
    def equal(self) -> bool:
        """Whether the files have equal pairs, constants and numbers of operators."""
        return self.difference.equal


def difference(first: Graph, second: Graph) -> ModelDifference:
    """Compare two models by the names of their tensors.

    Args:
        first, second: graphs of files, quantized by any tool in Q/DQ form.
    """
    pairs = [{pair.source: pair for pair in read(graph)} for graph in (first, second)]
    constants = [dict(_constants(graph)) for graph in (first, second)]
    operators = [Counter(node.op for node in query.all_nodes(graph)) for graph in (first, second)]
    both = [name for name in pairs[0] if name in pairs[1]]
    changed_pairs = [row for name in both if (row := _pair(pairs[0][name], pairs[1][name])) is not None]
    shared = [name for name in constants[0] if name in constants[1]]
    compared = [_constant(name, constants[0][name], constants[1][name]) for name in shared]
    changed = [constant for constant in compared if constant is not None]
    return ModelDifference(
        first_pairs={name: pair.qparams.spec.label() for name, pair in pairs[0].items() if name not in pairs[1]},
        second_pairs={name: pair.qparams.spec.label() for name, pair in pairs[1].items() if name not in pairs[0]},
        pairs=tuple(changed_pairs),
        equal_pairs=len(both) - len(changed_pairs),
        constants=tuple(changed),
        equal_constants=len(shared) - len(changed),
        first_constants=tuple(name for name in constants[0] if name not in constants[1]),
        second_constants=tuple(name for name in constants[1] if name not in constants[0]),
        operators={
            op: (operators[0][op], operators[1][op])
            for op in sorted(operators[0] | operators[1])
            if operators[0][op] != operators[1][op]
        },
    )


def _pair(first: Pair, second: Pair) -> PairDifference | None:
    """Return the difference of two pairs; None if they are equal."""
    scales = first.qparams.scale, second.qparams.scale
    zeros = first.qparams.zero_point, second.qparams.zero_point
    types = first.qparams.spec.label(), second.qparams.spec.label()
    same_shape = scales[0].shape == scales[1].shape
    if types[0] == types[1] and same_shape and np.array_equal(*scales) and np.array_equal(*zeros):
        return None
    ratio, moved = None, None
    if same_shape:
        ratios = np.divide(*reversed(scales), dtype=np.float64)
        ratio = (float(ratios.min()), float(ratios.max()))
        moved = int((zeros[0] != zeros[1]).sum()) if types[0] == types[1] else None
    return PairDifference(first.source, types, ratio, moved, (scales[0].size, scales[1].size))


def _constants(graph: Graph) -> Iterator[tuple[str, Constant]]:
    """Yield the constants by name, without scales and zero points, which are compared as parts of pairs."""
    parameters = {
        tensor.name
        for node in query.all_nodes(graph)
        if node.op in ("QuantizeLinear", "DequantizeLinear")
        for tensor in node.inputs[1:]
    }
    for tensor in query.all_tensors(graph):
        if isinstance(tensor, Constant) and tensor.name not in parameters:
            yield tensor.name, tensor


def _constant(name: str, first: Constant, second: Constant) -> ConstantDifference | None:
    """Return the difference of two constants; None if they are equal."""
    values: tuple[Array | None, Array | None] = (query.unpacked(first), query.unpacked(second))
    types = tuple(f"{query.dtype(tensor)} ({', '.join(map(str, tensor.shape))})" for tensor in (first, second))
    kinds = (types[0], types[1])
    if values[0] is None or values[1] is None or values[0].shape != values[1].shape:
        size = int(np.prod(first.shape, dtype=np.int64))
        return (
            None
            if values[0] is values[1] is None and kinds[0] == kinds[1]
            else ConstantDifference(name, kinds, None, size, None)
        )
    unequal = values[0] != values[1]
    if values[0].dtype.kind == "f":
        unequal &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    if not unequal.any() and kinds[0] == kinds[1]:
        return None
    largest = None
    if values[0].dtype.kind in "fiu" and values[1].dtype.kind in "fiu" and unequal.any():
        largest = float(np.abs(values[0][unequal].astype(np.float64) - values[1][unequal].astype(np.float64)).max())
    return ConstantDifference(name, kinds, int(unequal.sum()), int(values[0].size), largest)


__all__ = ["ConstantDifference", "FileDifference", "ModelDifference", "PairDifference", "difference"]
