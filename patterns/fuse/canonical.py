"""Rewrites Einsum, MatMul, factors of Gemm and Clip as the forms that fusion, planning and runtimes know.

Supported: Einsum of data and a float weight that is summed over a shared axis; MatMul with a weight whose leading axes
have size 1; MatMul of matrices with a bias per column; alpha and beta of a Gemm with constants, beta 0 with any addend;
Clip with the lower bound 0 only.
Refused: equations with an ellipsis, a diagonal, an axis of all three terms, or a sum over one input alone; a MatMul
weight of more axes than its input; Gemm with a computed bias and beta; values out of range of the weight's type.
Equations: a sum of products over shared axes is a matrix product; axes of size 1 broadcast; x W + b = Gemm(x, W, b);
alpha x W + beta b = x (alpha W) + (beta b); max(x, 0) = Relu(x).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, rank
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..rewriting import Edit
from ..tree import Const, Maybe, Op, Var, X
from .linear import (
    Affine,
    Folded,
    along_channel,
    float_weight,
    fold_after,
    heir,
    is_float,
    layer_of,
    linear,
    makes_gemm,
    misfit,
)

SAME = Affine(np.float64(1.0).reshape(()), np.float64(0.0).reshape(()))


def _without_unit_axes(match: Match) -> tuple[int, ...]:
    """Return the shape of the weight without leading axes of size 1; at least a matrix."""
    shape = tuple(match["w"].shape)
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _check_rank(match: Match) -> Reason | None:
    data, weight = rank(match["x"]), len(match["w"].shape)
    if data is None or data < weight:
        return Reason(
            "weight-axes-are-output-axes",
            f"the {weight} axes of '{match['w'].name}' are those of the output: its input has {data or 'unknown'}",
        )
    return None


def _drop_unit_axes(match: Match, edit: Edit) -> None:
    matrix = edit.constant(match["w"].name, match.array("w").reshape(_without_unit_axes(match)), instead=match["w"])
    edit.replace(match.root.outputs[0], edit.node("MatMul", [match["x"], matrix], name=match.root.name))


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


def _check_factors(match: Match) -> Reason | None:
    if "b" in match and constant(match["b"]) is None and match.attribute("linear", "beta") != 1.0:
        return Reason("bias-computed", f"bias '{match['b'].name}' is computed, so beta cannot go into it")
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


def _batched(axes: str) -> onnx.ModelProto:
    return sample(f"g (float[{axes}3,5] x) => (float[1,3,4] y) {{ y = MatMul (x, w) }}", w=(1, 5, 4))


MATMUL_WITHOUT_UNIT_AXES = Pattern(
    name="matmul_without_unit_axes",
    tree=Op("MatMul", Var("x"), Const("w")),
    where=lambda match: len(_without_unit_axes(match)) < len(match["w"].shape),
    check=_check_rank,
    rewrite=_drop_unit_axes,
    source="MatMul broadcasts the axes of its factors before the last two",
    example=lambda: _batched("1,"),
    counter_example=lambda: _batched(""),
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


def _drop_addend(match: Match, edit: Edit) -> None:
    node = match["gemm"]
    attrs = {key: value for key, value in node.attrs.items() if key != "beta"}
    edit.replace(node.outputs[0], edit.node("Gemm", [match["a"], match["w"]], attrs, name=node.name))


def _addend(beta: float) -> onnx.ModelProto:
    """Create a Gemm with an infinite addend, which runtimes do not read if beta is 0."""
    return sample(
        f"g (float[3,5] x) => (float[3,4] y) {{ y = Gemm <beta = {beta}> (x, w, c) }}",
        w=(5, 4),
        c=np.full(4, np.inf if beta == 0 else 1, np.float32),
    )


GEMM_WITHOUT_ADDEND = Pattern(
    name="gemm_without_addend",
    tree=Op("Gemm", Var("a"), Var("w"), Var("c"), name="gemm"),
    where=lambda match: match.attribute("gemm", "beta") == 0.0,
    rewrite=_drop_addend,
    source="0 times C is left out, also where C is infinite: BLAS does not read it",
    example=lambda: _addend(0.0),
    counter_example=lambda: _addend(0.5),
)


@dataclass(frozen=True)
class Equation:
    """Index letters of ``data,weight->out``, one string per term.

    Attributes:
        rows: letters of the data that are in the output, in output order.
        summed: letters of both inputs that are not in the output.
        columns: letters of the weight that are in the output, in output order.
    """

    data: str
    weight: str
    out: str

    @property
    def rows(self) -> str:
        return "".join(letter for letter in self.out if letter in self.data)

    @property
    def columns(self) -> str:
        return "".join(letter for letter in self.out if letter in self.weight)

    @property
    def summed(self) -> str:
        return "".join(letter for letter in self.weight if letter in self.data and letter not in self.out)

    def problem(self) -> Reason | None:
        """Return why it is not a product of the data with a matrix, or None."""
        for term in (self.data, self.weight, self.out):
            if not term.isalpha():
                return Reason("einsum-with-ellipsis", f"'{term}' contains an ellipsis, or no letter")
            if len(set(term)) < len(term):
                return Reason("einsum-with-diagonal", f"'{term}' takes a diagonal")
        if both := set(self.rows) & set(self.columns):
            return Reason("axis-in-every-operand", f"'{min(both)}' is an axis of input, weight and output")
        if not self.rows:
            return Reason("sums-over-all-axes", "it sums over all axes of the input")
        if alone := set(self.data + self.weight) - set(self.out + self.summed):
            return Reason("summed-in-one-input", f"'{min(alone)}' is summed over in one input only")
        return None


def _equation(match: Match) -> Equation | None:
    """Return the equation with the data first, or None if it has no output side or not two inputs."""
    given = match.attribute("einsum", "equation")
    text = (given.decode() if isinstance(given, bytes) else str(given)).replace(" ", "")
    terms, arrow, out = text.partition("->")
    if not arrow or terms.count(",") != 1:
        return None
    left, right = terms.split(",")
    return Equation(right, left, out) if match.root.inputs[0] is match["w"] else Equation(left, right, out)


def _sums(match: Match) -> bool:
    """Return whether a float weight is summed over an axis that it shares with the data."""
    equation = _equation(match)
    return equation is not None and bool(equation.summed) and float_weight(match) is not None


def _why_no_product(match: Match) -> Reason | None:
    equation = _equation(match)
    return None if equation is None else equation.problem()


def _order(have: str, want: str) -> list[int]:
    """Return the permutation from axes `have` to the order `want`."""
    return [have.index(letter) for letter in want]


def _turned(tensor: Tensor, have: str, want: str, name: str, edit: Edit) -> Tensor:
    """Transpose `tensor` from axes `have` to the order `want`."""
    if have == want:
        return tensor
    return edit.node("Transpose", [tensor], {"perm": _order(have, want)}, name=f"{name}_transpose")


def _shaped(tensor: Tensor, rows: int, last: list[int], name: str, edit: Edit) -> Tensor:
    """Reshape `tensor`: the first `rows` axes unchanged (0 in the target), then the sizes `last`."""
    target = edit.constant(f"{name}_shape", np.array([0] * rows + last, np.int64))
    return edit.node("Reshape", [tensor, target], name=f"{name}_reshape")


def _to_matmul(match: Match, edit: Edit) -> None:
    """Replace it by one MatMul with Transposes and Reshapes around it; no-ops are left out."""
    equation = _equation(match)
    assert equation is not None
    name, weight = match["einsum"].name, match.array("w")
    rows, summed, columns = equation.rows, equation.summed, equation.columns
    sizes = dict(zip(equation.weight, weight.shape, strict=True))
    depth, width = prod(sizes[letter] for letter in summed), prod(sizes[letter] for letter in columns)

    data = _turned(match["x"], equation.data, rows + summed, name, edit)
    if len(summed) > 1:
        data = _shaped(data, len(rows), [depth], name, edit)
    matrix = weight.transpose(_order(equation.weight, summed + columns)).reshape(depth, width)
    product: Tensor = edit.node("MatMul", [data, edit.constant(match["w"].name, matrix, instead=match["w"])], name=name)
    if len(columns) != 1:
        product = _shaped(product, len(rows), [sizes[letter] for letter in columns], name, edit)
    edit.replace(match.root.outputs[0], _turned(product, rows + columns, equation.out, name, edit))


def _sample(equation: str, text: str, *shape: int) -> onnx.ModelProto:
    return sample(f'g ({text} y) {{ y = Einsum <equation = "{equation}"> (x, w) }}', w=shape)


EINSUM_TO_MATMUL = Pattern(
    "einsum_to_matmul",
    tree=Op("Einsum", Var("x"), Const("w"), name="einsum", commutative=True),
    where=_sums,
    check=_why_no_product,
    rewrite=_to_matmul,
    source="a sum of products over shared axes is a matrix product of the same numbers laid out as matrices",
    example=lambda: _sample("bhik,dhk->bid", "float[N,2,5,3] x) => (float[N,5,4]", 4, 2, 3),
    counter_example=lambda: _sample("bhk,hkd->bhd", "float[N,2,3] x) => (float[N,2,4]", 2, 3, 4),
)


def _is_zero(values: np.ndarray) -> bool:
    return values.size == 1 and is_float(values) and float(values.reshape(())) == 0.0


def _clip(high: float) -> onnx.ModelProto:
    return sample(
        "g (float[2,3] x) => (float[2,3] y) { y = Clip (x, low, high) }",
        low=np.array(0.0, np.float32),
        high=np.array(high, np.float32),
    )


CLIP_TO_RELU = Pattern(
    name="clip_to_relu",
    tree=Op(
        "Clip",
        Var("x"),
        Const("low", _is_zero),
        Maybe(Const("high", lambda values: values.size == 1 and float(values.reshape(())) == np.inf)),
    ),
    rewrite=lambda match, edit: edit.replace(
        match.root.outputs[0], edit.node("Relu", [match["x"]], name=match.root.name)
    ),
    source="Relu is max(x, 0)",
    example=lambda: _clip(np.inf),
    counter_example=lambda: _clip(6.0),
)
