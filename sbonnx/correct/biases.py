"""Biases of linear nodes, which can compensate the mean error of a rounded weight; solutions with corrected biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sbonnx.calib.qparams.solve import bias_codes, weight_of
from sbonnx.graph import Body, Constant, Graph, Node, Tensor
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import bodies, constant, dtype, readers, scopes
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import ADDS, LINEAR
from sbonnx.planning.types import Plan, Solution
from sbonnx.report import Refusal
from sbonnx.spec import Array, QParams


def bias_of(graph: Graph, node: Node) -> Constant | None:
    """Return the constant that is added to the outputs of `node`, one value for each output, and is used nowhere else.

    This is input 2 of Conv, ConvTranspose and Gemm, or the constant operand of the Add that is the only reader of a
    MatMul. ``constant(tensor).reshape(-1)``, (out channels,), has the values in the order of the outputs.

    Returns:
        None if there is no bias, it is not constant, its size differs from the number of outputs, it is scaled (Gemm's
        beta), or it is read elsewhere; see `give_biases`. For many nodes, use `biases_of`.
    """
    return _own(node, _held(graph))


def biases_of(graph: Graph) -> dict[str, Constant]:
    """Return `bias_of` of every linear node that has one, by the name of the node, including branches."""
    held = _held(graph)
    biases = {node.name: _own(node, held) for _, body in scopes(graph) for node in body.nodes}
    return {name: tensor for name, tensor in biases.items() if tensor is not None}


def common_bias(graph: Graph, nodes: Sequence[Node]) -> Constant | None:
    """Return the constant that is added to the outputs of each of `nodes` and is used nowhere else, as `bias_of`."""
    held = _held(graph)
    biases = [_own(node, held, len(nodes)) for node in nodes]
    return biases[0] if all(tensor is biases[0] for tensor in biases) else None


def give_biases(graph: Graph) -> tuple[str, ...]:
    """Give every Conv, ConvTranspose and Gemm with a constant weight a separate bias, in place; new biases are zero.

    A bias that several nodes read is copied for each, a scalar bias is broadcast to all outputs, Gemm's beta is
    multiplied into the values. The function of the graph does not change. A bias that is computed at run time is
    unchanged.

    Returns:
        names of the changed nodes.
    """
    names: Names | None = None
    held = _held(graph)
    given = []
    for _, body in scopes(graph):
        for node in body.nodes:
            values = None if _own(node, held) is not None else _wanted(node)
            if values is not None:
                names = Names(graph) if names is None else names
                place = LINEAR[node.op].bias
                assert place is not None
                had = place < len(node.inputs) and not node.inputs[place].is_empty()
                constant = add_constant(body, node.inputs[place].name if had else f"{node.name}.bias", values, names)
                if place < len(node.inputs):
                    replace_input(node, place, constant)
                else:
                    node.inputs.append(constant)
                if node.op == "Gemm":
                    node.attrs.pop("beta", None)
                given.append(node.name)
    return tuple(given)


def outputs_of(node: Node) -> int | None:
    """Return the number of output channels of a linear node with a constant weight; None for any other node."""
    layer = LinearLayer.of(node)
    if isinstance(layer, str) or layer.index == 0 or (node.op == "MatMul" and layer.groups != 1):
        return None
    return layer.out_channels


def bias_reader(node: Node) -> tuple[Node, int] | None:
    """Return the node and input index at which the bias of `node` is read, or would be; None if impossible."""
    kind = LINEAR[node.op]
    if kind.bias is not None:
        return node, kind.bias
    uses = readers(node.outputs[0])
    if len(uses) != 1 or uses[0][0].op not in ADDS:
        return None
    return uses[0][0], 1 - uses[0][1]


def _own(node: Node, held: frozenset[int], uses: int = 1) -> Constant | None:
    """Implement `bias_of`; `held`: ids of the outputs of the graph and its bodies; `uses`: times that it is read."""
    outputs = outputs_of(node)
    place = None if outputs is None else bias_reader(node)
    scaled = node.op == "Gemm" and float(node.attrs.get("beta", 1.0)) != 1.0
    if outputs is None or place is None or place[1] >= len(place[0].inputs) or scaled:
        return None
    if place[0] is not node and id(node.outputs[0]) in held:
        return None
    tensor = place[0].inputs[place[1]]
    kind, shape = dtype(tensor), tuple(tensor.shape or ())
    floating = kind is not None and (kind.kind == "f" or kind.name == "bfloat16")
    fits = floating and len(shape) > 0 and shape[-1] == outputs and all(dim == 1 for dim in shape[:-1])
    if not isinstance(tensor, Constant) or not fits:  # (O,) or (1, ..., O)
        return None
    return tensor if len(readers(tensor)) == uses and id(tensor) not in held else None


def _wanted(node: Node) -> Array | None:
    """Return the values of a separate bias for a node that has none; None if it cannot have one."""
    kind, outputs = LINEAR.get(node.op), outputs_of(node)
    if kind is None or kind.bias is None or outputs is None:
        return None
    weight_type = dtype(node.inputs[kind.weight])
    tensor: Tensor | None = node.inputs[kind.bias] if kind.bias < len(node.inputs) else None
    if tensor is None or tensor.is_empty():
        return np.zeros(outputs, weight_type)
    values = constant(tensor)
    if values is None or values.size not in (1, outputs) or (values.size == outputs != values.shape[-1]):
        return None
    beta = float(node.attrs.get("beta", 1.0)) if node.op == "Gemm" else 1.0
    wide = np.broadcast_to(values.reshape(-1).astype(np.float64) * beta, (outputs,))
    return np.ascontiguousarray(wide.astype(values.dtype))


def _held(graph: Graph) -> frozenset[int]:
    """Return ids of the outputs of the graph and of every body."""
    stack: list[Body] = [graph]
    held: set[int] = set()
    while stack:
        body = stack.pop()
        held.update(id(tensor) for tensor in body.outputs)
        stack.extend(inner for node in body.nodes for _, inner in bodies(node))
    return frozenset(held)


def with_corrections(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    solution: Solution,
    constants: Mapping[str, Array],
    qparams: Mapping[str, QParams] | None = None,
) -> Solution:
    """Return `solution` with new constants and new weight scales; biases are requantized to match.

    Args:
        tensors: of all scopes, by name.
        constants: new values by tensor name, in the type and shape of the tensor.
        qparams: by site key; other sites and the codes of weights are unchanged.
    """
    numbers = {**solution.qparams, **(qparams or {})}
    values = {**solution.constants, **constants}
    codes, scales = dict(solution.codes), dict(solution.bias_scales)
    refusals = list(solution.refusals)
    for site in plan.of_role("bias"):
        if site.key not in solution.codes:
            continue
        bias = values.get(site.tensor)
        codes_of_bias = bias_codes(site, weight_of(site, tensors[site.tensor]) if bias is None else bias, numbers)
        if isinstance(codes_of_bias, Refusal):
            refusals.append(codes_of_bias)
            del codes[site.key], scales[site.key]
        else:
            codes[site.key], scales[site.key] = codes_of_bias
    return replace(
        solution, qparams=numbers, codes=codes, bias_scales=scales, constants=values, refusals=tuple(refusals)
    )
