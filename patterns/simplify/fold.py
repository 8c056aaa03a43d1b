"""Constant folding: nodes that depend on no input are computed once by onnxruntime and replaced by constants.

Supported: nodes of the standard domain whose inputs are constants, in every scope.
Refused: random ops, custom domains, nodes with bodies, sequences, RoiAlign (unbounded work), integer divisions
before their operands are known (an overflow in the kernel kills the process), and QuantizeLinear / DequantizeLinear
with all dependent nodes (a quantized model must remain quantized). A result may be at most 1 MiB larger than the
constants it is computed from, and all that the file would store together at most a fiftieth of the weights of the
model larger, or 2 KiB: matrices that small models compute (Fourier transforms, mel filters) would be most of the file,
and runtimes compute them once, when they load it. Nodes with results of unknown size are run only if they are small.
Equations: f(c) is a constant if c is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, nan, prod
from typing import Any, Final, Literal

import numpy as np
import onnx

from sbonnx.errors import DeviceError
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, serialize
from sbonnx.graph.edit import Names, replace_input, sweep
from sbonnx.graph.query import Array, all_nodes, all_tensors, bodies, constant, dtype, readers, scopes
from sbonnx.graph.storage.weights import SPILL_BYTES, spill
from sbonnx.graph.validation import may_trap, require_no_traps
from sbonnx.ops import QDQ, RANDOM
from sbonnx.report import Fired, Reason, Refusal
from sbonnx.system.runtime import onnxruntime, open_session, session_options
from sbonnx.system.sizes import size_text

from ..example_model import sample
from ..fixed_point import Sweep
from ..match import STANDARD
from .infer import infer_shapes, static

NAME: Final = "fold_constants"

GROWTH_BYTES: Final = 1 << 20
"""Maximum growth of a folded tensor over the constants it is computed from, in bytes."""

STORED_SHARE: Final = 0.02
"""Maximum growth of all tensors that the file would store, as a share of the weights of the model."""

STORED_BYTES: Final = 2 << 10
"""Growth of all stored tensors that is always allowed, in bytes."""

UNKNOWN_BYTES: Final = 1 << 20
"""Maximum size of the constants of a node whose result size is unknown, in bytes."""

WAIT: Final = "wait"
"""The inputs of a node are folded first."""

LARGE: Final = "'{}' would take {} of the file, its constants take {}: computed when the file is loaded"

BATCH_BYTES: Final = 256 << 20
"""Size of the results of one session in bytes; more results need several sessions."""

GROWS: Final = frozenset(
    {"ConstantOfShape", "Expand", "Tile", "Range", "Resize", "Upsample", "Pad", "OneHot", "EyeLike"}
)
"""Ops whose result size depends on input values: never run if the size is unknown."""

UNBOUNDED: Final = frozenset({"RoiAlign"})
"""Ops whose memory usage is not bounded by their operands and results."""

SEQUENCES: Final = frozenset({"SequenceEmpty", "SequenceConstruct", "SplitToSequence", "Optional", "StringSplit"})

PLAIN: Final = frozenset("biuf?")
"""Kinds of numpy types that onnxruntime accepts and returns; bfloat16, float8 and 4-bit integers are not folded."""


@dataclass
class _Plan:
    """Nodes to fold in one scope.

    Attributes:
        nodes: in order; each reads constants and outputs of nodes before it.
        refusals: nodes that are not folded, with the reason.
        bytes: per tensor id, its size if known.
        leaves: per tensor id, the constants it is computed from: id → bytes.
    """

    nodes: list[Node] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    bytes: dict[int, int | None] = field(default_factory=dict)
    leaves: dict[int, dict[int, int]] = field(default_factory=dict)


def fold(graph: Graph) -> list[Fired | Refusal]:
    """Fold all nodes that can be folded now, in every scope and in place.

    Raises:
        DeviceError: there are nodes to fold, but onnxruntime is not installed.
        ModelError: a node would crash the process.
    """
    require_no_traps(graph)
    _make_range_bounds_scalar(graph)
    infer_shapes(graph)
    growth = max(STORED_BYTES, int(STORED_SHARE * (_bytes_of_weights(graph) - graph.info.folded)))
    outcomes: list[Fired | Refusal] = []
    names: Names | None = None
    for _, scope in list(scopes(graph)):
        plan = _plan(scope)
        graph.info.folded += _leave_large(plan, scope, growth - graph.info.folded)
        outcomes += plan.refusals
        if plan.nodes:
            names = names or Names(graph)
            outcomes += _Folding(graph, scope, plan, names).run()
    if any(isinstance(outcome, Fired) for outcome in outcomes):
        sweep(graph)
    return outcomes


def _make_range_bounds_scalar(graph: Graph) -> None:
    """Convert constants of shape (1,) that a Range reads to scalars, in place.

    Runtimes accept a vector of length 1 there only if its shape is unknown, and folding makes it known.
    """
    for node in all_nodes(graph):
        for place, tensor in enumerate(node.inputs if node.op == "Range" else ()):
            value = constant(tensor)
            if value is not None and value.shape == (1,):
                name = Names(graph).fresh(f"{tensor.name}_scalar")  # rare, so the names are not cached
                replace_input(node, place, Constant(name, value.reshape(())))


def _plan(scope: Body) -> _Plan:
    """Return the nodes of a scope that can be computed now, and the sizes of their outputs."""
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
        elif isinstance(why, Reason):
            plan.refusals.append(Refusal(NAME, node.name, why))
    return plan


def _leave_large(plan: _Plan, scope: Body, growth: int) -> int:
    """Take the nodes with the largest results out of a plan, in place, until the file grows by at most `growth` bytes.

    Nodes that read such a result are taken out too; small operands of both are folded.

    Returns:
        the number of bytes by which the file grows.
    """
    outputs = {id(tensor) for tensor in scope.outputs}
    while True:
        planned = {id(node) for node in plan.nodes}
        stored = [
            (max(0, size - sum(plan.leaves[id(tensor)].values())), place, tensor)
            for place, node in enumerate(plan.nodes)
            for tensor in node.outputs
            if (size := plan.bytes[id(tensor)]) is not None and _is_stored(tensor, planned, outputs)
        ]
        total, large = 0, set()
        for more, place, tensor in sorted(stored, key=lambda row: row[:2]):
            if more and (more > GROWTH_BYTES or total + more > growth):
                large.add(id(tensor))
                size, given = plan.bytes[id(tensor)] or 0, sum(plan.leaves[id(tensor)].values())
                why = Reason("constant-too-large", LARGE.format(tensor.name, size_text(size), size_text(given)))
                plan.refusals.append(Refusal(NAME, plan.nodes[place].name, why))
            else:
                total += more
        if not large:
            return total
        kept: list[Node] = []
        for node in plan.nodes:
            if any(id(tensor) in large for tensor in (*node.inputs, *node.outputs)):
                large.update(id(tensor) for tensor in node.outputs)
            else:
                kept.append(node)
        plan.nodes = kept


def _is_stored(tensor: Tensor, planned: Collection[int], outputs: Collection[int]) -> bool:
    """Return whether a tensor would be a constant of the file: a node outside the plan reads it, or it is an output."""
    return id(tensor) in outputs or any(id(reader) not in planned for reader, _ in readers(tensor))


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
        return False  # a constant output is written like this
    return all(tensor.is_empty() or _plain(dtype(tensor)) for tensor in node.outputs)


def _plain(kind: np.dtype[Any] | None) -> bool:
    return kind is not None and kind.kind in PLAIN


def _ready(tensor: Tensor, plan: _Plan) -> bool:
    if isinstance(tensor, Constant):
        return _plain(dtype(tensor))
    return id(tensor) in plan.leaves


def _leaves(read: Sequence[Tensor], plan: _Plan) -> dict[int, int]:
    """Return the constants that some tensors depend on, with their bytes."""
    leaves: dict[int, int] = {}
    for tensor in read:
        if isinstance(tensor, Constant):
            leaves[id(tensor)] = prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
        elif len(plan.leaves[id(tensor)]) > len(leaves):
            leaves = {**plan.leaves[id(tensor)], **leaves}
        else:
            leaves.update(plan.leaves[id(tensor)])
    if len(leaves) > 64:  # keeps long chains linear: only the largest matter
        leaves = dict(sorted(leaves.items(), key=lambda item: -item[1])[:64])
    return leaves


def _bytes_of_weights(graph: Graph) -> int:
    """Return the bytes of all constants."""
    constants = {id(tensor): tensor for tensor in all_tensors(graph) if isinstance(tensor, Constant)}
    kinds = ((tensor, dtype(tensor)) for tensor in constants.values())
    return sum(prod(tensor.shape) * kind.itemsize for tensor, kind in kinds if kind is not None)


def _bytes(node: Node, tensor: Tensor) -> int | None:
    """Return the size of a node's output in bytes, None if unknown."""
    kind = dtype(tensor)
    if kind is None:
        return None
    bounds = [constant(read) for read in node.inputs] if node.op == "Range" else []
    if len(bounds) == 3 and all(bound is not None and bound.size == 1 for bound in bounds):
        start, limit, delta = (float(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
        steps = (limit - start) / delta if delta else nan
        return max(ceil(steps), 0) * kind.itemsize if isfinite(steps) else None
    dims = static(tensor)
    return None if dims is None else prod(dims) * kind.itemsize


def _too_large(node: Node, leaves: dict[int, int], plan: _Plan) -> Reason | Literal["wait"] | None:
    """Return why a node is not run; `WAIT` until its inputs are folded; None to run it."""
    given = sum(leaves.values())
    for tensor in node.outputs:
        size = _bytes(node, tensor)
        if tensor.is_empty():
            continue
        if size is not None:
            if size > given + GROWTH_BYTES:
                return Reason(
                    "constant-too-large",
                    f"'{tensor.name}' would take {size / 2**20:.1f} MiB, its constants take {given / 2**20:.1f} MiB",
                )
        elif any(id(read) in plan.leaves for read in node.inputs):
            return WAIT
        elif node.op in GROWS:
            return Reason("size-not-known", f"the size of '{tensor.name}' is not known before it is computed")
        elif given > UNKNOWN_BYTES:
            return Reason(
                "size-not-known",
                f"the size of '{tensor.name}' is not known, and its constants take {given / 2**20:.1f} MiB",
            )
    return None


class _Folding:
    """Computes the planned nodes of one scope and replaces their outputs."""

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
        """Yield batches of the planned nodes, split between independent parts so that results of a batch stay small."""
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
        """Return the tensors that nodes outside the plan read, or that are outputs."""
        return [tensor for node in nodes for tensor in node.outputs if _is_stored(tensor, self.planned, self.outputs)]

    def compute(self, nodes: list[Node]) -> list[Fired | Refusal]:
        """Run nodes and store the results; if onnxruntime fails on them together, run independent parts separately."""
        wanted = self.wanted(nodes)
        if not wanted:
            return []
        try:
            results = _run(self.graph, nodes, wanted)
        except DeviceError:
            raise
        except Exception as error:  # onnxruntime's exception types share no base class
            if len(nodes) == 1:
                return [
                    Refusal(
                        NAME, nodes[0].name, Reason("cannot-be-run", f"onnxruntime cannot run it: {_first_line(error)}")
                    )
                ]
            parts = list(_parts(nodes))
            if len(parts) == 1:  # nodes that read constants only; the rest follows in the next round
                parts = [[node] for node in nodes if not any(id(read) in self.plan.leaves for read in node.inputs)]
                for node in nodes:
                    self.planned.discard(id(node))
            return [outcome for part in parts for outcome in self.compute(part)]
        for tensor, values in zip(wanted, results, strict=True):
            self.settle(tensor, values)
        return [Fired(NAME, node.name) for node in nodes]

    def settle(self, tensor: Tensor, values: Array) -> None:
        """Turn a tensor into a constant. An output keeps its name: an Identity provides the value."""
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
    """Return onnxruntime's message without error number and source location."""
    text = str(error).strip().partition("\n")[0].rpartition(" : ")[2]
    return re.sub(r"^/\S+ .*?\) ", "", text) or type(error).__name__


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    """Partition the nodes into groups without dependencies between them, each in the given order."""
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
    """Compute the values of some tensors that depend on constants only."""
    ort: Any = onnxruntime()
    data, weights = serialize(_standalone(graph, nodes, wanted))
    options = session_options("off", threads=1)
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    session = open_session(data, options)
    return [np.asarray(value) for value in session.run([tensor.name for tensor in wanted], {})]


def _standalone(graph: Graph, nodes: Sequence[Node], wanted: Sequence[Tensor]) -> Graph:
    """Copy nodes to a separate model; constants share their values."""
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

    node_copies = [
        Node(node.op, node.name, node.attrs, [copy(t) for t in node.inputs], [copy(t) for t in node.outputs])
        for node in nodes
    ]
    return Graph(node_copies, [], [copy(tensor) for tensor in wanted], opset=graph.opset)


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
