"""Fixes and their results, and the editing context that they share: a graph, its lint view, the common edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.linting.model_view import COMMUTES, RENAMES, Quantizer, View
from sbonnx.ops import DEQUANTIZE, QUANTIZE
from sbonnx.qdq.arithmetic import QDQParams
from sbonnx.qdq.strip import restore
from sbonnx.spec import Array
from sbonnx.values import JsonValue


@dataclass(frozen=True)
class Fixed(JsonValue):
    """One place that was fixed, or could not be fixed.

    Attributes:
        rule: id of the rule, such as "T02".
        node: name of the node, or "".
        tensor: name of the tensor, or "".
        what: description of the change, or the reason why it was not possible.
        done: the model was changed.
        exact: the model computes the same values as before, bit for bit.
    """

    rule: str
    node: str
    tensor: str
    what: str
    done: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Fix:
    """One automatic fix.

    Attributes:
        rules: ids of the rules whose findings it removes.
        title: what it does.
        apply: changes the graph of the bench and returns the results; called again until it changes nothing.
    """

    rules: tuple[str, ...]
    title: str
    apply: Callable[[Bench], Iterable[Fixed]]


PASSES: Final = COMMUTES | RENAMES


class Bench:
    """Editing context for one step of one fix. The view shows the graph as it was at the start of the step.

    Attributes:
        graph: the graph to edit.
        target: such as "tensorrt@11".
        view: the view that the rules read.
    """

    def __init__(self, graph: Graph, target: str, cpu: str = "") -> None:
        self.graph = graph
        self.target = target
        self.view = View(graph, target, cpu)
        self.names = edit.Names(graph)
        self._scopes: dict[int, Body] = {id(node): body for _, body in query.scopes(graph) for node in body.nodes}
        self._floats: dict[int, Tensor] = {}
        self._rectified: dict[int, Tensor] = {}
        self._constants: dict[tuple[str, bytes], Constant] = {}

    def scope_of(self, node: Node) -> Body:
        """Return the graph or body that contains a node."""
        return self._scopes[id(node)]

    def constant(self, stem: str, values: Array) -> Constant:
        """Create a constant; equal values with the same stem share one constant."""
        values = np.asarray(values)
        key = (stem, f"{values.dtype} {values.shape} ".encode() + values.tobytes())
        if key not in self._constants:
            self._constants[key] = edit.add_constant(self.graph, stem, values, self.names)
        return self._constants[key]

    def set_numbers(self, node: Node, new: QDQParams, stem: str) -> None:
        """Set a new scale and an explicit zero point on a Q or DQ node. In place."""
        edit.replace_input(node, 1, self.constant(f"{stem}_scale", new.scale))
        self.set_zero(node, self.constant(f"{stem}_zero_point", new.zero))

    def set_zero(self, node: Node, zero: Tensor) -> None:
        """Set the zero point of a Q or DQ node. In place."""
        if len(node.inputs) > 2:
            edit.replace_input(node, 2, zero)
        else:
            node.inputs.append(zero)
        node.attrs.pop("output_dtype", None) if node.op in QUANTIZE else None

    def numbers(self, quantizer: Quantizer) -> QDQParams | None:
        """Return the parameters of a Q or DQ node, read through one Cast or Identity; None if they are computed."""
        kind = query.dtype(quantizer.node.inputs[1])
        if quantizer.scale is None or quantizer.codes is None or (quantizer.has_zero and quantizer.zero is None):
            return None
        scale = quantizer.scale.astype(quantizer.scale.dtype if kind is None else kind)
        zero = np.zeros(scale.shape) if quantizer.zero is None else quantizer.zero
        return QDQParams(
            scale,
            zero.astype(code_type(quantizer.codes)),
            1 if quantizer.axis is None else quantizer.axis,
            quantizer.block,
        )

    # --- removing pairs -----------------------------------------------------------------------------------------------

    def floats(self, back: Quantizer) -> Tensor | str:
        """Return the float tensor for a DequantizeLinear, or the reason why there is none.

        A constant is dequantized. A computed tensor is the unrounded one, after the Relu or Clip that its
        QuantizeLinear replaced.
        """
        if id(back.node) in self._floats:
            return self._floats[id(back.node)]
        source: Tensor | str
        before = self.view.quantizer_of(back.data)
        if self.view.is_constant(back.data):
            source = self._float_constant(back)
        elif before is None or not before.quantizes:
            source = f"the codes '{back.data.name}' are computed without a QuantizeLinear"
        else:
            source = self.rectified(before.node)
        if isinstance(source, str):
            return source
        kinds = {query.dtype(source), query.dtype(back.output)} - {None}
        if len(kinds) > 1:
            return f"'{source.name}' is {query.dtype(source)}, the pair returns {query.dtype(back.output)}"
        self._floats[id(back.node)] = source
        return source

    def _float_constant(self, back: Quantizer) -> Tensor | str:
        codes = query.constant(back.data)
        if codes is None:
            before = self.view.quantizer_of(back.data)
            value = None if before is None else query.constant(before.data)
            written = None if before is None else self.numbers(before)
            codes = None if value is None or written is None else written.quantize(value)
        parameters = self.numbers(back)
        values = None if codes is None or parameters is None else parameters.dequantized(codes)
        if values is None:
            return f"the numbers of '{back.name}' are not constants that fit"
        return self.constant(f"{back.data.name}_float", values)

    def rectified(self, quantize: Node) -> Tensor:
        """Return the input of a QuantizeLinear with the Relu or Clip restored that it replaced; created once."""
        if id(quantize) not in self._rectified:
            self._rectified[id(quantize)] = restore(quantize, self.scope_of(quantize), self.names)
        return self._rectified[id(quantize)]

    def bypass(self, node: Node, index: int) -> str | None:
        """Let input `index` of a node read floats instead of a pair, through ops that only move values. In place.

        Returns:
            None, or the reason why it is not possible.
        """
        tensor: Tensor = node.inputs[index]
        while True:
            maker = query.producer(tensor)
            if maker is None:
                return f"'{tensor.name}' has no pair"
            if maker.op in DEQUANTIZE:
                break
            if maker.op not in PASSES:
                return f"'{tensor.name}' has no pair"
            if len(query.readers(tensor)) != 1 or self.view.leaves(tensor):
                return f"{maker.op} '{maker.name}' between is read by others as well"
            node, index, tensor = maker, 0, maker.inputs[0]
        back = self.view.quantizer_of(tensor)
        source = f"'{maker.name}' is new" if back is None else self.floats(back)
        if isinstance(source, str):
            return source
        edit.replace_input(node, index, source)
        return None

    def remove(self, back: Quantizer) -> str | None:
        """Replace a DequantizeLinear by floats for all its readers. In place; return a reason on failure."""
        source = self.floats(back)
        if isinstance(source, str):
            return source
        edit.replace_all_uses(back.output, source, graph=self.scope_of(back.node))
        return None


def code_type(name: str) -> np.dtype[Any]:
    """Return a quantized type by its name, including small types."""
    return np.dtype(getattr(ml_dtypes, name, name))


def typed(stem: str, like: Tensor, names: edit.Names, dtype: Any = None) -> Variable:
    """Create a tensor with the shape of another, and its type unless `dtype` is given."""
    shape = query.shape(like)
    kind = query.dtype(like) if dtype is None else dtype
    return Variable(names.fresh(stem), kind, None if shape is None else list(shape))
