"""PPQ on one model: `python -m benchmarks.peers.ppq_onnx '{"method": ...}'` by its own Python.

Methods: nearest and lsq, its block-wise LSQ with its own defaults (`LSQSetting`: 500 steps a block, blocks of 4 layers,
scales learned). ``scheme`` is its observer of activations: kl, mse, percentile, minmax. Weights symmetric, a scale a
channel, activations symmetric per tensor, as in its TensorRT quantizer; other widths than 8 by its virtual ones.

The result that is evaluated is its exported Q/DQ file, not its executor. Weights are baked at ``w_bit`` bits first, so
that the 8-bit Q/DQ pairs of the export reproduce codes of ``w_bit`` bits only; the file keeps them as float. onnxslim
folds shapes and batch norms first, which PPQ cannot read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx

from benchmarks.peers import measured


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the Q/DQ file."""
    import onnxslim
    import ppq.lib as PFL
    import torch
    from ppq.api import load_onnx_graph
    from ppq.api.interface import dispatch_graph
    from ppq.core import TargetPlatform
    from ppq.executor import TorchExecutor

    batches = [[torch.from_numpy(x) for x in feed.values()] for feed in samples]
    with tempfile.TemporaryDirectory() as folder:
        slim = Path(folder) / "slim.onnx"
        onnx.save(onnxslim.slim(onnx.load(job["model"])), slim)
        graph = load_onnx_graph(str(slim))
    graph = dispatch_graph(graph=graph, platform=TargetPlatform.TRT_INT8)
    quantizer = PFL.Quantizer(TargetPlatform.TRT_INT8, graph)
    for operation in list(graph.operations.values()):
        if operation.type in quantizer.quant_operation_types:
            quantizer.quantize_operation(operation.name, platform=TargetPlatform.TRT_INT8)
    _widths(graph, job["w_bit"], job["a_bit"])
    executor = TorchExecutor(graph, device="cpu")
    executor.tracing_operation_meta(inputs=batches[0])
    executor.load_graph(graph)
    PFL.Pipeline(_passes(job)).optimize(
        graph=graph,
        dataloader=batches,
        calib_steps=max(len(batches), 8),  # PPQ rejects fewer
        collate_fn=None,
        executor=executor,
        verbose=False,
    )
    _widths(graph, 8, 8, ranges=False)
    PFL.Exporter(TargetPlatform.ONNXRUNTIME).export(file_path=job["output"], graph=graph)
    onnx.save(_repaired(onnx.load(job["output"]), onnx.load(job["model"])), job["output"])


def _passes(job: measured.Job) -> list[Any]:
    """Return the passes of PPQ's default pipeline, with LSQ if the job selects it."""
    from ppq.api.setting import LSQSetting
    from ppq.quantization.optim import (
        LearnedStepSizePass,
        ParameterBakingPass,
        ParameterQuantizePass,
        PassiveParameterQuantizePass,
        QuantAlignmentPass,
        QuantizeFusionPass,
        QuantizeSimplifyPass,
        RuntimeCalibrationPass,
    )

    learned = LSQSetting()
    lsq = LearnedStepSizePass(
        steps=learned.steps,
        gamma=learned.gamma,
        is_scale_trainable=learned.is_scale_trainable,
        lr=learned.lr,
        block_size=learned.block_size,
        collecting_device="cpu",
    )
    return [
        QuantizeSimplifyPass(),
        QuantizeFusionPass(activation_type={"Relu", "Clip"}),
        ParameterQuantizePass(),
        RuntimeCalibrationPass(method=job["scheme"]),
        PassiveParameterQuantizePass(),
        QuantAlignmentPass(elementwise_alignment="Align to Large", force_overlap=True),
        *([lsq] if job["method"] == "lsq" else []),
        ParameterBakingPass(),
    ]


def _widths(graph: Any, w_bit: int, a_bit: int, *, ranges: bool = True) -> None:
    """Set the bit widths of weights and activations; without ``ranges`` only the widths for the exporter."""
    for operation in graph.operations.values():
        for config, variable in getattr(operation, "config_with_variable", ()):
            bits = w_bit if variable.is_parameter else a_bit
            config.num_of_bits = bits
            if ranges:
                config.quant_min, config.quant_max = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _repaired(model: onnx.ModelProto, source: onnx.ModelProto) -> onnx.ModelProto:
    """Make the export a valid model of any batch.

    PPQ fixes the batch size to that of calibration, and lowers the opset below 14 without removing an attribute that
    was introduced with it.
    """
    for mine, theirs in ((model.graph.input, source.graph.input), (model.graph.output, source.graph.output)):
        shapes = {value.name: value.type for value in theirs}
        for value in mine:
            value.type.CopyFrom(shapes[value.name])
    del model.graph.value_info[:]
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if (node.op_type, attribute.name) != ("Reshape", "allowzero")]
        del node.attribute[:]
        node.attribute.extend(kept)
    return model


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "onnxslim", "ppq.lib"))
