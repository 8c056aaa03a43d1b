"""Files of benchmarks of pruning: multiplications, stored values, latency, correction of statistics."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from sbonnx.spec import Array

Feed = dict[str, Array]

LINEAR: Final = ("Conv", "Gemm", "MatMul")

REPEATS: Final = 30
"""Timed runs of each file, alternating."""

LEAST_VARIANCE: Final = 1e-8
"""Variance below which an output is constant, and its scale is not corrected."""


def session(path: Path | bytes) -> ort.InferenceSession:
    """Open a model on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    source = path if isinstance(path, bytes) else str(path)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def sizes(path: Path, feed: Feed) -> tuple[float, float]:
    """Return multiplications of one sample, and stored values, counted on the file as it runs on `feed`."""
    model = onnx.load(str(path))
    batch = len(next(iter(feed.values())))
    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in LINEAR and node.input[1] in weights]
    names = [node.output[0] for node in layers]
    outputs = _probe(model, names).run(names, feed)
    macs = 0.0
    for node, output in zip(layers, outputs, strict=True):
        shape = output.shape
        positions = np.prod(shape[2:]) if node.op_type == "Conv" else np.prod(shape[:-1]) / batch
        macs += float(np.prod(weights[node.input[1]]) * positions)
    return macs, float(sum(np.prod(dims) for dims in weights.values()))


def _probe(model: onnx.ModelProto, names: list[str]) -> ort.InferenceSession:
    """Open a model with these tensors as outputs."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return session(probe.SerializeToString())


def float_pass(path: Path, feeds: list[Feed]) -> float:
    """Return the CPU seconds of one pass over the samples."""
    runner = session(path)
    begin = time.process_time()
    for feed in feeds:
        runner.run(None, feed)
    return time.process_time() - begin


def latency_ratio(path: Path, other: Path, feed: Feed) -> float:
    """Return the median latency of `other` relative to `path`, runs alternating on one thread."""
    runners = [session(path), session(other)]
    seconds: list[list[float]] = [[], []]
    for repeat in range(REPEATS + 3):
        for runner, times in zip(runners, seconds, strict=True):
            begin = time.perf_counter()
            runner.run(None, feed)
            if repeat >= 3:
                times.append(time.perf_counter() - begin)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def correct_statistics(path: Path, masked: Path, output: Path, feeds: list[Feed]) -> None:
    """Give each output of each Conv and Gemm of a masked model the mean and variance that it has in the float model.

    This is what new statistics of batch norms achieve after pruning (batch-norm tuning), layer by layer in order, on
    models whose batch norms are folded.

    Args:
        path: the float file, fused, with the tensor names of `masked`.
        masked: the pruned model with unchanged shapes.
        output: path of the result.
        feeds: samples.
    """
    model = onnx.load(str(masked))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm") and len(node.input) > 2]
    wanted = _statistics(onnx.load(str(path)), [node.output[0] for node in layers], feeds)
    for node in layers:
        name = node.output[0]
        mean, variance = _statistics(model, [name], feeds)[name]
        want_mean, want_variance = wanted[name]
        fixed = np.minimum(variance, want_variance) < LEAST_VARIANCE
        scale = np.where(fixed, 1.0, np.sqrt(want_variance / np.maximum(variance, LEAST_VARIANCE)))
        weight, bias = (numpy_helper.to_array(weights[each]) for each in node.input[1:3])
        first = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
        axes = (-1, *(1,) * (weight.ndim - 1)) if first else (1, -1)
        moved = (bias - mean) * scale + want_mean
        for key, values in ((node.input[1], weight * scale.reshape(axes)), (node.input[2], moved)):
            weights[key].CopyFrom(numpy_helper.from_array(values.astype(np.float32), key))
    onnx.save(model, str(output))


def _statistics(model: onnx.ModelProto, names: list[str], feeds: list[Feed]) -> dict[str, tuple[Array, Array]]:
    """Return mean and variance of each channel (axis 1) of some tensors."""
    runner = _probe(model, names)
    sums: dict[str, Any] = {name: [0, 0.0, 0.0] for name in names}
    for feed in feeds:
        for name, value in zip(names, runner.run(names, feed), strict=True):
            rows = np.moveaxis(value.astype(np.float64), 1, -1).reshape(-1, value.shape[1])
            total = sums[name]
            sums[name] = [total[0] + len(rows), total[1] + rows.sum(0), total[2] + np.square(rows).sum(0)]
    return {name: (s / n, np.maximum(q / n - (s / n) ** 2, 0)) for name, (n, s, q) in sums.items()}
