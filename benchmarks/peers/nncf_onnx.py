"""NNCF on one model: `python -m benchmarks.peers.nncf_onnx '{"method": ...}'` by its own Python.

Methods: nearest (fast bias correction, its default), accurate (``fast_bias_correction=False``) and compress (weights
alone, int4). 8 bits: its ONNX
backend has no other width. Preset mixed (symmetric weights, asymmetric activations), statistics of all samples, one
sample a batch. onnxruntime's basic optimizations fold batch norms first, if
there are any: NNCF corrects only biases that a layer has.
Models with attention get ``model_type=TRANSFORMER``, as its documentation asks for.
`quantize_with_accuracy_control` is left out: it needs labels and leaves layers in float. The result is the Q/DQ model
that it returns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import onnx

from benchmarks.peers import measured

COMPRESS: Final = "compress"
"""Method that compresses weights alone."""

BLOCKS_SINCE: Final = 21
"""Opset whose DequantizeLinear has blocks."""


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the Q/DQ file."""
    import nncf

    if job["method"] == COMPRESS:
        onnx.save(compressed(job["model"]), job["output"])
        return
    model = folded(job["model"])
    attends = any(node.op_type == "Softmax" for node in model.graph.node[:-1])
    quantized = nncf.quantize(
        model,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER if attends else None,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(samples),
        fast_bias_correction=job["method"] != "accurate",
    )
    onnx.save(quantized, job["output"])


def compressed(path: str) -> onnx.ModelProto:
    """Compress the weights of all matrix products to int4 with zero points, in blocks of 32, without data.

    Tables of embeddings stay float: OpenVINO rejects NNCF's form of them if the number of rows is no multiple of 32.
    """
    import nncf
    from onnx import version_converter

    model = onnx.load(path)
    if model.opset_import[0].version < BLOCKS_SINCE:
        model = version_converter.convert_version(model, BLOCKS_SINCE)
    compressed: onnx.ModelProto = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=32,
        all_layers=True,
        ratio=1.0,
        ignored_scope=nncf.IgnoredScope(types=["Gather"]),
    )
    return compressed


def folded(path: str) -> onnx.ModelProto:
    """Load the model; one with batch norms after onnxruntime's machine-independent optimizations, which fold them."""
    import onnxruntime

    model = onnx.load(path)
    if all(node.op_type != "BatchNormalization" for node in model.graph.node):
        return model
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "folded.onnx")
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "nncf.onnx", batch=1))
