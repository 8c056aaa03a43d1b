"""Replaces an Einsum with a constant weight by a matrix product, which runtimes and quantization support."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from sbonnx.graph import Tensor

from ..edit import Edit
from ..engine import Pattern
from ..match import Match
from ..sample import sample
from ..tree import Const, Op, Var
from .linear import float_weight


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

    def problem(self) -> str | None:
        """Return why it is not a product of the data with a matrix, or None."""
        for term in (self.data, self.weight, self.out):
            if not term.isalpha():
                return f"'{term}' holds an ellipsis, or no letter"
            if len(set(term)) < len(term):
                return f"'{term}' takes a diagonal"
        if both := set(self.rows) & set(self.columns):
            return f"'{min(both)}' is an axis of input, weight and output"
        if not self.rows:
            return "it sums over all axes of the input"
        if alone := set(self.data + self.weight) - set(self.out + self.summed):
            return f"'{min(alone)}' is summed in one input alone"
        return None


def _equation(match: Match) -> Equation | None:
    """Return the equation with the data first, or None if it has no output side or not two inputs."""
    given = match.attribute("einsum", "equation")
    text = (given.decode() if isinstance(given, bytes) else str(given)).replace(" ", "")
    terms, arrow, out = text.partition("->")
    if not arrow or terms.count(",") != 1:
        return None
    one, other = terms.split(",")
    return Equation(other, one, out) if match.root.inputs[0] is match["w"] else Equation(one, other, out)


def _sums(match: Match) -> bool:
    """Return whether a float weight is summed over an axis that it shares with the data."""
    equation = _equation(match)
    return equation is not None and bool(equation.summed) and float_weight(match) is not None


def _check(match: Match) -> str | None:
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


def _rewrite(match: Match, edit: Edit) -> None:
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
    made: Tensor = edit.node("MatMul", [data, edit.constant(match["w"].name, matrix, instead=match["w"])], name=name)
    if len(columns) != 1:
        made = _shaped(made, len(rows), [sizes[letter] for letter in columns], name, edit)
    edit.replace(match.root.outputs[0], _turned(made, rows + columns, equation.out, name, edit))


def _sample(equation: str, text: str, *shape: int) -> onnx.ModelProto:
    return sample(f'g ({text} y) {{ y = Einsum <equation = "{equation}"> (x, w) }}', w=shape)


EINSUM_TO_MATMUL = Pattern(
    "einsum_to_matmul",
    tree=Op("Einsum", Var("x"), Const("w"), name="einsum", commutative=True),
    where=_sums,
    check=_check,
    rewrite=_rewrite,
    source="a sum of products over shared axes is a matrix product of the same numbers laid out as matrices",
    example=lambda: _sample("bhik,dhk->bid", "float[N,2,5,3] x) => (float[N,5,4]", 4, 2, 3),
    counter_example=lambda: _sample("bhk,hkd->bhd", "float[N,2,3] x) => (float[N,2,4]", 2, 3, 4),
)
