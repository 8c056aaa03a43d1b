"""Branches of If nodes: each body runs as a separate model on the samples whose condition selected it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.calib.engine.segments import Segment, needed, produced, reads_of
from sbonnx.graph import Body, Constant, Graph, Node
from sbonnx.graph.query import bodies, constant

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
    unreachable: Mapping[str, str]


def plan_branches(graph: Graph, observed: Mapping[str, Sequence[str]]) -> BranchPlan:
    """Plan the segments that observe `observed` (scope to tensors) in branches.

    A branch outputs those of its tensors that the branches inside it read; tensors from further out are read directly.
    """
    known = {branch.scope: branch for branch in branches(graph)}
    unreachable = {scope: "it lies in the body of a Loop or Scan" for scope in observed if scope and scope not in known}
    segments: list[Segment] = []
    wanted: dict[str, dict[str, None]] = {}  # by scope: its tensors that branches inside it read
    for branch in reversed(list(known.values())):  # inner ones first
        inside = list(observed.get(branch.scope, ()))
        reason = _out_of_reach(branch, known)
        if reason and inside:
            unreachable[branch.scope] = reason
        handed_on = wanted.get(branch.scope, {})
        if reason or not (inside or handed_on):
            continue
        segment = _segment(branch, inside, [*handed_on], known)
        segments.append(segment)
        _ask(segment, branch.outer, known, wanted)
    return BranchPlan(tuple(reversed(segments)), tuple(wanted.get("", {})), unreachable)


def _out_of_reach(branch: Branch, known: Mapping[str, Branch]) -> str | None:
    """Return why a branch can never run, or None."""
    at: Branch | None = branch
    while at is not None:
        if at.never:
            return f"the condition of '{at.node.name}' is a constant that never picks its branch"
        at = known.get(at.outer)
    return None


def _segment(branch: Branch, inside: Sequence[str], handed_on: Sequence[str], known: Mapping[str, Branch]) -> Segment:
    makers = produced(branch.body)
    targets = [name for name in dict.fromkeys([*inside, *handed_on]) if name in makers]
    nodes = needed(branch.body, targets)
    made = {tensor.name for node in nodes for tensor in node.outputs}
    inputs = dict.fromkeys(name for node in nodes for name in reads_of(node) if name not in made)
    conditions: list[tuple[str, bool]] = []
    at: Branch | None = branch
    while at is not None:
        if not isinstance(at.node.inputs[0], Constant):
            conditions.insert(0, (at.condition, at.picks))
        at = known.get(at.outer)
    return Segment(
        tuple(inputs),
        tuple(targets),
        tuple(inside),
        tuple(node.name for node in nodes),
        branch.scope,
        tuple(conditions),
    )


def _ask(segment: Segment, outer: str, known: Mapping[str, Branch], wanted: dict[str, dict[str, None]]) -> None:
    """Register the inputs of `segment` with the enclosing scopes that compute them.

    Inputs that none of them computes are registered with the main graph.
    """
    missing = dict.fromkeys(segment.reads)
    scope = outer
    while scope:
        makers = produced(known[scope].body)
        here = [name for name in missing if name in makers]
        wanted.setdefault(scope, {}).update(dict.fromkeys(here))
        for name in here:
            del missing[name]
        scope = known[scope].outer
    wanted.setdefault("", {}).update(missing)
