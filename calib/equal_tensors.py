"""Find equal tensors of two graphs, for example of one model converted to two opsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import SampleSplitter
from sbonnx.calib.engine.schedule import branches_of
from sbonnx.calib.engine.segments import bytes_of
from sbonnx.graph import Graph
from sbonnx.graph.digests import tensor_digests
from sbonnx.graph.extract import extract
from sbonnx.graph.query import scopes, shape

Conditions = tuple[tuple[str, bool], ...]

TRIED: Final = 2
"""Number of samples on which values are compared."""


@dataclass(frozen=True)
class EqualTensors:
    """Result of a comparison of two graphs.

    Attributes:
        same: tensors with equal digests or bit-identical values.
        unseen: tensors of branches that ran in neither graph.
    """

    same: frozenset[str] = frozenset()
    unseen: frozenset[str] = field(default=frozenset())


def equal_tensors(
    one: Graph, other: Graph, names: Sequence[str], data: Dataset, *, device: str, budget: int
) -> EqualTensors:
    """Find those of `names` that have the same values in both graphs.

    Tensors with equal digests have the same values. The others are computed in both graphs on the first `TRIED`
    samples, normally by the same kernels, and compared bit by bit.

    Args:
        names: tensors; those that are not in both graphs, in the same scope, do not count as equal.
        data: data set of `one`.
        device: where to compute them.
        budget: bytes for the tensors computed at a time.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    here, there = tensor_scopes(one), tensor_scopes(other)
    known = [name for name in names if name in here and here[name] == there.get(name)]
    ours, theirs = tensor_digests(one), tensor_digests(other)
    same = {name for name in known if ours[name] == theirs[name]}
    unsure = [name for name in known if name not in same]
    if not unsure or not _fed_alike(one, other):
        return EqualTensors(frozenset(same))
    units = list(islice(SampleSplitter(one, device=device).units(data.items()), TRIED))
    unseen: set[str] = set()
    for some in _within(unsure, bytes_of(one, _dims(one, units[0])) if units else {}, budget):
        found = [_values(graph, [(name, here[name]) for name in some], units, device) for graph in (one, other)]
        for name in some:
            pairs = [(ours.get(name), theirs.get(name)) for ours, theirs in zip(*found, strict=True)]
            if all(a is None and b is None for a, b in pairs):
                unseen.add(name)
            elif all(_equal(a, b) for a, b in pairs):
                same.add(name)
    return EqualTensors(frozenset(same), frozenset(unseen) if units else frozenset())


def tensor_scopes(graph: Graph) -> dict[str, str]:
    """Return the scope of each tensor that is an input or computed, by name."""
    found = {tensor.name: "" for tensor in graph.inputs}
    for scope, body in scopes(graph):
        found.update({tensor.name: scope for tensor in body.inputs} if scope else {})
        found.update({tensor.name: scope for node in body.nodes for tensor in node.outputs if tensor.name})
    return found


def _values(
    graph: Graph, names: Sequence[tuple[str, str]], units: Sequence[Sample], device: str
) -> list[dict[str, Any]]:
    """Compute values by name for each sample. Tensors of branches that do not run are left out."""
    observed: dict[str, list[str]] = {}
    for name, scope in names:
        observed.setdefault(scope, []).append(name)
    segments, _, handed_on = branches_of(graph, observed)
    fed = {tensor.name for tensor in graph.inputs}
    wanted = [name for name in dict.fromkeys([*observed.get("", ()), *handed_on]) if name not in fed]
    found: list[dict[str, Any]] = [dict(unit.feed) for unit in units]
    with ExitStack() as stack:
        pieces: list[tuple[Graph, list[str], Conditions]] = [(_piece(graph, wanted), wanted, ())] if wanted else []
        pieces += [(segment.model(graph), list(segment.outputs), segment.conditions) for segment in segments]
        for piece, outputs, conditions in pieces:
            run = stack.enter_context(LayerRunner(piece, device=device, threads=1))
            for unit, known in zip(units, found, strict=True):
                if all(_holds(known.get(name), value) for name, value in conditions):
                    known.update(run.run(known, outputs, where=unit.where))
    return found


def _holds(condition: Any, value: bool) -> bool:
    """Return whether an outer boolean is known and has this value."""
    return condition is not None and bool(np.asarray(condition).item()) == value


def _piece(graph: Graph, names: Sequence[str]) -> Graph:
    """Extract the part of a graph that computes these tensors from its inputs."""
    return extract(graph, [tensor.name for tensor in graph.inputs], names)


def _fed_alike(one: Graph, other: Graph) -> bool:
    """Return whether both graphs take the same feeds."""
    return [(tensor.name, shape(tensor)) for tensor in one.inputs] == [(x.name, shape(x)) for x in other.inputs]


def _within(names: Sequence[str], sizes: Mapping[str, int], budget: int) -> Iterator[list[str]]:
    """Group the names so that the tensors of a group take at most `budget` bytes, or are a single tensor."""
    some: list[str] = []
    taken = 0
    for name in names:
        size = sizes.get(name, 0)
        if some and taken + size > budget:
            yield some
            some, taken = [], 0
        some.append(name)
        taken += size
    if some:
        yield some


def _dims(graph: Graph, unit: Sample) -> dict[str, int]:
    """Return the lengths of the dynamic dimensions of the inputs."""
    pairs = [(shape(tensor) or (), unit.feed[tensor.name].shape) for tensor in graph.inputs]
    return {dim: size for dims, sizes in pairs for dim, size in zip(dims, sizes, strict=False) if isinstance(dim, str)}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two arrays are bit-identical, NaN and the sign of zero included."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


__all__ = ["EqualTensors", "equal_tensors", "tensor_scopes"]
