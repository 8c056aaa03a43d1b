"""Schedule of a calibration run: the segments of the graph, and the number of samples run at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.calib.engine.branches import BranchPlan, plan_branches
from sbonnx.calib.engine.observation import Key
from sbonnx.calib.engine.sample_splitter import Unit
from sbonnx.calib.engine.segments import Segment, bytes_of, bytes_of_constant, cut
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import shape, tensors_by_name
from sbonnx.options import Granularity

COUNT: Final = 128
"""Number of samples to assume if it is unknown."""

RELAYOUT: Final = 16
"""Bytes of observed tensors that can be reordered in the time to optimise, write and read one byte of weights.

Measured on two networks: 8 to 10.
"""


@dataclass(frozen=True)
class Course:
    """Schedule of a run over a graph.

    Attributes:
        segments: pieces of the main graph, then branches, in the order to run them.
        unreachable: branches that cannot be observed, with the reason.
        peak: bytes of the outputs of the largest segment for one sample.
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
    """Plan how to run `graph` to observe tensors.

    Args:
        observed: tensors to observe by their scope, "" for the main graph.
        keys: the same tensors with their channel axes.
        first: a sample; the sizes of all are estimated from it.
        kept: further tensors to compute.
        granularity, memory: see `calibrate`.
        count: number of samples, if known.
    """
    branches, unreachable, handed_on = branches_of(graph, observed)
    wanted = [*handed_on, *kept]
    sizes = _sizes(graph, first)
    main = _main_segments(graph, observed.get("", ()), wanted, sizes, granularity, memory)
    # the split of the graph must not depend on the number of cores; the number of samples run at a time may
    peak = max(sum(sizes.get(name, 0) for name in segment.outputs) for segment in main)
    by_channel = {name for name, axis in keys if axis is not None}
    whole = {name for name, _ in keys} - by_channel - set(wanted)
    pays = _pays(graph, sum(sizes.get(name, 0) for name in whole), count)
    return Course((*main, *branches), unreachable, peak, frozenset(whole if pays else ()))


def branches_of(
    graph: Graph, observed: Mapping[str, Sequence[str]]
) -> tuple[list[Segment], dict[str, str], tuple[str, ...]]:
    """Return (segments of runnable branches, reasons of the others by scope, main-graph tensors that they read)."""
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
    """Return whether keeping `size` bytes per sample in the native layout saves more than writing the weights costs."""
    weights = sum(bytes_of_constant(x) for x in tensors_by_name(graph).values() if isinstance(x, Constant))
    return size * (COUNT if count is None else count) > RELAYOUT * weights


def _sizes(graph: Graph, unit: Unit) -> dict[str, int]:
    """Return the bytes of the main graph's tensors for one sample; its inputs give the dynamic dimensions."""
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
    """Cut the main graph; "auto" uses one piece if one sample's outputs fit `memory`."""
    if granularity == "whole" or granularity == "layer":
        return cut(graph, observed, granularity, kept=kept)
    if granularity == "auto" and sum(sizes.get(name, 0) for name in {*observed, *kept}) <= memory:
        return cut(graph, observed, "whole", kept=kept)
    return cut(graph, observed, "budget", kept=kept, sizes=sizes, budget=memory)
