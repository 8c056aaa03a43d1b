"""Constant folding: what depends on no input is computed once, by onnxruntime, and kept as a constant.

Not folded: random ops, custom domains, nodes with bodies, sequences, RoiAlign (unbounded work), integer divisions
before their operands are known (where they overflow the kernel ends the process), and QuantizeLinear / DequantizeLinear
with all that follows from them (a quantized model must stay one). A result may be at most 1 MiB larger than the
constants it is computed from; of nodes whose result has no known size only small ones are run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, nan, prod
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.errors import DeviceError
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, serialize
from sbonnx.graph.convert.traps import may_trap, require_no_traps
from sbonnx.graph.edit import Names, replace_input, sweep
from sbonnx.graph.query import Array, all_nodes, bodies, constant, dtype, readers, scopes
from sbonnx.graph.storage.weights import SPILL_BYTES, spill
from sbonnx.ops import QDQ, RANDOM
from sbonnx.report import Fired, Refusal
from sbonnx.runtime import onnxruntime

from ..engine import Sweep
from ..match import STANDARD
from ..sample import sample
from .drop import static
from .infer import infer_shapes

NAME: Final = "fold_constants"

GROWTH_BYTES: Final = 1 << 20
"""A folded tensor may be so much larger than the constants it comes from."""

UNKNOWN_BYTES: Final = 1 << 20
"""A node whose result has no known size is only run on constants up to so many bytes."""

BATCH_BYTES: Final = 256 << 20
"""Results of one session; more are computed in several."""

GROWS: Final = frozenset(
    {"ConstantOfShape", "Expand", "Tile", "Range", "Resize", "Upsample", "Pad", "OneHot", "EyeLike"}
)
"""Ops whose values say how large the result is: never run before that is known."""

UNBOUNDED: Final = frozenset({"RoiAlign"})
"""Ops whose memory is not that of their operands and results."""

SEQUENCES: Final = frozenset({"SequenceEmpty", "SequenceConstruct", "SplitToSequence", "Optional", "StringSplit"})

PLAIN: Final = frozenset("biuf?")
"""Kinds of numpy types that onnxruntime takes and gives; bfloat16, 8-bit floats and 4-bit integers are left alone."""


@dataclass
class _Plan:
    """What to fold in one scope.

    Attributes:
        nodes: in order; each reads constants and tensors of nodes before it.
        bytes: per tensor name, its size where that is known.
        leaves: per tensor name, the constants it comes from: name → bytes.
    """

    nodes: list[Node] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    bytes: dict[int, int | None] = field(default_factory=dict)
    leaves: dict[int, dict[int, int]] = field(default_factory=dict)


def fold(graph: Graph) -> list[Fired | Refusal]:
    """Fold what can be folded now, in every scope. In place.

    Raises:
        DeviceError: there is something to fold and onnxruntime is not installed.
        ModelError: a node would end the process.
    """
    require_no_traps(graph)
    _make_range_bounds_scalar(graph)
    infer_shapes(graph)
    outcomes: list[Fired | Refusal] = []
    names: Names | None = None
    for _, scope in list(scopes(graph)):
        plan = _plan(scope)
        outcomes += plan.refusals
        if plan.nodes:
            names = names or Names(graph)
            outcomes += _Folding(graph, scope, plan, names).run()
    if any(isinstance(outcome, Fired) for outcome in outcomes):
        sweep(graph)
    return outcomes


def _make_range_bounds_scalar(graph: Graph) -> None:
    """In place: constants of shape (1,) that a Range reads become scalars.

    Runtimes take a vector of one there only as long as they do not know that it is one, and folding tells them.
    """
    for node in all_nodes(graph):
        for place, tensor in enumerate(node.inputs if node.op == "Range" else ()):
            value = constant(tensor)
            if value is not None and value.shape == (1,):
                name = Names(graph).fresh(f"{tensor.name}_scalar")  # so rare that the names need not be kept
                replace_input(node, place, Constant(name, value.reshape(())))


def _plan(scope: Body) -> _Plan:
    """The nodes of a scope that may be computed now, and the size of what they give."""
    plan = _Plan()
    outputs = {id(tensor) for tensor in scope.outputs}
    for node in scope.nodes:
        if not _foldable(node, outputs):
            continue
        read = [tensor for tensor in node.inputs if not tensor.is_empty()]
        if not all(_ready(tensor, plan) for tensor in read) or may_trap(node):
            continue
        leaves = _leaves(read, plan)
        why = _too_large(node, leaves, plan)
        if why is None:
            plan.nodes.append(node)
            for tensor in node.outputs:
                plan.leaves[id(tensor)] = leaves
                plan.bytes[id(tensor)] = _bytes(node, tensor)
        elif why:
            plan.refusals.append(Refusal(NAME, node.name, why))
    return plan


def _foldable(node: Node, outputs: set[int]) -> bool:
    if (
        node.domain not in STANDARD
        or node.op in RANDOM
        or node.op in QDQ
        or node.op in SEQUENCES | UNBOUNDED
        or bodies(node)
    ):
        return False
    if node.op == "Identity" and id(node.outputs[0]) in outputs:
        return False  # that is how an output that is a constant is written
    return all(tensor.is_empty() or _plain(dtype(tensor)) for tensor in node.outputs)


def _plain(kind: np.dtype[Any] | None) -> bool:
    return kind is not None and kind.kind in PLAIN


def _ready(tensor: Tensor, plan: _Plan) -> bool:
    if isinstance(tensor, Constant):
        return _plain(dtype(tensor))
    return id(tensor) in plan.leaves


def _leaves(read: Sequence[Tensor], plan: _Plan) -> dict[int, int]:
    """The constants behind some tensors, with their bytes."""
    leaves: dict[int, int] = {}
    for tensor in read:
        if isinstance(tensor, Constant):
            leaves[id(tensor)] = prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
        elif len(plan.leaves[id(tensor)]) > len(leaves):
            leaves = {**plan.leaves[id(tensor)], **leaves}
        else:
            leaves.update(plan.leaves[id(tensor)])
    if len(leaves) > 64:  # keeps long chains linear: the largest are what counts
        leaves = dict(sorted(leaves.items(), key=lambda item: -item[1])[:64])
    return leaves


def _bytes(node: Node, tensor: Tensor) -> int | None:
    """The bytes of what a node gives, None when not known."""
    kind = dtype(tensor)
    if kind is None:
        return None
    bounds = [constant(read) for read in node.inputs] if node.op == "Range" else []
    if len(bounds) == 3 and all(bound is not None and bound.size == 1 for bound in bounds):
        start, limit, delta = (float(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
        steps = (limit - start) / delta if delta else nan
        return max(ceil(steps), 0) * kind.itemsize if isfinite(steps) else None
    known = static(tensor)
    return None if known is None else prod(known) * kind.itemsize


def _too_large(node: Node, leaves: dict[int, int], plan: _Plan) -> str | None:
    """The reason not to run a node; "" to wait until what it reads is folded; None to run it."""
    given = sum(leaves.values())
    for tensor in node.outputs:
        size = _bytes(node, tensor)
        if tensor.is_empty():
            continue
        if size is not None:
            if size > given + GROWTH_BYTES:
                return f"'{tensor.name}' would take {size / 2**20:.1f} MiB, its constants take {given / 2**20:.1f} MiB"
        elif any(id(read) in plan.leaves for read in node.inputs):
            return ""
        elif node.op in GROWS:
            return f"the size of '{tensor.name}' is not known before it is computed"
        elif given > UNKNOWN_BYTES:
            return f"the size of '{tensor.name}' is not known, and its constants take {given / 2**20:.1f} MiB"
    return None


class _Folding:
    """Computes what is planned for one scope and puts the results in place."""

    def __init__(self, graph: Graph, scope: Body, plan: _Plan, names: Names) -> None:
        self.graph = graph
        self.scope = scope
        self.plan = plan
        self.names = names
        self.planned = {id(node) for node in plan.nodes}
        self.outputs = {id(tensor) for tensor in scope.outputs}

    def run(self) -> list[Fired | Refusal]:
        outcomes: list[Fired | Refusal] = []
        for batch in self.batches():
            outcomes += self.compute(batch)
        return outcomes

    def batches(self) -> Iterator[list[Node]]:
        """The planned nodes, cut between independent parts so that the results of one batch stay small."""
        batch: list[Node] = []
        size = 0
        for part in _parts(self.plan.nodes):
            needed = sum(self.plan.bytes[id(tensor)] or 0 for tensor in self.wanted(part))
            if batch and size + needed > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch += part
            size += needed
        if batch:
            yield batch

    def wanted(self, nodes: Iterable[Node]) -> list[Tensor]:
        """What is read by nodes that are not folded, or is an output."""
        return [
            tensor
            for node in nodes
            for tensor in node.outputs
            if id(tensor) in self.outputs or any(id(reader) not in self.planned for reader, _ in readers(tensor))
        ]

    def compute(self, nodes: list[Node]) -> list[Fired | Refusal]:
        """Run nodes and put the results in place; where onnxruntime refuses them together, part by part."""
        wanted = self.wanted(nodes)
        if not wanted:
            return []
        try:
            results = _run(self.graph, nodes, wanted)
        except DeviceError:
            raise
        except Exception as error:  # onnxruntime's own exception types share no base
            if len(nodes) == 1:
                return [Refusal(NAME, nodes[0].name, f"onnxruntime cannot run it: {_first_line(error)}")]
            parts = list(_parts(nodes))
            if len(parts) == 1:  # what reads constants only; the rest follows in the next round
                parts = [[node] for node in nodes if not any(id(read) in self.plan.leaves for read in node.inputs)]
                for node in nodes:
                    self.planned.discard(id(node))
            return [outcome for part in parts for outcome in self.compute(part)]
        for tensor, values in zip(wanted, results, strict=True):
            self.settle(tensor, values)
        return [Fired(NAME, node.name) for node in nodes]

    def settle(self, tensor: Tensor, values: Array) -> None:
        """Let a tensor be a constant. An output keeps its name: an Identity gives it the value."""
        if values.nbytes >= SPILL_BYTES:
            values = spill(values)
        node = tensor.inputs[0]
        place = next(index for index, output in enumerate(node.outputs) if output is tensor)
        list.__setitem__(node.outputs, place, Variable(self.names.fresh(f"{tensor.name}_unused")))
        list.append(node.outputs[place].inputs, node)
        list.clear(tensor.inputs)
        if id(tensor) not in self.outputs:
            tensor.to_constant(values)
            return
        value = Constant(self.names.fresh(f"{tensor.name}_value"), values)
        name = self.names.fresh(f"{node.name}_value")
        self.scope.nodes.append(Node("Identity", name, {}, inputs=[value], outputs=[tensor]))


def _first_line(error: Exception) -> str:
    """onnxruntime's message without its number and without the place in its own source."""
    text = str(error).strip().partition("\n")[0].rpartition(" : ")[2]
    return re.sub(r"^/\S+ .*?\) ", "", text) or type(error).__name__


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes grouped so that no group reads another, each in the given order."""
    group: dict[int, int] = {}
    parts: dict[int, list[Node]] = {}
    inside = {id(node) for node in nodes}
    for node in nodes:
        joined = {group[id(maker)] for tensor in node.inputs for maker in tensor.inputs if id(maker) in inside}
        target = max(joined, key=lambda number: len(parts[number])) if joined else id(node)
        for other in joined - {target}:
            parts[target] += parts.pop(other)
            group.update((id(member), target) for member in parts[target])
        parts.setdefault(target, []).append(node)
        group[id(node)] = target
    return list(parts.values())


def _run(graph: Graph, nodes: Sequence[Node], wanted: Sequence[Tensor]) -> list[Array]:
    """The values of some tensors that nodes compute from constants."""
    ort: Any = onnxruntime()
    data, weights = serialize(_standalone(graph, nodes, wanted))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run([tensor.name for tensor in wanted], {})]


def _standalone(graph: Graph, nodes: Sequence[Node], wanted: Sequence[Tensor]) -> Graph:
    """Copies of nodes as a model of their own; constants share their values."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_empty():
            return Variable.empty()
        if id(tensor) not in copies:
            is_constant = isinstance(tensor, Constant)
            copies[id(tensor)] = (
                Constant(tensor.name, tensor._values)
                if is_constant
                else Variable(tensor.name, tensor.dtype, tensor.shape)
            )
        return copies[id(tensor)]

    made = [
        Node(node.op, node.name, node.attrs, [copy(t) for t in node.inputs], [copy(t) for t in node.outputs])
        for node in nodes
    ]
    return Graph(made, [], [copy(tensor) for tensor in wanted], opset=graph.opset)


def _example() -> onnx.ModelProto:
    return sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Mul(w, w) b = Transpose(a) c = Add(x, b) y = Relu(c) }", w=(3, 2)
    )


def _counter_example() -> onnx.ModelProto:
    return sample(
        "g (float[1024,1024] x) => (float[1024,1024] y) { a = ConstantOfShape(s) y = Add(x, a) }",
        s=np.array([1024, 1024], np.int64),
    )


FOLD = Sweep(
    NAME,
    run=fold,
    source="computed by onnxruntime, which would compute the same each time the model runs",
    example=_example,
    counter_example=_counter_example,
)
