"""Table of the ONNX operators that can be reimported, from the schemas of the installed onnx.

python -m benchmarks.qat.operators > docs/qat_operators.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import onnx

from sbonnx.ops import CONTRIB, LISTS, RANDOM, REPEATED, RUNTIME_OPS, SIGNALS, TEXTS
from sbonnx.torchnet import FUNCTIONS, RUNTIME_FUNCTIONS

State = Literal["supported", "inlined", "missing"]

FIRST: Final = 13
"""`sbonnx.graph.load` converts older models to this opset."""

LAST: Final = 23
"""Last opset on the page; `coverage` also supports newer ones."""

MARKS: Final = {"supported": "+", "inlined": "o", "missing": "-"}
"""Marks on the page; empty if an opset does not have the op."""

INLINED: Final = {
    "Constant": "a constant of the graph",
    "If": "inlined if its condition is constant, given the values and shapes of fixed inputs; else an error",
}
"""Ops that are removed before modules are created."""

LIMITS: Final = {
    "AveragePool": "over one to three axes",
    "Cast": "between types of torch; no strings, no 4-bit types",
    "CastLike": "between types of torch; no strings, no 4-bit types",
    "Col2Im": "over two axes",
    "Conv": "over one to three axes",
    "ConvTranspose": "over one to three axes",
    "DequantizeLinear": "of integers",
    "DeformConv": "over two axes",
    "Dropout": "no-op, as in inference; not with training_mode=1",
    "GridSample": "cubic over two axes only",
    "LpPool": "over one to three axes",
    "MaxPool": "over one to three axes; with indices only if the padding is symmetric",
    "NonMaxSuppression": "without gradient",
    "QuantizeLinear": "to integers of 8, 16 and 32 bits, without gradient",
    "RoiAlign": "sampling_ratio=0 only for regions with equal sample counts in height and width",
    "Unique": "not along an axis",
    "BatchNormalization": "train or eval mode follows the module; batch statistics cannot be outputs",
}
"""Limitations of supported ops."""

RUNTIME_LIMITS: Final = {
    "GatherBlockQuantized": "2, 4 and 8 bits; gather_axis and quantize_axis differ",
    "GroupQueryAttention": "causal; no quantized or shared caches, no norms of query and key, no output of "
    "scores; after a past, sequences of one length",
    "MatMulNBits": "2, 4 and 8 bits; no g_idx, not weight_prepacked",
    "RotaryEmbedding": "not scale, not is_packed_batching",
}
"""Limitations of ops of onnxruntime."""

_BODY = "is a loop: unroll it in the export, or remove it from the model to train"
_RANDOM = "draws random numbers: training would not compute the same as the model"
_TEXT = "operates on strings, which torch tensors do not support"
_LIST = "uses the optional type, which torch does not have"
_LOSS = "is a loss: training uses its own"
_SIGNAL = "computes a constant from its arguments: export it as a constant"
WHY: Final = {
    **dict.fromkeys(sorted(REPEATED), _BODY),
    **dict.fromkeys(sorted(RANDOM - {"Dropout"}), _RANDOM),
    **dict.fromkeys(sorted(TEXTS), _TEXT),
    **dict.fromkeys(sorted(LISTS - FUNCTIONS.keys() - {"SequenceMap"}), _LIST),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _LOSS),
    **dict.fromkeys(sorted(SIGNALS - FUNCTIONS.keys()), _SIGNAL),
    "ImageDecoder": "decodes image files: decode before the model",
    "MaxRoiPool": "is obsolete: use RoiAlign",
    "Scatter": "is deprecated: use ScatterElements",
}  # fmt: skip
"""Reasons why ops are missing."""

UNWRITTEN: Final = "is new or rare; not implemented yet"


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
            try:
                schema = onnx.defs.get_schema(op, opset, "")
            except onnx.defs.SchemaError:  # the opset does not have the op
                continue
            if not schema.deprecated:
                rows.append(Coverage(op, opset, int(schema.since_version), state, why))
    return tuple(rows)


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
        f"Generated by `python -m benchmarks.qat.operators` from the schemas of onnx {onnx.__version__}.",
        "",
        textwrap.fill(
            f"Of {len(rows)} operators of opsets {FIRST} to {LAST}, {states.count('supported')} are supported (+), "
            f"{states.count('inlined')} are removed before modules are created (o), and {states.count('missing')} are "
            "not supported (-). Empty: the opset does not have the operator. A model with an unsupported operator is "
            f"refused with an error that names the node. Models of older opsets are converted to opset {FIRST}.",
            120,
        ),
        "",
        f"| operator | {' | '.join(map(str, opsets))} | limitations, or why it is not supported |",
        f"|---{'|---' * len(opsets)}|---|",
    ]
    for op, found in rows.items():
        marks = {row.opset: MARKS[row.state] for row in found}
        lines.append(f"| {op} | {' | '.join(marks.get(opset, '') for opset in opsets)} | {found[-1].why} |")
    return "\n".join([*lines, *_runtime_section()]) + "\n"


def _runtime_section() -> list[str]:
    """Return the lines on ops of onnxruntime."""
    rows = [
        f"| {op} | {'ai.onnx' if op in RUNTIME_OPS else CONTRIB} | {RUNTIME_LIMITS.get(op, '')} |"
        for op in sorted(RUNTIME_FUNCTIONS)
    ]
    return [
        "",
        "## Operators of onnxruntime",
        "",
        "In exported decoders. Packed weights stay packed: each is dequantized where it is used, and again in the",
        "backward pass. Scales are parameters; zero points are not.",
        "",
        "| operator | domain | limitations |",
        "|---|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    print(page(), end="")
