"""Rewrites of weights that are stored in integers and computed with in float: how a runtime decodes them.

The DequantizeLinear of a weight that LSTM, GRU, RNN, a Loop or a linear op without an integer kernel reads becomes a
Cast and a Mul, which onnxruntime folds when it loads the file; it would run a DequantizeLinear each time. A Gather
reads rows of codes, which are decoded behind it: before it, onnxruntime would dequantize the whole table in every run,
and OpenVINO would keep it in float.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import onnx

from sbonnx.backends.base import in_every_scope
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import CONTROL_FLOW, DEQUANTIZE, EMBEDDING, RECURRENT
from sbonnx.spec import Array


@in_every_scope()
def decode_at_load(body: Body, names: edit.Names) -> Iterator[str]:
    """Let recurrent ops and control flow read weights through Cast and Mul instead of a DequantizeLinear."""
    yield from _decode(body, names, lambda user: user.op in RECURRENT | CONTROL_FLOW)


def decode_weights(graph: Graph, nodes: Collection[str]) -> list[str]:
    """Let the named ops read weights through Cast and Mul instead of a DequantizeLinear. In place."""

    @in_every_scope()
    def rewrite(body: Body, names: edit.Names) -> Iterator[str]:
        yield from _decode(body, names, lambda user: user.name in nodes)

    return rewrite(graph)


def _decode(body: Body, names: edit.Names, decodes: Callable[[Node], bool]) -> Iterator[str]:
    for node in list(body.nodes):
        uses = [use for use in query.readers(node.outputs[0]) if decodes(use[0])]
        scale = _scale_of_codes(node) if uses else None
        if scale is None:
            continue
        codes, output = node.inputs[0], node.outputs[0]
        factor = edit.add_constant(body, f"{codes.name}_factor", scale, names)
        decoded = _decoded(body, codes, factor, str(codes.name), names)
        for user, index in uses:
            edit.replace_input(user, index, decoded)
        yield f"{output.name}: folded when the file is loaded"


@in_every_scope()
def decode_rows(body: Body, names: edit.Names) -> Iterator[str]:
    """Let a Gather read the codes of a table with a scale for each row, or one, and decode what it read."""
    for node in list(body.nodes):
        uses = [user for user, index in query.readers(node.outputs[0]) if index == 0 and user.op in EMBEDDING]
        scale = _scale_of_codes(node) if any(node in body.nodes for node in uses) else None
        if scale is None or scale.shape[1:] not in ((), (1,)):
            continue
        codes = node.inputs[0]
        scales = edit.add_constant(body, f"{codes.name}_scales", scale, names)
        for user in [user for user in uses if user in body.nodes and user.attrs.get("axis", 0) == 0]:
            output, rows = user.outputs[0], user.inputs[1]
            read = Variable(names.fresh(f"{output.name}_codes"), codes.dtype, output.shape)
            edit.replace_input(user, 0, codes)
            edit.replace_output(user, 0, read)
            factor = scales
            if scale.ndim:
                gather = edit.add_node(body, "Gather", [scales, rows], names=names, stem=f"{user.name}_scales")
                factor = gather.outputs[0]
                factor.dtype = scale.dtype
            _decoded(body, read, factor, str(output.name), names, output)
            yield f"{user.name}: reads codes"


def _scale_of_codes(node: Node) -> Array | None:
    """Return the scales of a DequantizeLinear of stored codes without zero points, in a shape that broadcasts."""
    if node.op not in DEQUANTIZE or node.attrs.get("block_size") or not isinstance(node.inputs[0], Constant):
        return None
    scale, zero = query.constant(node.inputs[1]), query.constant(query.optional_input(node, 2))
    if scale is None or (zero is not None and zero.any()):
        return None
    rank = len(node.inputs[0].shape)
    axis = int(node.attrs.get("axis", 1)) % rank
    return scale.reshape([-1 if at == axis else 1 for at in range(rank)]) if scale.size > 1 else scale.reshape(())


def _decoded(
    body: Body, codes: Tensor, factor: Tensor, stem: str, names: edit.Names, output: Tensor | None = None
) -> Tensor:
    """Add a Cast of codes and a Mul with their scales, and return the product, which `output` names."""
    kind = np.dtype(query.dtype(factor))
    to = int(onnx.helper.np_dtype_to_tensor_dtype(kind))
    wide = Variable(names.fresh(f"{stem}_wide"), kind, codes.shape)
    floats = Variable(names.fresh(f"{stem}_decoded"), kind, codes.shape) if output is None else output
    edit.add_node(body, "Cast", [codes], names=names, stem=f"{stem}_Cast", attrs={"to": to}, outputs=[wide])
    edit.add_node(body, "Mul", [wide, factor], names=names, stem=f"{stem}_Mul", outputs=[floats])
    return floats
