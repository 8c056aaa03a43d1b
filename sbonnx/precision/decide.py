"""Decides which tensors and nodes stay float32, and which constants (masks, bounds, guards) are replaced to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, query
from sbonnx.ops import (
    BOUNDS,
    CARRIES_MASK,
    CONTROL_FLOW,
    COORDINATES,
    DEQUANTIZE,
    MOVES_DATA,
    NORMS,
    QDQ,
    QUANTIZE,
    RANDOM,
    RECURRENT,
    ROOTS,
)
from sbonnx.patterns.blocks import NATIVE, find_blocks
from sbonnx.planning import BITS
from sbonnx.planning.magnitudes import FloatKind
from sbonnx.precision.representable import (
    UNSEEN,
    Ranges,
    Slots,
    exactly,
    finite_peak,
    is_float32,
    misfit,
    narrowed,
    slots_of,
)
from sbonnx.report import Note, Reason, Refusal
from sbonnx.spec import Array

MASK_SHARE: Final = 4.0
"""Divisor of the largest number for replaced masks (float16: -16376).

Its exp is 0 next to any score, two masks and the scores can be added without overflow, and no row of a softmax becomes
all infinite.
"""

NEAR: Final = 4.0
"""Values of a tensor within this factor of the mask constant are treated as mask values."""

GUARD_ERROR: Final = 0.25
"""Tolerated relative error of a division guard: if the guard matters at all, the quotient is noise."""

UNSEEN_CHANGE: Final = 2.0**11
"""A guard this many times smaller than the value it is added to has no effect in float16."""


@dataclass(frozen=True)
class Replacement:
    """Equivalent replacement of a constant at one input of a node.

    Attributes:
        node, index: the input.
        values: float32.
        why: the note about it; None without one.
    """

    node: Node
    index: int
    values: Array
    why: Note | None


def is_guard(node: Node, index: int, values: Array, kind: FloatKind) -> bool:
    """Return whether a constant keeps a divisor from 0: a small positive number, added or used as a lower limit."""
    lower = node.op in ("Add", "Max") or (node.op == "Clip" and index == 1)
    return lower and values.size > 0 and bool((values > 0).all()) and float(values.max()) < kind.normal


def guard(node: Node, index: int, values: Array, ranges: Ranges) -> Replacement | None:
    """Return the guard itself if it is accurate enough after rounding, or a larger one if no observed value changes."""
    kind = ranges.kind
    near = narrowed(values, kind).astype(np.float32)
    if bool((np.abs(near - values) <= GUARD_ERROR * values).all()):
        return Replacement(node, index, values, None)
    others = [tensor for at, tensor in enumerate(node.inputs) if at != index and is_float32(tensor)]
    observed = ranges.of(others[0]) if others else None
    room = UNSEEN_CHANGE if node.op == "Add" else 1.0
    if observed is None or observed.lo < 0 or observed.zeros or observed.nan or observed.smallest < kind.normal * room:
        return None
    why = Note(
        "guard-raised",
        f"'{node.name}' ({node.op}): {float(values.min()):.1g}, which is 0 in {kind.name}, is {kind.normal:.2g} now; "
        f"what it guards was never below {observed.smallest:.2g}",
    )
    return Replacement(node, index, np.full_like(values, kind.normal), why)


def guarded(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that depend on a guard that must not become 0: its sum, through roots, up to the division."""
    stack = [node.outputs[0]]
    while stack:
        tensor = stack.pop()
        yield tensor
        stack.extend(reader.outputs[0] for reader, index in query.readers(tensor) if reader.op in ROOTS and index == 0)


def mask(
    node: Node, index: int, values: Array, ranges: Ranges, graph: Graph
) -> tuple[Replacement, list[Tensor]] | None:
    """Return a mask that float16 can represent, and the tensors that contain it; None if the constant is not a mask.

    A mask is a constant with huge numbers that only reaches softmaxes, through sums, products and data movement. On
    this path calibration must have seen huge values only below 0, none larger than the constant, and none between the
    mask and the range of the type: their `exp` is 0 for any size.
    """
    kind = ranges.kind
    peak = finite_peak(values)
    if peak <= kind.largest or node.op not in CARRIES_MASK:
        return None
    way = _way(node, graph)
    if way is None:
        return None
    for tensor in way:
        observed = ranges.of(tensor)
        limit = 2.0 ** int(np.log2(kind.largest / MASK_SHARE))
        if observed is None or observed.hi > limit or observed.peak > peak * (1 + 2.0**-10):
            return None
        if observed.between(limit, 2.0 ** np.floor(np.log2(peak / NEAR))):
            return None
    small = kind.largest / MASK_SHARE
    huge = np.isfinite(values) & (np.abs(values) > small)
    held = np.where(huge, np.sign(values) * np.float32(small), values).astype(np.float32)
    why = Note(
        "mask-reduced",
        f"'{node.name}' ({node.op}): the mask {peak:.3g} is {small:.6g} in {kind.name}; a softmax reads it",
    )
    return Replacement(node, index, held, why), way


def _way(node: Node, graph: Graph) -> list[Tensor] | None:
    """Return the tensors from `node` to the softmaxes; None if anything else reads one of them, or one is an output."""
    outputs = query.output_names(graph)
    between: dict[int, Tensor] = {}
    stack = [node]
    while stack:
        for tensor in stack.pop().outputs:
            readers = query.readers(tensor)
            if id(tensor) in between or not is_float32(tensor):
                continue
            if tensor.name in outputs or not readers:
                return None
            between[id(tensor)] = tensor
            for reader, _ in readers:
                if reader.op in CARRIES_MASK:
                    stack.append(reader)
                elif reader.op != "Softmax":
                    return None
    return list(between.values())


def replacement(
    node: Node, index: int, values: Array, ranges: Ranges, graph: Graph
) -> tuple[Replacement | None, list[Tensor]]:
    """Return the replacement of a constant that does not fit, or None, and tensors that need not fit then.

    A limit beyond the range of the type becomes its largest number, which has the same effect on all its values.
    """
    kind, peak = ranges.kind, finite_peak(values)
    if node.op in BOUNDS and not (node.op == "Clip" and index == 0) and peak > kind.largest:
        why = Note(
            "limit-reduced",
            f"'{node.name}' ({node.op}): its limit {peak:.3g} is {kind.largest:.6g}, the largest {kind.name}",
        )
        return Replacement(node, index, np.clip(values, -kind.largest, kind.largest), why), []
    if is_guard(node, index, values, kind):
        return guard(node, index, values, ranges), []
    held = mask(node, index, values, ranges, graph)
    return (None, []) if held is None else held


FUSED_NORMS: Final = frozenset({NATIVE[op] for op in NORMS & NATIVE.keys()})
"""Kinds of normalization blocks that runtimes fuse."""


@dataclass
class Decision:
    """Decision about what stays float32.

    Attributes:
        slots: by id of a converted node.
        tensors: ids of float32 variables that the narrower type cannot represent.
        replaced: constants to write instead, by (id of the node, input).
        refusals: direct reasons, without consequences of other refusals.
        notes: constants that were changed.
    """

    slots: dict[int, Slots] = field(default_factory=dict)
    tensors: set[int] = field(default_factory=set)
    replaced: dict[tuple[int, int], Replacement] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def decide(graph: Graph, ranges: Ranges, *, keep_io: bool = True) -> Decision:
    """Decide what stays float32 when the rest of a graph is converted. The graph is not changed.

    A tensor stays float32 because of its values (`Ranges.misfit`), a node because of its types, constants or
    intermediate results. A node that reads or writes such a tensor stays float32, and so does a normalization of which
    a part stays. Everything else is converted.
    """
    return _Decider(graph, ranges, keep_io).run()


class _Decider:
    def __init__(self, graph: Graph, ranges: Ranges, keep_io: bool) -> None:
        self.graph = graph
        self.keep_io = keep_io
        self.ranges = ranges
        self.kind: FloatKind = ranges.kind
        self.made = Decision()
        self.nodes = [(scope, node) for scope, body in query.scopes(graph) for node in body.nodes]
        self.excused: set[int] = set()
        self.unseen: dict[str, int] = {}

    def run(self) -> Decision:
        looped = []  # scopes of Loop and Scan, whose bodies run many times per sample and are not observed
        for scope, node in self.nodes:
            if node.op in CONTROL_FLOW and node.op != "If":
                self._refuse(
                    node.name,
                    Reason("body-not-observed", f"the body of a {node.op} is not observed: its values are not known"),
                )
                looped.append(f"{scope}/{node.name}/" if scope else f"{node.name}/")
        computed = _from_data(self.graph)
        for scope, node in self.nodes:
            outcome = None if any(scope.startswith(path) for path in looped) else self._node(node, computed)
            if isinstance(outcome, Slots):
                self.made.slots[id(node)] = outcome
            elif outcome is not None:
                self._refuse(node.name, outcome)
        for scope, tensor in self._floats():
            why = self.ranges.misfit(tensor) if id(tensor) not in self.excused | self.made.tensors else None
            if why is UNSEEN:
                outer = next(
                    (covered for covered in self.unseen if not covered or scope.startswith(f"{covered}/")), scope
                )
                self.unseen[outer] = self.unseen.get(outer, 0) + 1
            elif why is not None:
                self._refuse(tensor.name, why)
            if why is not None:
                self.made.tensors.add(id(tensor))
        for scope, count in self.unseen.items():
            where = scope or "the graph"
            self._refuse(
                where, Reason("not-reached", f"no sample reached {count} of its tensors: their values are not known")
            )
        self._spread()
        self._norms()
        self._follow()
        return self.made

    def _refuse(self, where: str, why: Reason) -> None:
        self.made.refusals.append(Refusal(f"convert to {self.kind.name}", where, why))

    def _floats(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (scope, tensor) for every float32 variable."""
        for scope, body in query.scopes(self.graph):
            for tensor in [*body.inputs, *(out for node in body.nodes for out in node.outputs)]:
                if is_float32(tensor) and isinstance(tensor, Variable):
                    yield scope, tensor

    def _node(self, node: Node, computed: set[int]) -> Slots | Reason | None:
        """Return the slots of a converted node, or why it is not converted, or None if there is nothing to convert."""
        floats = [tensor for tensor in [*node.inputs, *node.outputs] if is_float32(tensor)]
        if not floats or node.op in CONTROL_FLOW:
            return None
        if node.op in QDQ:  # converted if the scale, with which codes were computed, is exact in the type
            scale = query.constant(node.inputs[1])
            if scale is None or not exactly(scale, self.kind):
                return (
                    Reason("scale-not-exact", f"its scale is not exact in {self.kind.name}")
                    if scale is not None
                    else Reason("scale-not-constant", "its scale is not constant")
                )
            return slots_of(node, self.graph.opset, self.kind)
        if node.op in RECURRENT:
            return Reason("states-not-observed", f"the states inside {node.op} are not observed")
        if node.op in COORDINATES:
            return Reason("reads-positions", f"{node.op} reads positions")
        if node.op in RANDOM or self._on_shapes(node, computed):
            return None
        if node.op in BOUNDS and int(node.attrs.get(BITS, 0)) > self.kind.mantissa:
            return None  # limits of a quantized value with more bits than the type's mantissa
        slots = slots_of(node, self.graph.opset, self.kind)
        if isinstance(slots, str):
            return slots
        return self._constants(node, slots) or self.ranges.inside(node) or slots

    def _on_shapes(self, node: Node, computed: set[int]) -> bool:
        """Return whether the node computes on shapes and constants only, which must be exact.

        Moving data of a constant (slicing it to size) does not count.
        """
        outputs = [tensor for tensor in node.outputs if is_float32(tensor)]
        moved = node.op in MOVES_DATA and isinstance(node.inputs[0], Constant)
        return bool(outputs) and not moved and not any(id(tensor) in computed for tensor in outputs)

    def _constants(self, node: Node, slots: Slots) -> Reason | None:
        """Return why a constant of the node cannot be converted, or None. Guards, masks and bounds are replaced."""
        held = [(index, node.inputs[index]) for index in sorted(slots.inputs)]
        if node.op == "ConstantOfShape":
            value = query.attribute(node, "value")
            return misfit(value, self.kind)
        for index, tensor in held:
            value = query.constant(tensor)
            why = None if value is None else misfit(value, self.kind)
            if value is None or why is None:
                continue
            substitute, excused = replacement(node, index, value, self.ranges, self.graph)
            if substitute is None:
                if is_guard(node, index, value, self.kind):
                    self.made.tensors.update(id(tensor) for tensor in guarded(node) if is_float32(tensor))
                return Reason(why.code, f"its constant '{tensor.name}' {why}")
            self.made.replaced[id(node), index] = substitute
            self.excused.update(id(tensor) for tensor in excused)
            if substitute.why is not None and substitute.why not in self.made.notes:
                self.made.notes.append(substitute.why)
        return None

    def _spread(self) -> None:
        """Keep nodes in float32 that read or write such tensors. A Q may read a converted tensor and write codes."""
        for _, node in self.nodes:
            slots = self.made.slots.get(id(node))
            if slots is None:
                continue
            touched = [node.inputs[i] for i in slots.inputs] + [node.outputs[i] for i in slots.outputs]
            if node.op == "Cast":
                touched = list(node.outputs)
            if any(id(tensor) in self.made.tensors for tensor in touched):
                del self.made.slots[id(node)]

    def _norms(self) -> None:
        """Keep normalizations of several nodes in float32.

        A normalization stays float32 as a whole if its input is float32; else its float32 parts do, with everything in
        it that leads to them.

        Runtimes fuse it in the type of its input, with sums in float32 or not. onnxruntime 1.31 rejects a model with
        other Casts around the sums than those from and to float16, because LayerNormFusion then mixes types.
        """
        nodes = query.node_by_name(self.graph)
        tensors = query.tensors_by_name(self.graph)
        for block in find_blocks(self.graph):
            inside = [nodes[name] for name in block.nodes]
            if block.kind not in FUSED_NORMS or len(inside) == 1:
                continue
            wide = {id(node) for node in inside if id(node) not in self.made.slots}
            if any(self._comes_wide(tensors[name]) for name in block.inputs):
                wide = {id(node) for node in inside}
            for node in reversed(inside):
                if id(node) in wide or any(id(reader) in wide for x in node.outputs for reader in x.outputs):
                    wide.add(id(node))
                    self.made.slots.pop(id(node), None)

    def _comes_wide(self, tensor: Tensor) -> bool:
        maker = query.producer(tensor)
        if not is_float32(tensor):
            return False
        if maker is None:
            return self.keep_io or id(tensor) in self.made.tensors
        return id(maker) not in self.made.slots

    def _follow(self) -> None:
        """Keep a DequantizeLinear, Cast or data movement between float32 nodes in float32, to avoid extra Casts."""
        given = {id(tensor) for tensor in self.graph.outputs}
        outputs = query.output_names(self.graph)
        for _, node in reversed(self.nodes):
            if id(node) not in self.made.slots or not (node.op in DEQUANTIZE or node.op in MOVES_DATA | {"Cast"}):
                continue
            ends = [tensor for tensor in node.outputs if tensor.name in outputs]
            readers = [use for tensor in node.outputs for use in query.readers(tensor)]
            if not (ends or readers) or (not self.keep_io and any(id(tensor) in given for tensor in ends)):
                continue
            wide = all(self._stays(reader, index) for reader, index in readers)
            before = node.op not in MOVES_DATA or self._comes_wide(node.inputs[0])
            if wide and before:
                del self.made.slots[id(node)]

    def _stays(self, reader: Node, index: int) -> bool:
        slots = self.made.slots.get(id(reader))
        if slots is not None and slots.indifferent:
            return True
        return reader.op not in QUANTIZE and reader.op != "Cast" and (slots is None or index not in slots.inputs)


def _from_data(graph: Graph) -> set[int]:
    """Return ids of tensors that depend on the values of an input or quantized weight, not only on a shape."""
    dependent: set[int] = {id(tensor) for tensor in graph.inputs}

    def visit(body: Body) -> None:
        for node in query.ordered(body.nodes):
            for _, inner in query.bodies(node):
                if node.op != "If":
                    dependent.update(id(tensor) for tensor in inner.inputs)
                visit(inner)
            reads = any(id(tensor) in dependent for tensor in query.dependencies(node))
            if node.op in QDQ or (reads and node.op not in ("Shape", "Size")):
                dependent.update(id(tensor) for tensor in node.outputs)

    visit(graph)
    return dependent
