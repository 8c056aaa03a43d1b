"""What of a graph is run, in which pieces, and how many samples at a time, so that a plan's tensors are observed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.calib.engine.branches import BranchPlan, plan_branches
from sbonnx.calib.engine.observation import Key
from sbonnx.calib.engine.sample_splitter import Unit
from sbonnx.calib.engine.segments import Granularity, Segment, bytes_of, bytes_of_constant, cut
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import shape, tensors_by_name

COUNT: Final = 128
"""Samples to reckon with where nobody knows how many there are."""

RELAYOUT: Final = 16
"""Bytes of observed tensors that are put back into the usual order in the time it takes to optimise, write and read a
byte of weights once more (measured on two nets: 8 to 10)."""


@dataclass(frozen=True)
class Course:
    """How to run a graph.

    Attributes:
        segments: pieces of the main graph, then branches, in the order to run them.
        unreachable: branches that cannot be observed, and why.
        peak: bytes that the outputs of the largest segment take for one sample.
        any_layout: see `Observation`.
    """

    segments: tuple[Segment, ...]
    unreachable: Mapping[str, str]
    peak: int
    any_layout: frozenset[str]


def course_of(
    graph: Graph,
    observed: Mapping[str, Sequence[str]],
    keys: Collection[Key],
    first: Unit,
    *,
    kept: Sequence[str],
    granularity: Granularity,
    memory: int,
    count: int | None,
) -> Course:
    """How to run `graph` so that tensors are observed.

    Args:
        observed: tensors to observe by the scope they lie in, "" for the main graph.
        keys: the same with their channel axes.
        first: a sample; the sizes of all are reckoned from it.
        kept: tensors that are wanted besides.
        granularity, memory: see `calibrate`.
        count: number of samples, if known.
    """
    branches, unreachable, handed_on = branches_of(graph, observed)
    wanted = [*handed_on, *kept]
    sizes = _sizes(graph, first)
    main = _main_segments(graph, observed.get("", ()), wanted, sizes, granularity, memory)
    # how the graph is cut must not depend on the machine's cores; how many samples run at a time may
    peak = max(sum(sizes.get(name, 0) for name in segment.outputs) for segment in main)
    by_channel = {name for name, axis in keys if axis is not None}
    whole = {name for name, _ in keys} - by_channel - set(wanted)
    pays = _pays(graph, sum(sizes.get(name, 0) for name in whole), count)
    return Course((*main, *branches), unreachable, peak, frozenset(whole if pays else ()))


def branches_of(
    graph: Graph, observed: Mapping[str, Sequence[str]]
) -> tuple[list[Segment], dict[str, str], tuple[str, ...]]:
    """(branches that can be models of their own, why others cannot be observed, what they read of the main graph)."""
    inner: BranchPlan = plan_branches(graph, {scope: list(names) for scope, names in observed.items() if scope})
    unreachable = dict(inner.unreachable)
    kept: list[Segment] = []
    for segment in inner.segments:
        lost = next((why for scope, why in unreachable.items() if segment.scope.startswith(f"{scope}/")), None)
        if lost is None and segment.outputs:
            try:
                segment.model(graph)
            except ModelError as error:
                lost = f"its branch cannot run apart: {error}"
        if lost is None:
            kept.append(segment)
        else:
            unreachable[segment.scope] = lost
    return kept, unreachable, inner.kept


def _pays(graph: Graph, size: int, count: int | None) -> bool:
    """Whether leaving `size` bytes a sample in onnxruntime's layout saves more than writing the weights once more."""
    weights = sum(bytes_of_constant(x) for x in tensors_by_name(graph).values() if isinstance(x, Constant))
    return size * (COUNT if count is None else count) > RELAYOUT * weights


def _sizes(graph: Graph, unit: Unit) -> dict[str, int]:
    """Bytes of the main graph's tensors for one sample; dynamic dimensions are read off its inputs."""
    dims: dict[str, int] = {}
    for tensor in graph.inputs:
        for dim, length in zip(shape(tensor) or (), unit.feed[tensor.name].shape, strict=False):
            if isinstance(dim, str):
                dims[dim] = length
    return bytes_of(graph, dims)


def _main_segments(
    graph: Graph,
    observed: Sequence[str],
    kept: Sequence[str],
    sizes: Mapping[str, int],
    granularity: Granularity,
    memory: int,
) -> list[Segment]:
    """The pieces of the main graph; "auto" asks whether one sample's outputs fit `memory`."""
    if granularity == "whole" or granularity == "layer":
        return cut(graph, observed, granularity, kept=kept)
    if granularity == "auto" and sum(sizes.get(name, 0) for name in {*observed, *kept}) <= memory:
        return cut(graph, observed, "whole", kept=kept)
    return cut(graph, observed, "budget", kept=kept, sizes=sizes, budget=memory)
