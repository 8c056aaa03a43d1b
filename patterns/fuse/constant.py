"""Folds Mul, Div, Add or Sub with a constant per channel into the weight and bias of an adjacent linear layer.

Supported: a scalar or one number per channel after a linear layer, after MatMul and its bias, and between a graph input
and a linear layer.
Refused: constants that vary along other axes; computed weights or biases; before a layer with zero padding if the shift
is not 0; a shift at a MatMul of batches, which has no bias; values out of range of the weight's type.
Equations: s (W x + b) + t = (s W) x + (s b + t); W (s x + t) + b = (W s) x + (W t + b).
"""

from __future__ import annotations

import numpy as np
import onnx

from sbonnx.graph import Constant, Node, Tensor
from sbonnx.graph.query import rank, shape
from sbonnx.linear.im2col import reads_padding
from sbonnx.ops import CONVOLUTIONS, MOVES_DATA, POOLS, RESIZES
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..rewriting import Edit
from ..tree import Const, Op, Var, X
from .linear import (
    Affine,
    along_channel,
    channel_constant,
    float_weight,
    fold,
    fold_after,
    fold_before,
    heir,
    layer_of,
    linear,
    makes_gemm,
    of_constant,
    rebuild,
    why_not_constant,
    why_not_fold,
)

ARITHMETIC = ("Mul", "Div", "Add", "Sub")

CARRIES = MOVES_DATA | POOLS | RESIZES | {"Cast", "Pad"}
"""Ops that may be between a graph input and the constants that normalize it."""


def _affine(match: Match, node: Node, values: np.ndarray) -> Affine:
    map_ = of_constant(node.op, values, constant_first=node.inputs[0] is match["c"])
    assert map_ is not None
    return map_


def _is_affine(match: Match, node: Node) -> bool:
    """Return whether weight and operand are floats and the node is affine in its other input (``c / x`` is not)."""
    return float_weight(match) is not None and not (node.op == "Div" and node.inputs[0] is match["c"])


# -- after a linear layer


def _is_tail(match: Match, tensor: Tensor) -> bool:
    """Return whether only the root reads a tensor. Constants of a GELU or HardSwish after a layer are not folded."""
    return len(match.readers(tensor)) == 1


def _meant_after(match: Match) -> bool:
    if not _is_affine(match, match.root) or not _is_tail(match, match["linear"].outputs[0]):
        return False
    # A bias after MatMul remains an Add, unless both can be a Gemm.
    return match["linear"].op != "MatMul" or match.root.op in ("Mul", "Div") or makes_gemm(match)


def _operand_after(match: Match) -> np.ndarray | Reason:
    """Return the operand as one number per output channel, or the reason why it is not."""
    node, layer = match["linear"], layer_of(match)
    if node.op in CONVOLUTIONS:
        return channel_constant(match, "c", len(layer.shape), 1, layer.out_channels)
    return channel_constant(match, "c", 2 if node.op == "Gemm" else rank(node.outputs[0]), -1, layer.out_channels)


def _check_after(match: Match) -> Reason | None:
    why = why_not_constant(match)
    if why is not None:
        return why
    values = _operand_after(match)
    if isinstance(values, str):
        return values
    return why_not_fold(fold_after, match, _affine(match, match.root, values))


def _rewrite_after(match: Match, edit: Edit) -> None:
    values = _operand_after(match)
    assert isinstance(values, np.ndarray)
    folded = fold(fold_after, match, _affine(match, match.root, values))
    rebuild(match, edit, match["linear"].inputs[0], folded)


# -- after MatMul and its bias


def _meant_biased(match: Match) -> bool:
    return _is_affine(match, match.root) and len(match["w"].shape) >= 2 and _is_tail(match, match["add"].outputs[0])


def _scales_biased(match: Match) -> tuple[np.ndarray, np.ndarray] | Reason:
    """Return weight and bias of MatMul + Add, each times the operand, or the reason why not."""
    columns = match["w"].shape[-1]
    scale = channel_constant(match, "c", rank(match.root.outputs[0]), -1, columns)
    if isinstance(scale, str):
        return scale
    bias = along_channel(match.array("b"), 1, 0, columns)
    if bias is None:
        return Reason(
            "not-one-number-per-channel", f"'{match['b'].name}' is not one number for each of {columns} columns"
        )
    map_ = _affine(match, match.root, scale)
    folded = fold_after(layer_of(match), match.array("w"), None, map_)
    scaled = (map_.scale * bias.astype(np.float64)).astype(match.array("b").dtype)
    return folded.problem() or (folded.weight, scaled)


def _check_biased(match: Match) -> Reason | None:
    scaled = _scales_biased(match)
    return scaled if isinstance(scaled, Reason) else None


def _rewrite_biased(match: Match, edit: Edit) -> None:
    scaled = _scales_biased(match)
    assert not isinstance(scaled, Reason)
    weight, bias = (heir(edit, match[name], value) for name, value in zip("wb", scaled, strict=True))
    product = edit.node("MatMul", [match["linear"].inputs[0], weight], name=match["linear"].name)
    edit.replace(match.root.outputs[0], edit.node("Add", [product, bias], name=match["add"].name))


# -- before a linear layer


def _meant_before(match: Match) -> bool:
    """Match only constants that normalize a graph input: elsewhere they may be the end of a GELU or a norm."""
    return _is_affine(match, match["scale"]) and _from_input(match["x"])


def _from_input(tensor: Tensor) -> bool:
    """Return whether a tensor is a graph input after data movement, pooling, constant shifts and scales only."""
    while tensor.inputs:
        producer: Node = tensor.inputs[0]
        moving = [read for read in producer.inputs if not isinstance(read, Constant)]
        if producer.op not in CARRIES and not (producer.op in ARITHMETIC and len(moving) == 1):
            return False
        tensor = moving[0] if moving else producer.inputs[0]
    return True


def _operand_before(match: Match) -> np.ndarray | Reason:
    """Return the operand as one number per input channel, or the reason why it is not."""
    layer = layer_of(match)
    if layer.trans_a:
        return Reason("gemm-transposes-input", "Gemm transposes its input")
    given = shape(match["x"])
    fits = given is not None and (layer.op == "MatMul" or len(given) == len(layer.shape))
    if given is None or not fits or given[layer.data_axis] != layer.in_channels:
        return Reason(
            "channels-not-known",
            f"'{match['x'].name}' of shape {given} is not known to have {layer.in_channels} channels",
        )
    return channel_constant(match, "c", len(given), layer.data_axis, layer.in_channels)


def _check_before(match: Match) -> Reason | None:
    why = why_not_constant(match)
    if why is not None:
        return why
    values = _operand_before(match)
    if isinstance(values, str):
        return values
    map_ = _affine(match, match["scale"], values)
    node: Node = match["linear"]
    if map_.shift.any() and reads_padding(layer_of(match), node.attrs):
        return Reason(
            "kernel-crosses-edge",
            f"'{node.name}' applies less than its whole kernel at some outputs, where a shift before it differs",
        )
    return why_not_fold(fold_before, match, map_)


def _rewrite_before(match: Match, edit: Edit) -> None:
    values = _operand_before(match)
    assert isinstance(values, np.ndarray)
    rebuild(match, edit, match["x"], fold(fold_before, match, _affine(match, match["scale"], values)))


# -- the patterns


def _after(constant_shape: tuple[int, ...]) -> onnx.ModelProto:
    return sample(
        """g (float[1,3,5,5] x) => (float[1,4,3,3] y) {
            c = Conv <kernel_shape = [3,3]> (x, w, b)
            y = Mul (c, s)
        }""",
        w=(4, 3, 3, 3),
        b=(4,),
        s=constant_shape,
    )


def _biased(bias_shape: tuple[int, ...]) -> onnx.ModelProto:
    return sample(
        """g (float[2,3,5] x) => (float[2,3,4] y) {
            p = MatMul (x, w)
            a = Add (p, b)
            y = Mul (a, s)
        }""",
        w=(5, 4),
        b=bias_shape,
        s=(4,),
    )


def _before(pad: int) -> onnx.ModelProto:
    return sample(
        f"""g (float[1,3,5,5] x) => (float[1,4,h,v] y) {{
            c = Sub (x, mean)
            y = Conv <kernel_shape = [3,3], pads = [{pad},{pad},{pad},{pad}]> (c, w)
        }}""",
        w=(4, 3, 3, 3),
        mean=(1, 3, 1, 1),
    )


FUSE_CONSTANT = Pattern(
    name="fuse_constant",
    tree=Op(ARITHMETIC, linear(X), Const("c"), commutative=True),
    where=_meant_after,
    check=_check_after,
    rewrite=_rewrite_after,
    source="s * (W x + b) + t = (s W) x + (s b + t)",
    example=lambda: _after((4, 1, 1)),
    counter_example=lambda: _after((1, 4, 3, 3)),
)

FUSE_SCALE_OF_BIASED = Pattern(
    name="fuse_scale_of_biased_matmul",
    tree=Op(
        ("Mul", "Div"),
        Op("Add", Op("MatMul", X, Var("w"), name="linear"), Const("b"), name="add", commutative=True),
        Const("c"),
        commutative=True,
    ),
    where=_meant_biased,
    check=_check_biased,
    rewrite=_rewrite_biased,
    source="s * (x W + b) = x (W s) + s b",
    example=lambda: _biased((4,)),
    counter_example=lambda: _biased((3, 4)),
)

FUSE_CONSTANT_BEFORE = Pattern(
    name="fuse_constant_before",
    tree=linear(Op(ARITHMETIC, Var("x"), Const("c"), name="scale", commutative=True)),
    where=_meant_before,
    check=_check_before,
    rewrite=_rewrite_before,
    source="W (s * x + t) + b = (W s) x + (W t + b), where no zero padding stands between",
    example=lambda: _before(pad=0),
    counter_example=lambda: _before(pad=1),
)
