"""Division of a graph into steps, one layer per step with the branches of If inlined, and their onnxruntime sessions.

A `StepSession` runs one step in float and in variants of quantization.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.schedule import PICKED_BY
from sbonnx.calib.engine.segments import Segment, inputs_of, needed
from sbonnx.calib.quantized.fake_quant import quantize_reads
from sbonnx.graph import Body, Constant, Graph, Node, Tensor
from sbonnx.graph.query import bodies, captured, constant, dtype, scopes
from sbonnx.planning.types import Reader
from sbonnx.profiling.variants import Variant
from sbonnx.spec import Array

CONDITIONAL: Final = "If"
"""Op whose branches are divided into steps."""

Conditions = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class LayerStep(Segment):
    """Unit of execution: one layer, the nodes between two layers, or the selection at the end of an If.

    Attributes:
        layer: name of the layer, "" for nodes between layers.
        choice: outputs of an If by name: the tensors if the condition is true, and if it is false. Such a step has no
            nodes.
    """

    layer: str = ""
    choice: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass
class _Draft:
    """A step before the readers of its outputs are known."""

    nodes: list[Node]
    scope: str
    conditions: Conditions
    layer: str = ""
    choice: Node | None = None


def steps_of(graph: Graph, layers: Collection[str], wanted: Collection[str] = ()) -> list[LayerStep]:
    """Return the steps in execution order.

    Nodes that lead neither to a layer nor to a wanted tensor are left out. Bodies of Loop and Scan run as a whole. A
    tensor of unknown type (a sequence) cannot be stored: each step that reads it recomputes it, and branches that read
    one run as a whole.

    Args:
        layers: names of nodes, including those in branches of If, that become separate steps with all their outputs.
        wanted: additional tensors to return.
    """
    drafts = list(_drafts(graph, graph, "", (), frozenset(layers), frozenset(wanted)))
    makers = {tensor.name: node for draft in drafts for node in _all(draft) for tensor in node.outputs if tensor.name}
    untyped = {name for name, node in makers.items() if _kind(node, name) is None}
    reads = [_inputs(draft, makers, untyped) for draft in drafts]
    last = {name: number for number, names in enumerate(reads) for name in names}
    for number, draft in enumerate(drafts):
        last.update((name, max(number, last.get(name, 0))) for name, _ in draft.conditions)
    steps = []
    for number, draft in enumerate(drafts):
        produced = [tensor.name for node in _all(draft) for tensor in node.outputs if tensor.name]
        keeps = bool(draft.layer)
        outputs = [
            name
            for name in produced
            if name not in untyped and (keeps or name in wanted or last.get(name, -1) > number)
        ]
        if outputs:
            steps.append(_step(draft, reads[number], tuple(outputs)))
    return steps


def _drafts(
    graph: Graph, body: Body, scope: str, conditions: Conditions, layers: frozenset[str], wanted: frozenset[str]
) -> Iterator[_Draft]:
    """Yield the steps of one scope; steps of branches come before the selection between them."""
    nodes = list(body.nodes) if scope else needed(graph, _targets(graph, layers, wanted))
    between: list[Node] = []
    for node in nodes:
        inside = node.op == CONDITIONAL and any(_holds(branch, layers) for _, branch in bodies(node))
        inside = inside and all(dtype(tensor) is not None for _, branch in bodies(node) for tensor in captured(branch))
        if node.name not in layers and not inside:
            between.append(node)
            continue
        if between:
            yield _Draft(between, scope, conditions)
            between = []
        if not inside:
            yield _Draft([node], scope, conditions, layer=node.name)
            continue
        for attribute, branch in bodies(node):
            path = f"{scope}/{node.name}/{attribute}" if scope else f"{node.name}/{attribute}"
            under = (*conditions, (node.inputs[0].name, PICKED_BY[attribute]))
            yield from _drafts(graph, branch, path, under, layers, wanted)
        yield _Draft([], scope, conditions, choice=node)
    if between:
        yield _Draft(between, scope, conditions)


def _targets(graph: Graph, layers: frozenset[str], wanted: frozenset[str]) -> list[str]:
    """Return the tensors of the main graph to compute: outputs of layers, and of nodes that contain layers."""
    targets = list(wanted)
    for node in graph.nodes:
        if node.name in layers or any(_holds(body, layers) for _, body in bodies(node)):
            targets.extend(tensor.name for tensor in node.outputs if tensor.name)
    return targets


def _holds(body: Body, layers: frozenset[str]) -> bool:
    return any(node.name in layers for _, scope in scopes(body) for node in scope.nodes)


def _all(draft: _Draft) -> list[Node]:
    return draft.nodes if draft.choice is None else [draft.choice]


def _kind(node: Node, name: str) -> object:
    return next(dtype(tensor) for tensor in node.outputs if tensor.name == name)


def _inputs(draft: _Draft, makers: Mapping[str, Node], untyped: Collection[str]) -> tuple[str, ...]:
    """Return the variables of earlier steps that a step reads; for those without a type, their own inputs."""
    if draft.choice is not None:
        ends = [tensor for _, branch in bodies(draft.choice) for tensor in branch.outputs]
        names = [tensor.name for tensor in ends if not isinstance(tensor, Constant)]
        return tuple(dict.fromkeys([draft.choice.inputs[0].name, *names]))
    return inputs_of(draft.nodes, makers, untyped)


def _step(draft: _Draft, reads: tuple[str, ...], outputs: tuple[str, ...]) -> LayerStep:
    names = tuple(node.name for node in draft.nodes)
    choice: dict[str, tuple[str, str]] = {}
    if draft.choice is not None:
        ends: dict[bool, Sequence[str]] = {
            PICKED_BY[attribute]: [tensor.name for tensor in branch.outputs]
            for attribute, branch in bodies(draft.choice)
        }
        for tensor, then, other in zip(draft.choice.outputs, ends[True], ends[False], strict=True):
            choice[tensor.name] = (then, other)
    return LayerStep(reads, outputs, (), names, draft.scope, draft.conditions, draft.layer, choice)


def uses_in(nodes: Iterable[Node]) -> Iterator[tuple[Reader, str]]:
    """Yield every use of a tensor by nodes, their bodies included, with the name of the tensor."""
    for node in nodes:
        yield from ((Reader(node.name, index), tensor.name) for index, tensor in enumerate(node.inputs))
        yield from (use for _, body in bodies(node) for use in uses_in(body.nodes))


def is_quantized(variant: Variant, uses: Iterable[tuple[Reader, str]]) -> bool:
    """Return whether a variant quantizes a use, or has a new value for a constant."""
    return any(reader in variant.uses or name in variant.view.constants for reader, name in uses)


@final
class StepSession:
    """Sessions of the nodes of a step, in float and in variants of quantization, each opened when it first runs.

    Optimization is off and each run has one thread, as in `sbonnx.calib.quantized.forward.Forward`.

    Args:
        graph: the float graph; not changed.
        step: the nodes to run.
        index: `tensors_by_name(graph)`.

    Attributes:
        step: as given.
        node: a layer; None between layers.
    """

    def __init__(self, graph: Graph, step: LayerStep, *, index: Mapping[str, Tensor], device: str = "cpu") -> None:
        self.step = step
        self._sessions: dict[Variant | None, LayerRunner] = {}
        self._lock = threading.Lock()
        self._device = device
        self._extract = partial(step.model, graph, index)
        self._piece = self._extract()
        self.node = next((node for node in self._piece.nodes if node.name == step.layer), None)
        self._uses = tuple(uses_in(self._piece.nodes))

    def constants(self) -> dict[int, Array]:
        """Return a layer's constants, by the index of the input."""
        values = enumerate(() if self.node is None else map(constant, self.node.inputs))
        return {index: value for index, value in values if value is not None}

    def run(
        self, values: Mapping[str, Array], variant: Variant | None = None, *, where: str = "this feed"
    ) -> dict[str, Array]:
        """Run the step and return its outputs by name.

        Args:
            values: its inputs by name, as computed.
            variant: None: float.
            where: name of the feed in messages.
        """
        if variant is not None and not is_quantized(variant, self._uses):
            variant = None
        with self._lock:
            if variant not in self._sessions:
                self._sessions[variant] = self._open(variant)
        return self._sessions[variant].run(values, self.step.outputs, where=where)

    def _open(self, variant: Variant | None) -> LayerRunner:
        piece = self._piece
        if variant is not None:
            piece = self._extract()
            quantize_reads(piece, variant.uses, variant.view)
        name = f"'{self.step.layer or 'between layers'}'"
        return LayerRunner(piece, device=self._device, threads=1, optimisation="off", name=name)

    def close(self) -> None:
        """Free the sessions. A second call is a no-op."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
