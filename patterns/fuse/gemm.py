"""Fuses MatMul and its bias into Gemm, and folds a Gemm's alpha and beta into its constants."""

from __future__ import annotations

import numpy as np
import onnx

from sbonnx.graph import Node
from sbonnx.graph.query import constant

from ..edit import Edit
from ..engine import Pattern
from ..match import Match
from ..sample import sample
from ..tree import Const, Op, Var, X
from .affine import Affine, Folded, along_channel, fold_after
from .linear import float_weight, heir, layer_of, linear, makes_gemm, misfit

SAME = Affine(np.float64(1.0).reshape(()), np.float64(0.0).reshape(()))


def _is_linear(match: Match) -> bool:
    """Return whether the sum is a matrix product with one float bias per column."""
    if not makes_gemm(match) or float_weight(match) is None:
        return False
    return along_channel(match.array("c"), 2, 1, match["w"].shape[1]) is not None


def _to_gemm(match: Match, edit: Edit) -> None:
    columns = match["w"].shape[1]
    values = match.array("c")
    bias = match["c"]
    if values.shape != (columns,):
        bias = edit.constant(bias.name, np.broadcast_to(values.reshape(-1), (columns,)), instead=bias)
    node = match["linear"]
    edit.replace(match.root.outputs[0], edit.node("Gemm", [node.inputs[0], match["w"], bias], name=node.name))


def _has_factors(match: Match) -> bool:
    if float_weight(match) is None:
        return False
    return match.attribute("linear", "alpha") != 1.0 or ("b" in match and match.attribute("linear", "beta") != 1.0)


def _folded(match: Match) -> Folded:
    """Return the constants with alpha and beta folded in; a computed bias is not changed."""
    bias = constant(match["b"]) if "b" in match else None
    return fold_after(layer_of(match), match.array("w"), bias, SAME)


def _check_factors(match: Match) -> str | None:
    if "b" in match and constant(match["b"]) is None and match.attribute("linear", "beta") != 1.0:
        return f"bias '{match['b'].name}' is computed, so beta cannot go into it"
    return misfit(match) or _folded(match).problem()


def _fold_factors(match: Match, edit: Edit) -> None:
    node: Node = match["linear"]
    folded = _folded(match)
    inputs = [node.inputs[0], heir(edit, match["w"], folded.weight)]
    if "b" in match:
        inputs.append(match["b"] if folded.bias is None else heir(edit, match["b"], folded.bias))
    attrs = {key: value for key, value in node.attrs.items() if key not in ("alpha", "beta")}
    edit.replace(node.outputs[0], edit.node("Gemm", inputs, attrs, name=node.name))


def _matmul_add(extra_output: str = "") -> onnx.ModelProto:
    return sample(
        f"""g (float[3,5] x) => (float[3,4] y{extra_output}) {{
            p = MatMul (x, w)
            y = Add (b, p)
        }}""",
        w=(5, 4),
        b=(4,),
    )


def _gemm(bias: str) -> onnx.ModelProto:
    """Create a Gemm with a constant bias ("b") or a bias that is an input ("c")."""
    return sample(
        f"""g (float[3,5] x, float[4] c) => (float[3,4] y) {{
            y = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, {bias})
        }}""",
        w=(4, 5),
        b=(4,),
    )


MATMUL_ADD_TO_GEMM = Pattern(
    name="matmul_add_to_gemm",
    tree=Op("Add", Op("MatMul", X, Var("w"), name="linear"), Const("c"), commutative=True),
    where=_is_linear,
    rewrite=_to_gemm,
    source="Gemm is x W + b for matrices",
    example=_matmul_add,
    counter_example=lambda: _matmul_add(extra_output=", float[3,4] p"),
)

FOLD_GEMM_FACTORS = Pattern(
    name="fold_gemm_factors",
    tree=linear(X, ("Gemm",)),
    where=_has_factors,
    check=_check_factors,
    rewrite=_fold_factors,
    source="Gemm is alpha * x W + beta * b: with constants, x (alpha W) + (beta b)",
    example=lambda: _gemm("b"),
    counter_example=lambda: _gemm("c"),
)
