"""Conversion of a float32 graph, with or without Q/DQ, to a strongly typed graph in half precision; bf16 emulation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from sbonnx import graph as graphs
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.ops import QUANTIZE
from sbonnx.planning.magnitudes import KINDS, FloatKind, Magnitudes
from sbonnx.precision.decide import Decision, decide
from sbonnx.precision.representable import FLOAT32, Ranges, Slots, is_float32, narrowed
from sbonnx.report import Note, Refusal

OPSET: Final = {"fp32": 13, "fp16": 13, "bf16": 22}
"""First opset in which common ops support the type: convolutions and pools have bfloat16 since 22. Q/DQ needs 19."""


@dataclass(frozen=True)
class PrecisionResult:
    """Result of `convert`.

    Attributes:
        notes: number of converted nodes, and constants that were changed to fit, one sentence each.
        refusals: what stays float32 with the direct reason; nodes that stay float32 because of these are only counted.
    """

    notes: tuple[Note, ...]
    refusals: tuple[Refusal, ...]


def convert(graph: Graph, magnitudes: Mapping[str, Magnitudes], kind: str, keep_io: bool = True) -> PrecisionResult:
    """Convert float32 tensors to `kind` in place, except those that it cannot represent, with Casts between the two.

    The result is strongly typed: every node has one float type, shared by its inputs (except fixed types of its
    schema), as TensorRT's strongly typed networks require. The following stay float32: tensors whose values in
    calibration overflow (with a margin of 2) or underflow; constants, ops and bodies that cannot be converted
    (`decide`); arithmetic on shapes. Q/DQ pairs are converted if their scales are exact in the type; scales were
    rounded to it before codes were computed (`Plan.float_type`).

    Args:
        graph: sorted; opset 19 or newer with Q/DQ, 22 for most of bf16.
        magnitudes: of the float32 variables by name, before Q/DQ insertion; tensors without an entry stay float32.
        kind: "fp16" or "bf16".
        keep_io: keep the types of graph inputs and outputs.

    Raises:
        KeyError: unknown kind.
    """
    chosen = KINDS[kind]
    decision = decide(graph, Ranges(magnitudes, chosen), keep_io=keep_io)
    edges = [*graph.inputs, *graph.outputs]
    wide_edges = [tensor.name for tensor in edges if is_float32(tensor) and id(tensor) in decision.tensors]
    casts = write(graph, decision, chosen, keep_io=keep_io)
    casts -= drop_idle_casts(graph)
    floats = [
        node for node in query.all_nodes(graph) if any(_is(x, chosen.dtype) or is_float32(x) for x in node.outputs)
    ]
    floats = [node for node in floats if node.op != "Cast"]
    narrow = sum(any(_is(tensor, chosen.dtype) for tensor in node.outputs) for node in floats)
    notes = [
        Note(
            "float-converted",
            f"{kind}: {narrow} of {len(floats)} float nodes converted, {len(floats) - narrow} stay float32, "
            f"{max(casts, 0)} Casts between them and at the model's inputs and outputs",
        )
    ]
    if not keep_io and wide_edges:
        notes.append(
            Note("edges-stay-float", f"inputs and outputs that stay float32 for their values: {', '.join(wide_edges)}")
        )
    notes.extend(decision.notes)
    return PrecisionResult(tuple(notes), tuple(decision.refusals))


def _is(tensor: Tensor, dtype: np.dtype[Any]) -> bool:
    return bool(query.dtype(tensor) == dtype)


def write(graph: Graph, decision: Decision, kind: FloatKind, *, keep_io: bool) -> int:
    """Convert the graph in place as decided. Returns the number of added Casts.

    Every tensor has the output type of its node, and is cast at most once, directly after that node, for all readers of
    the other type, including those in bodies. With `keep_io` inputs and outputs keep type and name; else they are
    converted if their values allow it. Outputs of bodies of If, Loop and Scan stay float32.
    """
    writer = _PrecisionWriter(graph, decision, kind, keep_io)
    writer.main()
    edit.sort(graph)
    return writer.casts


class _PrecisionWriter:
    def __init__(self, graph: Graph, decision: Decision, kind: FloatKind, keep_io: bool) -> None:
        self.graph, self.decision, self.kind, self.keep_io = graph, decision, kind, keep_io
        self.names = edit.Names(graph)
        self.casts = 0
        self.kept = list(query.all_tensors(graph))  # keeps the tensors alive, because their ids are used as keys
        self.floats = {id(tensor) for tensor in self.kept if is_float32(tensor)}
        self.home: dict[int, Body] = {}  # by tensor: the body that defines it
        self.forms: dict[tuple[int, bool], Tensor] = {}  # (tensor, narrow) -> the tensor in that type
        self.constants: dict[tuple[int, bytes], Constant] = {}

    def main(self) -> None:
        """Convert the graph and all bodies in it."""
        ends = {id(tensor) for tensor in self.graph.outputs}
        for tensor in self.graph.inputs:
            if id(tensor) in self.floats:
                narrow = not self.keep_io and id(tensor) not in self.decision.tensors and id(tensor) not in ends
                self._given(tensor, self.graph, narrow)
        self._body(self.graph, ends)

    def _body(self, body: Body, ends: set[int]) -> None:
        for node in query.ordered(body.nodes):
            slots = self.decision.slots.get(id(node))
            if slots is not None and node.op in QUANTIZE and isinstance(node.inputs[0], Variable):
                # a QuantizeLinear reads its input in the type that it has
                slots = slots if (id(node.inputs[0]), True) in self.forms else None
            self._inputs(node, slots)
            for _, inner in query.bodies(node):
                for tensor in inner.inputs:
                    if id(tensor) in self.floats:
                        self._given(tensor, inner, narrow=False)
                self._body(inner, set())
                for place, tensor in enumerate(inner.outputs):  # outputs of bodies stay float32
                    if id(tensor) in self.floats and isinstance(tensor, Variable):
                        inner.outputs[place] = self._form(tensor, narrow=False)
            self._outputs(node, slots, body, ends)

    def _given(self, tensor: Tensor, body: Body, narrow: bool) -> None:
        """Register the type in which a tensor is available."""
        self.home[id(tensor)] = body
        self.forms[id(tensor), narrow] = tensor
        if narrow:
            tensor.dtype = self.kind.dtype

    # --- inputs of a node ---------------------------------------------------------------------------

    def _inputs(self, node: Node, slots: Slots | None) -> None:
        for index, tensor in enumerate(node.inputs):
            either = node.op == "Cast" or (slots is not None and slots.indifferent)
            if id(tensor) not in self.floats or (either and isinstance(tensor, Variable)):
                continue
            narrow = slots is not None and index in slots.inputs
            if isinstance(tensor, Constant):
                if narrow:
                    edit.replace_input(node, index, self._constant(node, index, tensor))
                continue
            wanted = self._form(tensor, narrow)
            if wanted is not tensor:
                edit.replace_input(node, index, wanted)

    def _form(self, tensor: Tensor, narrow: bool) -> Tensor:
        """Return a variable in the wanted type, with a Cast after its node if it has the other type."""
        if (id(tensor), narrow) not in self.forms:
            source = self.forms[id(tensor), not narrow]
            name = f"{tensor.name}_{self.kind.name if narrow else 'fp32'}"
            result = Variable(self.names.fresh(name), self._dtype(narrow), tensor.shape)
            self._cast(source, result, self.home[id(tensor)])
            self.forms[id(tensor), narrow] = result
        return self.forms[id(tensor), narrow]

    def _cast(self, source: Tensor, result: Tensor, body: Body) -> None:
        to = onnx_dtype(result.dtype)
        body.nodes.append(Node("Cast", self.names.fresh(f"{result.name}/Cast"), {"to": to}, [source], [result]))
        self.casts += 1

    def _dtype(self, narrow: bool) -> np.dtype[Any]:
        return self.kind.dtype if narrow else FLOAT32

    def _constant(self, node: Node, index: int, tensor: Constant) -> Constant:
        """Return a constant in the narrower type, shared by all its readers except those with a replaced value."""
        replaced = self.decision.replaced.get((id(node), index))
        value = query.constant(tensor) if replaced is None else replaced.values
        if value is None:
            raise ValueError(f"'{tensor.name}' is not constant")
        key = (id(tensor), b"" if replaced is None else value.tobytes())
        if key not in self.constants:
            narrow = edit.add_constant(
                self.graph, f"{tensor.name}_{self.kind.name}", narrowed(value, self.kind), self.names
            )
            self.constants[key] = narrow
        return self.constants[key]

    # --- outputs of a node --------------------------------------------------------------------------

    def _outputs(self, node: Node, slots: Slots | None, body: Body, ends: set[int]) -> None:
        for index, tensor in enumerate(node.outputs):
            if id(tensor) not in self.floats:
                continue
            narrow = slots is not None and index in slots.outputs
            if narrow and node.op == "ConstantOfShape":
                value = query.attribute(node, "value")
                node.attrs["value"] = Constant(f"{node.name}_value", narrowed(value, self.kind))
            elif narrow:
                name = "to" if node.op == "Cast" else "output_dtype"
                if node.op == "Cast" or name in node.attrs:
                    node.attrs[name] = onnx_dtype(self.kind.dtype)
            fits = id(tensor) not in self.decision.tensors
            wanted = narrow if id(tensor) not in ends else not self.keep_io and fits
            if wanted == narrow:
                self._given(tensor, body, narrow)
                continue
            inner = Variable(
                self.names.fresh(f"{tensor.name}_{self.kind.name if narrow else 'fp32'}"), shape=tensor.shape
            )
            inner.dtype = self._dtype(narrow)
            edit.replace_output(node, index, inner)
            self._given(tensor, body, wanted)
            self.forms[id(tensor), narrow] = inner
            self._cast(inner, tensor, body)


def drop_idle_casts(graph: Graph) -> int:
    """Remove Casts to the type of their input, in place, except those that give an output. Return their number."""
    outputs = query.output_names(graph)
    dropped = 0
    for _, body in query.scopes(graph):
        for node in list(body.nodes):
            if node.op != "Cast" or node.outputs[0].name in outputs:
                continue
            kind = query.dtype(node.inputs[0])
            if kind is not None and kind == query.dtype(node.outputs[0]):
                for reader, index in query.readers(node.outputs[0]):
                    edit.replace_input(reader, index, node.inputs[0])
                dropped += 1
    if dropped:
        edit.sweep(graph)
    return dropped


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = frozenset({np.dtype(np.float16), BFLOAT16})

TYPES_OF_OUTPUTS = ("to", "output_dtype", "dtype")
"""Attributes that contain the type of an output."""


def emulated(graph: Graph) -> Graph:
    """Return a float32 copy in which every bfloat16 tensor is rounded to bfloat16 when it is computed.

    onnxruntime's CPU provider supports little more than Cast for bfloat16, so each tensor passes a Cast to bfloat16 and
    one back. Ops compute in float32 and the result is rounded once, as in kernels that accumulate in float32. Inputs
    and outputs of the copy are float32.
    """
    copy = graphs.copy(graph)
    names = edit.Names(copy)
    halves = _widen(copy, {BFLOAT16})
    rounded = {id(tensor) for tensor in halves}
    for _, body in list(query.scopes(copy)):
        order: list[Node] = []
        for tensor in body.inputs:
            if id(tensor) in rounded:
                inner = Variable(names.fresh(f"{tensor.name}_rounded"), FLOAT32, tensor.shape)
                for reader, index in query.readers(tensor):
                    edit.replace_input(reader, index, inner)
                order.extend(_rounding(tensor, inner, names))
        for node in list(body.nodes):
            order.append(node)
            for index, tensor in enumerate(node.outputs):
                if id(tensor) in rounded:
                    exact = Variable(names.fresh(f"{tensor.name}_exact"), FLOAT32, tensor.shape)
                    edit.replace_output(node, index, exact)
                    order.extend(_rounding(exact, tensor, names))
        body.nodes[:] = order
    edit.sort(copy)
    return copy


def widened(graph: Graph) -> Graph:
    """Return a copy in which every float16 and bfloat16 tensor is float32; without any, the graph itself."""
    if not any(query.dtype(tensor) in HALVES for tensor in query.all_tensors(graph)):
        return graph
    copy = graphs.copy(graph)
    _widen(copy, HALVES)
    return copy


def _widen(graph: Graph, kinds: Collection[np.dtype[Any]]) -> list[Tensor]:
    """Make tensors and attributes of some types float32, in place. Return these tensors."""
    narrow = [tensor for tensor in query.all_tensors(graph) if query.dtype(tensor) in kinds]
    for tensor in narrow:
        if isinstance(tensor, Constant):
            tensor.values = np.asarray(query.constant(tensor)).astype(np.float32)
        else:
            tensor.dtype = FLOAT32
    numbers = {onnx_dtype(kind) for kind in kinds}
    for node in query.all_nodes(graph):
        for name in TYPES_OF_OUTPUTS:
            if node.attrs.get(name) in numbers:
                node.attrs[name] = onnx_dtype(FLOAT32)
        fill = query.attribute(node, "value")
        if isinstance(fill, np.ndarray) and fill.dtype in kinds:
            node.attrs["value"] = Constant(f"{node.name}_value", fill.astype(np.float32))
    return narrow


def _rounding(source: Tensor, result: Tensor, names: edit.Names) -> list[Node]:
    half = Variable(names.fresh(f"{result.name}_bf16"), BFLOAT16, source.shape)
    steps: list[tuple[Tensor, Tensor, Any]] = [(source, half, BFLOAT16), (half, result, FLOAT32)]
    return [
        Node("Cast", names.fresh(f"{after.name}/Cast"), {"to": onnx_dtype(kind)}, [before], [after])
        for before, after, kind in steps
    ]
