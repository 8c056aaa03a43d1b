"""Decides which tensors and nodes stay float32, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, query
from sbonnx.ops import (
    BOUNDS,
    CONTROL_FLOW,
    COORDINATES,
    DEQUANTIZE,
    MOVES_DATA,
    NORMS,
    QDQ,
    QUANTIZE,
    RANDOM,
    RECURRENT,
)
from sbonnx.patterns.blocks import NATIVE, find_blocks
from sbonnx.plan import BITS
from sbonnx.plan.magnitudes import FloatKind
from sbonnx.precision.constants import exactly, misfit
from sbonnx.precision.masks import Replacement, guarded, is_guard, replacement
from sbonnx.precision.ranges import UNSEEN, Ranges
from sbonnx.precision.slots import Slots, is_float32, slots_of
from sbonnx.report import Refusal

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
    notes: list[str] = field(default_factory=list)


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
        looped = self._looped()
        computed = _from_data(self.graph)
        for scope, node in self.nodes:
            found = "" if any(scope.startswith(path) for path in looped) else self._node(node, computed)
            if isinstance(found, Slots):
                self.made.slots[id(node)] = found
            elif found:
                self._refuse(node.name, found)
        for scope, tensor in self._floats():
            why = self.ranges.misfit(tensor) if id(tensor) not in self.excused | self.made.tensors else None
            if why == UNSEEN:
                outer = next((known for known in self.unseen if not known or scope.startswith(f"{known}/")), scope)
                self.unseen[outer] = self.unseen.get(outer, 0) + 1
            elif why is not None:
                self._refuse(tensor.name, why)
            if why is not None:
                self.made.tensors.add(id(tensor))
        for scope, count in self.unseen.items():
            where = scope or "the graph"
            self._refuse(where, f"no sample reached {count} of its tensors: their values are not known")
        self._spread()
        self._norms()
        self._follow()
        return self.made

    def _refuse(self, where: str, why: str) -> None:
        self.made.refusals.append(Refusal(f"convert to {self.kind.name}", where, why))

    def _looped(self) -> list[str]:
        """Return scopes of Loop and Scan, whose bodies run many times per sample and are not observed."""
        found = []
        for scope, node in self.nodes:
            if node.op in CONTROL_FLOW and node.op != "If":
                self._refuse(node.name, f"the body of a {node.op} is not observed: its values are not known")
                found.append(f"{scope}/{node.name}/" if scope else f"{node.name}/")
        return found

    def _floats(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (scope, tensor) for every float32 variable."""
        for scope, body in query.scopes(self.graph):
            for tensor in [*body.inputs, *(out for node in body.nodes for out in node.outputs)]:
                if is_float32(tensor) and isinstance(tensor, Variable):
                    yield scope, tensor

    def _node(self, node: Node, computed: set[int]) -> Slots | str:
        """Return the slots of a converted node, or why it is not converted, or "" if there is nothing to convert."""
        floats = [tensor for tensor in [*node.inputs, *node.outputs] if is_float32(tensor)]
        if not floats or node.op in CONTROL_FLOW:
            return ""
        if node.op in QDQ:
            return self._pair(node)
        if node.op in RECURRENT:
            return f"the states inside {node.op} are not observed"
        if node.op in COORDINATES:
            return f"{node.op} reads positions"
        if node.op in RANDOM or self._on_shapes(node, computed):
            return ""
        if node.op in BOUNDS and int(node.attrs.get(BITS, 0)) > self.kind.mantissa:
            return ""  # limits of a quantized value with more bits than the type's mantissa
        slots = slots_of(node, self.graph.opset, self.kind)
        if isinstance(slots, str):
            return slots
        return self._constants(node, slots) or self.ranges.inside(node) or slots

    def _on_shapes(self, node: Node, computed: set[int]) -> bool:
        """Return whether the node computes on shapes and constants only, which must be exact.

        Moving data of a constant (slicing it to size) does not count.
        """
        made = [tensor for tensor in node.outputs if is_float32(tensor)]
        moved = node.op in MOVES_DATA and isinstance(node.inputs[0], Constant)
        return bool(made) and not moved and not any(id(tensor) in computed for tensor in made)

    def _pair(self, node: Node) -> Slots | str:
        """Return the slots of a Q or DQ if its scale is exact in the type; the codes were computed with it."""
        scale = query.constant(node.inputs[1])
        if scale is None or not exactly(scale, self.kind):
            return f"its scale is not exact in {self.kind.name}" if scale is not None else "its scale is no constant"
        return slots_of(node, self.graph.opset, self.kind)

    def _constants(self, node: Node, slots: Slots) -> str | None:
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
            found, excused = replacement(node, index, value, self.ranges, self.graph)
            if found is None:
                if is_guard(node, index, value, self.kind):
                    self.made.tensors.update(id(tensor) for tensor in guarded(node) if is_float32(tensor))
                return f"its constant '{tensor.name}' {why}"
            self.made.replaced[id(node), index] = found
            self.excused.update(id(tensor) for tensor in excused)
            if found.why and found.why not in self.made.notes:
                self.made.notes.append(found.why)
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
        """Return whether the node that computes a float32 variable stays float32."""
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
        """Return whether a node input still reads float32."""
        slots = self.made.slots.get(id(reader))
        if slots is not None and slots.indifferent:
            return True
        return reader.op not in QUANTIZE and reader.op != "Cast" and (slots is None or index not in slots.inputs)


def _from_data(graph: Graph) -> set[int]:
    """Return ids of tensors that depend on the values of an input or quantized weight, not only on a shape."""
    found: set[int] = {id(tensor) for tensor in graph.inputs}

    def visit(body: Body) -> None:
        for node in query.ordered(body.nodes):
            for _, inner in query.bodies(node):
                if node.op != "If":
                    found.update(id(tensor) for tensor in inner.inputs)
                visit(inner)
            reads = any(id(tensor) in found for tensor in query.dependencies(node))
            if node.op in QDQ or (reads and node.op not in ("Shape", "Size")):
                found.update(id(tensor) for tensor in node.outputs)

    visit(graph)
    return found
