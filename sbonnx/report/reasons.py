"""Reasons why something stays float or is worth a note: code, meaning, fix. `sbonnx explain` reads this table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Reason:
    """One kind of reason.

    Attributes:
        code: short and stable.
        pattern: regular expression that is found in the reason of a refusal, or in a note.
        meaning: why it is so.
        fix: what changes it.
        page: page of the documentation.
    """

    code: str
    pattern: str
    meaning: str
    fix: str
    page: str


REASONS: Final = (
    Reason(
        "R10",
        r"float16 has no integer kernels",
        "the model is in float16, for which onnxruntime has no integer kernels on CPUs",
        "quantize the float32 model",
        "docs/onnxruntime.md",
    ),
    Reason(
        "R01",
        r"has no integer kernel for|has no integer kernels|out of reach of Q/DQ",
        "the runtime has no integer kernel for this operator: pairs around it would only add conversions",
        "nothing, or another backend; QUANTIZE_INPUTS_OF forces it where the backend has a rule",
        "docs/recipe.md",
    ),
    Reason(
        "R02",
        r"would be slower in integers",
        "by the table of kernel costs, the integer kernel and the conversions at its edges take longer than float",
        "QUANTIZE_INPUTS_OF: {OP: true} quantizes it nevertheless; KERNEL_COSTS names a table of this machine",
        "docs/decisions/0014-never-slower-in-silence.md",
    ),
    Reason(
        "R03",
        r"integer kernels (want|compute)|kernels mostly empty|multiples? of \d+",
        "the number of channels does not fill the blocks of the runtime's integer kernels, so that fp16 is faster",
        "pad the channels, or QUANTIZE_INPUTS_OF: {OP: true} to quantize it nevertheless",
        "docs/tensorrt.md",
    ),
    Reason(
        "R04",
        r"the recipe says so",
        "the recipe, --exclude or --include leaves this node or tensor in float",
        "change EXCLUDE, INCLUDE or the entry of SPECIFIC that the reason names",
        "docs/recipe.md",
    ),
    Reason(
        "R05",
        r"its input stays float",
        "a weight is quantized only with the input of the same operator: alone, it gains no integer kernel",
        "see why the input stays float; MODE: weight_only quantizes weights alone",
        "docs/recipe.md",
    ),
    Reason(
        "R06",
        r"whose steps are not observed",
        "operators in the body of Loop or Scan run a varying number of steps, whose tensors are not calibrated",
        "unroll the loop in the export",
        "docs/architecture.md",
    ),
    Reason(
        "R07",
        r"the model quantizes it already|is quantized already",
        "the file has Q/DQ pairs, which are kept",
        "--requantize removes them first; the float model gives better results",
        "docs/recipe.md",
    ),
    Reason(
        "R08",
        r"its type is |the input is absent|it is a constant",
        "only float activations with a known type are quantized",
        "export the model with shapes and types (onnx.shape_inference)",
        "docs/architecture.md",
    ),
    Reason(
        "R09",
        r"whose scale it needs, is not quantized|does not fit int32",
        "an int32 bias has the product of the scales of input and weight, and one of them is missing or too small",
        "nothing: the bias stays float and the file is as exact",
        "docs/onnxruntime.md",
    ),
    Reason(
        "R11",
        r"there are no data|there is no data",
        "the step measures activations, and no data was given",
        "give --data",
        "docs/data.md",
    ),
    Reason(
        "R12",
        r"scales? (is|are) raised to|scale is raised",
        "a scale was below the smallest one that the runtime represents; values below it become zero",
        "nothing, if the accuracy is kept: the tensor is almost constant",
        "docs/tensorrt.md",
    ),
    Reason(
        "R13",
        r"calibration ignores|is not used|are not used|no inputs? of the model",
        "arrays, files or samples of the data are not inputs of the model or do not fill a batch",
        "nothing for labels; else name arrays as the inputs of the model",
        "docs/data.md",
    ),
    Reason(
        "R14",
        r"values? .* to .*, .*suggests?|statistics suggest",
        "the values of the data do not fit what the first layer was trained on: scale, offset or channel order",
        "check --preprocess: it must be that of inference",
        "docs/data.md",
    ),
    Reason(
        "R15",
        r"slower than float on this machine",
        "the quantized file was measured and takes longer than the float one",
        "run the command of the advice, or benchmark on the target machine (sbonnx bench)",
        "docs/decisions/0014-never-slower-in-silence.md",
    ),
)
"""Kinds of reasons. The first whose pattern is found in a text applies."""


def reason_of(text: str) -> Reason | None:
    """Return the kind of a reason by its code, or by the text of a refusal or note; None: it is in no group."""
    code = text.strip().upper()
    return next(
        (reason for reason in REASONS if reason.code == code or re.search(reason.pattern, text)),
        None,
    )


__all__ = ["REASONS", "Reason", "reason_of"]
