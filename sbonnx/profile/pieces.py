"""Division of a graph into steps, one layer per step with the branches of If inlined, and their onnxruntime sessions.

A `StepSession` runs one step in float and with any quantized replacements.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.schedule import PICKED_BY
from sbonnx.calib.engine.segments import inputs_of, needed
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.extract import extract
from sbonnx.graph.query import bodies, captured, constant, dtype, scopes
from sbonnx.plan.types import Reader
from sbonnx.profile.replacements import Replacements
from sbonnx.spec import Array

CONDITIONAL: Final = "If"
"""Op whose branches are divided into steps."""

Conditions = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class LayerStep:
    """Unit of execution: one layer, the nodes between two layers, or the selection at the end of an If.

    Attributes:
        inputs: variables of earlier steps that it reads.
        outputs: its results that later steps or the caller read.
        nodes: names of its nodes, in order; none for a selection.
        scope: "" or the path of the branch that contains it.
        conditions: outer booleans and the values under which it runs, outermost first.
        layer: name of the layer, "" for nodes between layers.
        choice: outputs of an If by name: the tensors if the condition is true, and if it is false.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    scope: str = ""
    conditions: Conditions = ()
    layer: str = ""
    choice: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        """All variables of earlier steps that it reads, including conditions."""
        return tuple(dict.fromkeys([*(name for name, _ in self.conditions), *self.inputs]))


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
        made = [tensor.name for node in _all(draft) for tensor in node.outputs if tensor.name]
        keeps = bool(draft.layer)
        outputs = [
            name for name in made if name not in untyped and (keeps or name in wanted or last.get(name, -1) > number)
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
    found = list(wanted)
    for node in graph.nodes:
        if node.name in layers or any(_holds(body, layers) for _, body in bodies(node)):
            found.extend(tensor.name for tensor in node.outputs if tensor.name)
    return found


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
    return LayerStep(reads, outputs, names, draft.scope, draft.conditions, draft.layer, choice)


Known = dict[tuple[str, int], Array]
"""Fake-quantized activations, by name and id of their parameters, which live as long."""


@dataclass(frozen=True)
class _Slot:
    """An input that may be quantized: it becomes a separate input of the session."""

    reader: Reader
    tensor: Tensor
    name: str


@final
class StepSession:
    """The nodes of a step in one session, where every quantizable input, including weights, is a session input.

    A single session thus computes the step in float, with only its weights or activations quantized, and at any width.
    Optimization is off and each run has one thread, as in `sbonnx.calib.quantized.forward.Forward`.

    Args:
        graph: the float graph; not changed.
        step: the nodes to run.
        reads: every use that may be replaced.
        replaced: names of constants that may be replaced for all readers.
        index: `tensors_by_name(graph)`.

    Attributes:
        step: as given.
        slots: the inputs that may be quantized.
        op, attributes, data: for a layer: its type, its attributes and the name of its first input.
    """

    def __init__(
        self,
        graph: Graph,
        step: LayerStep,
        *,
        reads: Collection[Reader],
        replaced: Collection[str],
        index: Mapping[str, Tensor],
        device: str = "cpu",
    ) -> None:
        self.step = step
        self._fills: dict[int, dict[str, Array]] = {}
        self._floats: dict[str, Array] = {}
        self._lock = threading.Lock()
        piece = extract(graph, step.inputs, step.outputs, scope=step.scope, index=index)
        self.data = piece.nodes[0].inputs[0].name if step.layer and piece.nodes[0].inputs else ""
        self.slots = tuple(_open_slots(piece, frozenset(reads), frozenset(replaced)))
        self.op = piece.nodes[0].op if step.layer else ""
        self.attributes: Mapping[str, Any] = piece.nodes[0].attrs if step.layer else {}
        self._run = LayerRunner(
            piece, device=device, threads=1, optimisation="off", name=f"'{step.layer or 'between layers'}'"
        )

    def constants(self) -> dict[int, Array]:
        """Return a layer's constants that may be quantized, by the index of the input."""
        slots = ((slot.reader.index, constant(slot.tensor)) for slot in self.slots)
        return {index: value for index, value in slots if value is not None}

    def run(
        self, values: Mapping[str, Array], numbers: Replacements | None = None, *, known: Known | None = None
    ) -> dict[str, Array]:
        """Run the step and return its outputs by name.

        Args:
            values: its inputs by name, as computed.
            numbers: the replacements; None: float. The same object must return the same values every time.
            known: cache of fake-quantized activations, updated here; for several runs on the same values.
        """
        feeds = dict(values)
        with self._lock:  # computed once
            fixed = self._made(numbers)
        made: Known = {} if known is None else known
        for slot in self.slots:
            if slot.name in fixed:
                feeds[slot.name] = fixed[slot.name]
                continue
            x = values[slot.tensor.name]
            qparams = None if numbers is None else numbers.params(slot.reader)
            key = (slot.tensor.name, id(qparams))
            if key not in made:
                made[key] = x if qparams is None else qparams.fake_quant(x).astype(x.dtype)
            feeds[slot.name] = made[key]
        return self._run.run(feeds, self.step.outputs)

    def _made(self, numbers: Replacements | None) -> dict[str, Array]:
        if not self._floats:
            found = ((slot.name, constant(slot.tensor)) for slot in self.slots)
            self._floats = {name: value for name, value in found if value is not None}
        if numbers is None:
            return self._floats
        if id(numbers) not in self._fills:
            fills = dict(self._floats)
            for slot in self.slots:
                if isinstance(slot.tensor, Constant):
                    meaning = numbers.constant(slot.reader, slot.tensor)
                    fills[slot.name] = fills[slot.name] if meaning is None else meaning
            self._fills[id(numbers)] = fills
        return self._fills[id(numbers)]

    def close(self) -> None:
        """Free the session. A second call is a no-op."""
        self._run.close()
        self._fills.clear()


def _open_slots(piece: Graph, reads: frozenset[Reader], replaced: frozenset[str]) -> list[_Slot]:
    """Turn each quantizable input into a separate graph input. In place."""
    slots = []
    for node in piece.nodes:
        for index, tensor in enumerate(list(node.inputs)):
            reader = Reader(node.name, index)
            if reader in reads or (isinstance(tensor, Constant) and tensor.name in replaced):
                opened = Variable(f"{tensor.name}/read by {node.name}/{index}", tensor.dtype, tensor.shape)
                slots.append(_Slot(reader, tensor, opened.name))
                node.inputs[index] = opened
                piece.inputs.append(opened)
    kept = {id(tensor) for tensor in piece.outputs}
    piece.inputs = [tensor for tensor in piece.inputs if tensor.outputs or id(tensor) in kept]
    return slots
