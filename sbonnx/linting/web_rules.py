"""Rules of onnxruntime-web for files that run in browsers: those of onnxruntime that WebAssembly shares, and its own.

Source: files run by onnxruntime-web 1.30 in Node, with the kernels that its profile names (`tests/lint/test_web.py`),
and the operator table that the package has for WebGPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sbonnx.graph import Node, query
from sbonnx.linting.findings import LintRule
from sbonnx.linting.model_view import View
from sbonnx.linting.ort import ORT_RULES
from sbonnx.ops import CONTRIB, WEBGPU
from sbonnx.qdq.integer_products import BLOCKED

Found = Iterator[tuple[str, str, str]]

NEWEST_OPSET: Final = 26
NEWEST_IR: Final = 13
"""Newest versions that onnxruntime-web 1.30 loads: with 27 and 14 it refuses the file."""

FLOAT_LEVELS: Final = range(2)
"""Accuracy levels of MatMulNBits that mean float32 in every runtime."""

REFUSED_CODES: Final = frozenset({"float4_e2m1fn"})
"""Quantized types without kernels of QuantizeLinear and DequantizeLinear."""

NOT_SHARED: Final = frozenset(
    {"O11", "O12", "O13", "O15", "O20", "O27", "O29", "O30", "O31", "O32", "O33", "O34", "O35", "O36", "O37"}
)
"""Rules of onnxruntime on x86 that do not hold in WebAssembly, or were not measured there.

Products are exact, int8 activations and uint8 weights have integer kernels too, weights alone become MatMulNBits, and
there are no kernels on blocks of channels. The others are about speed or run the installed onnxruntime.
"""


def new_versions(view: View) -> Found:
    """Find opsets and IR versions that onnxruntime-web refuses."""
    info = view.graph.info
    if info.original_opset > NEWEST_OPSET:
        yield "", "", f"opset {info.original_opset}: the newest is {NEWEST_OPSET}"
        return
    if info.ir_version > NEWEST_IR:
        yield "", "", f"IR version {info.ir_version}: the newest is {NEWEST_IR}"
    for note in info.notes:
        if note.code == "opset-lowered":  # when it was loaded: the runtime does not read it either
            yield "", "", str(note)


def refused_codes(view: View) -> Found:
    """Find quantized types without kernels."""
    for quantizer in view.quantizers:
        if quantizer.codes in REFUSED_CODES:
            yield quantizer.name, str(quantizer.data.name), f"the type {quantizer.codes}: the file does not load"


def half_precision(view: View) -> Found:
    """Find files with ops in float16."""
    halves = [
        node
        for node in view.nodes
        if node.op != "Cast" and any(str(query.dtype(tensor)) == "float16" for tensor in node.outputs)
    ]
    if halves:
        why = f"{len(halves)} ops in float16: WebAssembly computes them in float32, with conversions"
        yield *_place(halves[0]), why


def outside_webgpu(view: View) -> Found:
    """Find ops without a kernel in WebGPU, by type of op."""
    groups: dict[str, list[Node]] = {}
    for node in view.nodes:
        if node.op not in WEBGPU:
            groups.setdefault(node.op, []).append(node)
    for op, nodes in groups.items():
        yield *_place(nodes[0]), f"{len(nodes)} {op}: no kernel in WebGPU, so that they run in WebAssembly"


def rounded_products(view: View) -> Found:
    """Find MatMulNBits whose accuracy level allows other runtimes to round inputs."""
    for node in view.nodes:
        level = int(node.attrs.get("accuracy_level", 0))
        if node.op == BLOCKED and node.domain == CONTRIB and level not in FLOAT_LEVELS:
            why = f"accuracy level {level}: WebAssembly computes in float32, other runtimes may round the input"
            yield *_place(node), why


def external_data(view: View) -> Found:
    """Find weights outside of the model file."""
    path, *others = view.graph.info.files or (None,)
    if path is not None and others:
        names = ", ".join(sorted(other.name for other in others))
        yield "", "", f"{names}: a page has to name these files, or the model does not load"


def _place(node: Node) -> tuple[str, str]:
    return str(node.name), str(node.outputs[0].name)


WEB_RULES: Final = (
    *(rule for rule in ORT_RULES if rule.id not in NOT_SHARED),
    LintRule(
        "W01",
        "opset and IR version are not newer than onnxruntime-web 1.30 knows",
        "error",
        "convert the model to an older opset",
        new_versions,
    ),
    LintRule(
        "W02",
        "quantized types have kernels in WebAssembly",
        "error",
        "use integers, or float8",
        refused_codes,
    ),
    LintRule(
        "W03",
        "files for WebAssembly are in float32",
        "info",
        "load the fp32, q8 or q4 file where there is no WebGPU",
        half_precision,
    ),
    LintRule(
        "W04",
        "ops of files for WebGPU have kernels there",
        "info",
        "load the fp16 or q4f16 file in WebGPU, and 8-bit files in WebAssembly",
        outside_webgpu,
    ),
    LintRule(
        "W05",
        "MatMulNBits has one result in all runtimes",
        "info",
        "quantize with ACCURACY_LEVEL=1, which takes no more time in WebAssembly",
        rounded_products,
    ),
    LintRule(
        "W06",
        "weights are in the model file",
        "warning",
        "write one file (up to 2 GB), or name the others: externalData in onnxruntime-web, use_external_data_format in "
        "transformers.js",
        external_data,
    ),
)
"""Rules in the order of the report."""
