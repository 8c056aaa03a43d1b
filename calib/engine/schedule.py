"""Schedule of a calibration run: the segments of the graph, and the number of samples run at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.engine.segments import Segment, bytes_of, bytes_of_constant, cut, needed, produced, reads_of
from sbonnx.errors import ModelError
from sbonnx.graph import Body, Constant, Graph, Node
from sbonnx.graph.query import bodies, constant, shape, tensors_by_name
from sbonnx.options import RunOptions
from sbonnx.report.codes import Reason

PICKED_BY: Final = {"then_branch": True, "else_branch": False}
"""The value of an If's condition under which each of its bodies runs."""


@dataclass(frozen=True)
class Branch:
    """One body of an If.

    Attributes:
        scope: its path.
        outer: the path of the graph or body that holds the If.
        node: the If.
        body: the body itself.
        picks: the value of the condition under which it runs.
    """

    scope: str
    outer: str
    node: Node
    body: Body
    picks: bool

    @property
    def condition(self) -> str:
        """Name of the boolean condition."""
        name: str = self.node.inputs[0].name
        return name

    @property
    def never(self) -> bool:
        """Whether a constant condition prevents the branch from ever running."""
        value = constant(self.node.inputs[0])
        return value is not None and bool(value.item()) != self.picks


def branches(graph: Body, path: str = "") -> Iterator[Branch]:
    """Yield every If body, outer ones first; not those inside Loop and Scan bodies, which run many times per sample."""
    for node in graph.nodes:
        if node.op != "If":
            continue
        for attribute, body in bodies(node):
            scope = f"{path}/{node.name}/{attribute}" if path else f"{node.name}/{attribute}"
            yield Branch(scope, path, node, body, PICKED_BY[attribute])
            yield from branches(body, scope)


@dataclass(frozen=True)
class BranchPlan:
    """Segments that observe the branches of a graph.

    Attributes:
        segments: one per branch with something to observe in or below it, outer ones first.
        kept: tensors of the main graph that these read.
        unreachable: scopes that cannot be observed, with the reason.
    """

    segments: tuple[Segment, ...]
    kept: tuple[str, ...]
    unreachable: Mapping[str, Reason]


def plan_branches(graph: Graph, observed: Mapping[str, Sequence[str]]) -> BranchPlan:
    """Plan the segments that observe `observed` (scope to tensors) in branches.

    A branch outputs those of its tensors that the branches inside it read; tensors from further out are read directly.
    """
    by_scope = {branch.scope: branch for branch in branches(graph)}
    unreachable = {
        scope: Reason("in-loop-body", "it is in the body of a Loop or Scan")
        for scope in observed
        if scope and scope not in by_scope
    }
    segments: list[Segment] = []
    wanted: dict[str, dict[str, None]] = {}  # by scope: its tensors that branches inside it read
    for branch in reversed(list(by_scope.values())):  # inner ones first
        inside = list(observed.get(branch.scope, ()))
        enclosing = [branch]  # innermost first
        while enclosing[-1].outer:
            enclosing.append(by_scope[enclosing[-1].outer])
        never = next((outer.node.name for outer in enclosing if outer.never), None)
        if never is not None and inside:
            unreachable[branch.scope] = Reason(
                "branch-never-ran", f"the condition of '{never}' is a constant that never picks its branch"
            )
        handed_on = wanted.get(branch.scope, {})
        if never is not None or not (inside or handed_on):
            continue
        segment = _segment(enclosing, inside, handed_on)
        segments.append(segment)
        missing = dict.fromkeys(segment.reads)  # registered with the enclosing scopes that compute them
        for outer in enclosing[1:]:
            makers = produced(outer.body)
            wanted.setdefault(outer.scope, {}).update(dict.fromkeys(name for name in missing if name in makers))
            missing = {name: None for name in missing if name not in makers}
        wanted.setdefault("", {}).update(missing)
    return BranchPlan(tuple(reversed(segments)), tuple(wanted.get("", {})), unreachable)


def _segment(enclosing: Sequence[Branch], inside: Sequence[str], handed_on: Iterable[str]) -> Segment:
    """Build the segment of the first of some branches, each inside the next."""
    branch = enclosing[0]
    makers = produced(branch.body)
    targets = [name for name in dict.fromkeys([*inside, *handed_on]) if name in makers]
    nodes = needed(branch.body, targets)
    computed = {tensor.name for node in nodes for tensor in node.outputs}
    inputs = dict.fromkeys(name for node in nodes for name in reads_of(node) if name not in computed)
    conditions = [(at.condition, at.picks) for at in enclosing[::-1] if not isinstance(at.node.inputs[0], Constant)]
    names = tuple(node.name for node in nodes)
    return Segment(tuple(inputs), tuple(targets), tuple(inside), names, branch.scope, tuple(conditions))


COUNT: Final = 128
"""Number of samples to assume if it is unknown."""

RELAYOUT: Final = 16
"""Bytes of observed tensors that can be reordered in the time to optimise, write and read one byte of weights.

Measured on two networks: 8 to 10.
"""


@dataclass(frozen=True)
class Schedule:
    """Schedule of a run over a graph.

    Attributes:
        segments: pieces of the main graph, then branches, in the order to run them.
        unreachable: branches that cannot be observed, with the reason.
        peak: bytes of the outputs of the largest segment for one sample.
        any_layout: see `Observation`.
    """

    segments: tuple[Segment, ...]
    unreachable: Mapping[str, Reason]
    peak: int
    any_layout: frozenset[str]


def schedule_of(
    graph: Graph,
    observed: Mapping[str, Sequence[str]],
    keys: Collection[Key],
    first: Sample,
    *,
    kept: Sequence[str],
    options: RunOptions,
    count: int | None,
) -> Schedule:
    """Plan how to run `graph` to observe tensors.

    Args:
        observed: tensors to observe by their scope, "" for the main graph.
        keys: the same tensors with their channel axes.
        first: a sample; the sizes of all are estimated from it.
        kept: further tensors to compute.
        options: see `RunOptions`.
        count: number of samples, if known.
    """
    branches, unreachable, handed_on = branches_of(graph, observed)
    wanted = [*handed_on, *kept]
    sizes = bytes_for_sample(graph, first)
    inside, granularity, memory = observed.get("", ()), options.granularity, options.memory_bytes
    if granularity == "auto":
        fits = sum(sizes.get(name, 0) for name in {*inside, *wanted}) <= memory
        granularity = "whole" if fits else "budget"
    main = cut(graph, inside, granularity, kept=wanted, sizes=sizes, budget=memory)
    # the split of the graph must not depend on the number of cores; the number of samples run at a time may
    peak = max(sum(sizes.get(name, 0) for name in segment.outputs) for segment in main)
    by_channel = {name for name, axis in keys if axis is not None}
    whole = {name for name, _ in keys} - by_channel - set(wanted)
    weights = sum(bytes_of_constant(x) for x in tensors_by_name(graph).values() if isinstance(x, Constant))
    saved = sum(sizes.get(name, 0) for name in whole) * (COUNT if count is None else count)
    return Schedule((*main, *branches), unreachable, peak, frozenset(whole if saved > RELAYOUT * weights else ()))


def branches_of(
    graph: Graph, observed: Mapping[str, Sequence[str]]
) -> tuple[list[Segment], dict[str, Reason], tuple[str, ...]]:
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
                lost = Reason("branch-not-alone", f"its branch cannot run apart: {error}")
        if lost is None:
            kept.append(segment)
        else:
            unreachable[segment.scope] = lost
    return kept, unreachable, inner.kept


def bytes_for_sample(graph: Graph, unit: Sample) -> dict[str, int]:
    """Return the bytes of the main graph's tensors for one sample; its inputs give the dynamic dimensions."""
    dims: dict[str, int] = {}
    for tensor in graph.inputs:
        for dim, length in zip(shape(tensor) or (), unit.feed[tensor.name].shape, strict=False):
            if isinstance(dim, str):
                dims[dim] = length
    return bytes_of(graph, dims)
