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
        r"has no integer kernel for|has no integer kernels|out of reach of Q/DQ|keeps .* in float between the pairs|"
        r"ConvInteger takes|no runtime has a kernel|kernels compute \d-bit",
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
        r"its input (stays|weights stay) float|the weight of the same op stays float|int4 for weights alone",
        "a weight is quantized only with the input of the same operator: alone, it gains no integer kernel",
        "see why the input stays float; MODE: weight_only quantizes weights alone",
        "docs/recipe.md",
    ),
    Reason(
        "R06",
        r"it is in the body of '|the body of '.*' needs its weight in float",
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
    Reason(
        "R16",
        r"TensorRT (takes int4|stores two int4|has no optimised fp8)|TensorRT's fp8 convolutions",
        "the shape of the weight does not fit the int4 or fp8 kernels of TensorRT",
        "--bits w8a8 for these layers (SPECIFIC), or a --block-size that divides the summed axis",
        "docs/tensorrt.md",
    ),
    Reason(
        "R17",
        r"costs more at the outputs than it saves",
        "by measurement, integers in this region of a detector lose more accuracy than they gain time",
        "HEADS: none quantizes it nevertheless",
        "docs/heads.md",
    ),
    Reason(
        "R18",
        r"both inputs are constants|multiplies two activations|(wants|is) the (constant on the right|left factor)|"
        r"is no matrix|a matrix is required|Gemm with|its weight is |is empty|shape of its weight is not known",
        "kernels with a quantized weight compute data times a constant matrix, and this product has another form",
        "export it with the constant on the right and known shapes; sbonnx simplify folds constants",
        "docs/recipe.md",
    ),
    Reason(
        "R19",
        r"writes an output of the graph",
        "outputs of the model stay float, and the integer kernel of this operator writes integers only",
        "nothing: names, types and values of outputs are kept",
        "docs/onnxruntime.md",
    ),
    Reason(
        "R20",
        r"MIN_WEIGHT_SIZE is",
        "the weight is so small that integers gain neither size nor time",
        "MIN_WEIGHT_SIZE: 0 quantizes every size",
        "docs/recipe.md",
    ),
    Reason(
        "R21",
        r"fewer than two of them|its type differs from that of",
        "tensors can share a scale only if they are quantized activations of one integer type",
        "correct the group, or give its tensors the same bits and scheme (SPECIFIC)",
        "docs/recipe.md",
    ),
    Reason(
        "R22",
        r"no pair stands between|quantized, or was fused away|quantizes weights, and measures nothing|needs training",
        "a key of the recipe has no effect with this backend, mode or model",
        "remove the key; sbonnx explain KEY says what it needs",
        "docs/recipe.md",
    ),
    Reason(
        "R23",
        r"for all its readers|one scale for the whole tensor",
        "a tensor is quantized in one way for all operators that read it, as their kernels need it",
        "nothing, or the same settings for all of its readers",
        "docs/recipe.md",
    ),
    Reason(
        "R24",
        r"times the time of the float MatMul",
        "onnxruntime has no fast kernel for weights of this width and block size",
        "the setting that the reason names",
        "docs/llm.md",
    ),
    Reason(
        "R27",
        r"a table has no input|do not divide into",
        "rows of an embedding are quantized in blocks, and have no input whose scale could be computed",
        "MODE: weight_only, with a --block-size that divides the rows",
        "docs/recipe.md",
    ),
    Reason(
        "R25",
        r"on the calibration data|throughout the calibration data",
        "the calibration data never gave this tensor values from which a range follows",
        "add samples that reach it, such as both branches of an If",
        "docs/data.md",
    ),
    Reason(
        "R26",
        r"it needs a scale of|overflow at any scale",
        "the range of the tensor is too large or too small for a scale that all runtimes represent",
        "check the data for outliers, or fix the range (RANGES)",
        "docs/recipe.md",
    ),
    Reason(
        "R28",
        r"was fused away, or is a bias|reduce_range is for kernels",
        "an override names a tensor that has no scale, or asks for a reduced range, which these kernels do not need",
        "remove the entry, or name a tensor of `sbonnx plan`",
        "docs/qnn.md",
    ),
    Reason(
        "R29",
        r"compute the same on every CPU",
        "the kernels of this backend do not depend on the CPU, so CPU changes nothing",
        "drop --cpu, or choose the backend onnxruntime",
        "docs/onnxruntime.md",
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
