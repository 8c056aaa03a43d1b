"""Applies patterns to a graph and its bodies until a fixed point.

The engine handles everything that rewrites need not consider: the single-reader rule, names of outputs, readers in
branch bodies, dead nodes, names, order, the round limit, and the record of applied rewrites and refusals.

Complexity: patterns are indexed by the op type of their root and a rewrite requeues only its neighbours, so a pass is
linear in the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import onnx

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, Node
from sbonnx.report import Fired, Reason, Refusal

from .index import GraphIndex
from .match import Match, find
from .rewriting import Edit
from .tree import Op, depth

ROUNDS = 64
"""Maximum rounds over the whole graph before non-termination is reported; real models need two to four."""

REWRITES_PER_NODE = 8
"""Maximum rewrites of one pattern per node and round before non-termination is reported."""

NEIGHBOURS = 64
"""Number of readers that are requeued after a rewrite; nodes further away are visited in the next round."""


@dataclass(frozen=True)
class Pattern:
    """One local rewrite.

    Attributes:
        name: name in the report.
        tree: the tree to match, from the last op upwards.
        rewrite: changes the graph through `Edit`; never deletes.
        source: why the rewrite is correct, or a reference.
        example: a model to which only this pattern applies.
        counter_example: a similar model to which it must not apply.
        where: condition for a match to be considered, without a refusal; checked before the single-reader rule.
        check: returns why a considered match is not rewritten (reported as a refusal), or None.
    """

    name: str
    tree: Op
    rewrite: Callable[[Match, Edit], None]
    source: str
    example: Callable[[], onnx.ModelProto]
    counter_example: Callable[[], onnx.ModelProto]
    check: Callable[[Match], Reason | None] | None = None
    where: Callable[[Match], bool] | None = None


@dataclass(frozen=True)
class Sweep:
    """One pass over the whole graph, for non-local rewrites (folding, duplicates, dead code).

    Attributes:
        run: changes the graph and its bodies in place, and returns applied rewrites and refusals.
    """

    name: str
    run: Callable[[Graph], Sequence[Fired | Refusal]]
    source: str
    example: Callable[[], onnx.ModelProto]
    counter_example: Callable[[], onnx.ModelProto]


@dataclass(frozen=True)
class Applied:
    """Applied rewrites, in order, and refusals on the final graph."""

    fired: tuple[Fired, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def apply(graph: Graph, patterns: Sequence[Pattern | Sweep]) -> Applied:
    """Rewrite a graph and all its bodies to a fixed point, in place.

    Consecutive patterns in the sequence reach a fixed point together, each tried in the order of the sequence; a
    `Sweep` runs at its position. This repeats until a whole round changes nothing.

    Raises:
        ModelError: the patterns do not terminate; names the last one that was applied.
    """
    fired: list[Fired] = []
    for _ in range(ROUNDS):
        before = len(fired)
        refusals: list[Refusal] = []
        for whole, group in groupby(patterns, key=lambda entry: isinstance(entry, Sweep)):
            if whole:
                outcomes = [outcome for entry in group if isinstance(entry, Sweep) for outcome in entry.run(graph)]
                fired += [outcome for outcome in outcomes if isinstance(outcome, Fired)]
                refusals += [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
            else:
                settling = _Settling(graph, [entry for entry in group if isinstance(entry, Pattern)])
                settling.run()
                fired += settling.fired
                refusals += settling.refusals.values()
        if len(fired) == before:
            return Applied(tuple(fired), tuple(dict.fromkeys(refusals)))
    raise _unsettled(fired[-1].pattern, fired[-1].node, ROUNDS, "rounds")


def _unsettled(pattern: str, node: str, count: int, unit: str) -> ModelError:
    return ModelError(
        f"pattern '{pattern}' still fires at node '{node}' after {count} {unit}: it never settles on this model. "
        "Leave the pattern out, and report it."
    )


class _Settling:
    """A group of patterns that is applied to a fixed point."""

    def __init__(self, graph: Graph, patterns: Sequence[Pattern]) -> None:
        self.index = GraphIndex(graph)
        self.patterns = patterns
        self.reach = max(depth(pattern.tree) for pattern in patterns) - 1
        self.budget = REWRITES_PER_NODE * sum(len(scope.nodes) for scope in self.index.scopes) + ROUNDS
        self.rewrites = dict.fromkeys((pattern.name for pattern in patterns), 0)
        self.fired: list[Fired] = []
        self.refusals: dict[tuple[str, int], Refusal] = {}
        self.kept: list[Node] = []

    def run(self) -> None:
        """Visit the whole graph first, then only nodes near rewrites."""
        nodes: Iterable[Node] = self.index.nodes()
        while by_op := self.by_op(nodes):
            touched: dict[int, Node] = {}
            for pattern in self.patterns:
                queue = [node for op in pattern.tree.ops for node in by_op.get(op, {}).values()]
                for node in queue:  # the list grows during the iteration
                    for neighbour in self.visit(pattern, node):
                        touched[id(neighbour)] = neighbour
                        by_op.setdefault(neighbour.op, {})[id(neighbour)] = neighbour
                        if neighbour.op in pattern.tree.ops:
                            queue.append(neighbour)
            nodes = touched.values()
        self.index.commit()

    def by_op(self, nodes: Iterable[Node]) -> dict[str, dict[int, Node]]:
        nodes_by_op: dict[str, dict[int, Node]] = {}
        for node in nodes:
            nodes_by_op.setdefault(node.op, {})[id(node)] = node
        return nodes_by_op

    def visit(self, pattern: Pattern, node: Node) -> list[Node]:
        """Try one pattern at one node. Return the nodes to visit again if it was applied."""
        if not self.index.alive(node):
            return []
        self.refusals.pop((pattern.name, id(node)), None)
        outcome = find(pattern.tree, node, self.index)
        if outcome is None:
            return []
        match, why = outcome
        if pattern.where is not None and not pattern.where(match):
            return []
        if why is None and pattern.check is not None:
            why = pattern.check(match)
        if why is not None:
            self.refusals[(pattern.name, id(node))] = Refusal(pattern.name, node.name, why)
            return []
        name = node.name
        edit = Edit(self.index, match)
        pattern.rewrite(match, edit)
        touched = edit.finish()
        self.kept += match.nodes  # keeps dead nodes alive, so that their ids are not reused
        self.fired.append(Fired(pattern.name, name))
        self.rewrites[pattern.name] += 1
        if self.rewrites[pattern.name] > self.budget:
            raise _unsettled(pattern.name, name, self.rewrites[pattern.name], "rewrites")
        return self.surroundings(touched)

    def surroundings(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes and their readers, down to the depth of the deepest tree."""
        near = {id(node): node for node in nodes}
        edge = list(near.values())
        for _ in range(self.reach):
            edge = [reader for node in edge for tensor in node.outputs for reader in tensor.outputs[:NEIGHBOURS]]
            edge = [node for node in edge if id(node) not in near and self.index.alive(node)]
            near.update((id(node), node) for node in edge)
            if not edge or len(near) > NEIGHBOURS:
                break
        return list(near.values())
