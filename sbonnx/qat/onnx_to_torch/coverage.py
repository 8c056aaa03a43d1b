"""Table of the ONNX operators that can be reimported, from the schemas of the installed onnx.

python -m sbonnx.qat.onnx_to_torch.coverage > docs/qat_operators.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import onnx

from sbonnx.ops import LISTS, RANDOM, REPEATED, SIGNALS, TEXTS
from sbonnx.torchnet import FUNCTIONS

State = Literal["supported", "inlined", "missing"]

FIRST: Final = 13
"""`sbonnx.graph.load` converts older models to this opset."""

LAST: Final = 23
"""Last opset on the page; `coverage` also supports newer ones."""

MARKS: Final = {"supported": "+", "inlined": "o", "missing": "-"}
"""Marks on the page; empty if an opset does not have the op."""

INLINED: Final = {
    "Constant": "a constant of the graph",
    "If": "where its condition is constant, given inputs fixed to values and shapes; else refused by name",
}
"""Ops that are removed before modules are created."""

LIMITS: Final = {
    "AveragePool": "over one to three axes",
    "Cast": "between types that torch has; no strings, no 4-bit types",
    "CastLike": "between types that torch has; no strings, no 4-bit types",
    "Col2Im": "over two axes",
    "Conv": "over one to three axes",
    "ConvTranspose": "over one to three axes",
    "DequantizeLinear": "of integers",
    "DeformConv": "over two axes",
    "Dropout": "does nothing, as at inference; a training_mode that is set is refused",
    "GridSample": "cubic over two axes only",
    "LpPool": "over one to three axes",
    "MaxPool": "over one to three axes; with indices where both sides are padded alike",
    "NonMaxSuppression": "without gradient",
    "QuantizeLinear": "to integers of 8, 16 and 32 bits, without gradient",
    "RoiAlign": "a sampling ratio of 0 for regions of the shape of their cells only",
    "Unique": "not along an axis",
    "BatchNormalization": "trained by the mode of the module; its batch statistics cannot be read as outputs",
}
"""Limitations of supported ops."""

_BODY = "repeats a body: unroll it in the export, or leave it out of the model to train"
_RANDOM = "draws random numbers: training would not compute what the model does"
_TEXT = "works on text, which torch has no tensors of"
_LIST = "may be nothing at all, which torch has no value for"
_LOSS = "is a loss: training brings its own"
_SIGNAL = "makes a constant of its arguments: export it as one"
WHY: Final = {
    **dict.fromkeys(sorted(REPEATED), _BODY),
    **dict.fromkeys(sorted(RANDOM - {"Dropout"}), _RANDOM),
    **dict.fromkeys(sorted(TEXTS), _TEXT),
    **dict.fromkeys(sorted(LISTS - FUNCTIONS.keys() - {"SequenceMap"}), _LIST),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _LOSS),
    **dict.fromkeys(sorted(SIGNALS - FUNCTIONS.keys()), _SIGNAL),
    "ImageDecoder": "decodes files: do it before the model",
    "MaxRoiPool": "has no use in models of today: RoiAlign takes its place",
    "Scatter": "is deprecated: ScatterElements takes its place",
}  # fmt: skip
"""Reasons why ops are missing."""

UNWRITTEN: Final = "is new or rare, and not written yet"


@dataclass(frozen=True)
class Coverage:
    """One op in one opset.

    Attributes:
        op: name of the op, in the default domain.
        opset: the opset.
        since: opset in which this version of the op was introduced.
        state: "supported" (a module computes it), "inlined" (removed before modules are created), or "missing".
        why: reason why the op is missing, or limitations of an available op ("" if there are none).
    """

    op: str
    opset: int
    since: int
    state: State
    why: str


def coverage(opsets: Sequence[int] | None = None) -> tuple[Coverage, ...]:
    """Return one row for each op and opset, sorted by op, then opset, without deprecated ops.

    Args:
        opsets: default: 13 to the newest opset of the installed onnx.
    """
    newest = int(onnx.defs.onnx_opset_version())
    chosen = range(FIRST, newest + 1) if opsets is None else sorted(opsets)
    names = sorted({schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain})
    rows = []
    for op in names:
        state: State = "inlined" if op in INLINED else "supported" if op in FUNCTIONS else "missing"
        why = INLINED.get(op, "") or (LIMITS.get(op, "") if state == "supported" else WHY.get(op, UNWRITTEN))
        for opset in chosen:
            since = _since(op, opset)
            if since is not None:
                rows.append(Coverage(op, opset, since, state, why))
    return tuple(rows)


def _since(op: str, opset: int) -> int | None:
    """Return the opset that introduced the op's version in `opset`; None if there is none or it is deprecated."""
    try:
        schema = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else int(schema.since_version)


def page() -> str:
    """Return the table as a documentation page, for opsets `FIRST` to `LAST`."""
    opsets = range(FIRST, LAST + 1)
    rows: dict[str, list[Coverage]] = {}
    for row in coverage(opsets):
        rows.setdefault(row.op, []).append(row)
    states = [found[-1].state for found in rows.values()]
    lines = [
        "# Operators that can be trained",
        "",
        f"Written by `python -m sbonnx.qat.onnx_to_torch.coverage` from the schemas of onnx {onnx.__version__}.",
        "",
        f"Of {len(rows)} operators of opsets {FIRST} to {LAST}, {states.count('supported')} are computed by a module "
        f"of their own (+), {states.count('inlined')}",
        f"are gone before there are modules (o), {states.count('missing')} are missing (-). Empty: the opset does not "
        "have it. A missing operator is one",
        f"error that names the node. Older models are lifted to opset {FIRST} when they are read.",
        "",
        f"| operator | {' | '.join(map(str, opsets))} | what is not done, or why it is missing |",
        f"|---{'|---' * len(opsets)}|---|",
    ]
    for op, found in rows.items():
        marks = {row.opset: MARKS[row.state] for row in found}
        lines.append(f"| {op} | {' | '.join(marks.get(opset, '') for opset in opsets)} | {found[-1].why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
