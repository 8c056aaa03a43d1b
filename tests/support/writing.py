"""Quantized files for tests, written in a mode and form, and what onnxruntime makes of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from sbonnx import graph as graphs
from sbonnx.calib.qparams.solve import weights_alone
from sbonnx.options import RunOptions
from sbonnx.pipeline import INSERT, prepare, run
from sbonnx.planning import Solution
from sbonnx.report import Refusal
from sbonnx.spec import Array
from sbonnx.stages.state import PipelineState, Prepared, Request, read_recipe, round_by_site
from tests.support import calibration as walk

Model = onnx.ModelProto | str | Path


def prepared(model: Model, **overrides: Any) -> Prepared:
    """A model prepared for onnxruntime."""
    recipe, backend = read_recipe(None, "onnxruntime", overrides)
    return prepare(model, recipe, backend)


def solved(ready: Prepared, data: list[dict[str, Array]] | None) -> Solution:
    """Scales and codes: from data, or of weights alone."""
    if data is None:
        return weights_alone(ready.graph, ready.plan, round_by_site)
    return walk.calibrate(ready.graph, ready.plan, data)


def written(ready: Prepared, solution: Solution) -> tuple[onnx.ModelProto, tuple[Refusal, ...]]:
    """The file, read back and checked, and what was refused."""
    state = PipelineState(Request(model="", recipe=ready.recipe, backend=ready.backend), ready, solution=solution)
    state = run(INSERT, state, RunOptions())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.onnx"
        graphs.save(state.quantized, path)
        onnx.checker.check_model(str(path), full_check=True)
        return onnx.load(str(path)), state.unwritten


def without_data(model: Model, **overrides: Any) -> tuple[onnx.ModelProto, tuple[Refusal, ...]]:
    """A file of a mode that measures nothing, and every refusal."""
    ready = prepared(model, **overrides)
    proto, refusals = written(ready, solved(ready, None))
    return proto, (*ready.refusals, *refusals)


def both_forms(
    model: Model, data: list[dict[str, Array]], **overrides: Any
) -> tuple[onnx.ModelProto, onnx.ModelProto, tuple[Refusal, ...]]:
    """The Q/DQ file, the file of integer ops with the same numbers, and what was refused."""
    pairs, integers = prepared(model, **overrides), prepared(model, format="qoperator", **overrides)
    solution = solved(pairs, data)
    made, refusals = written(integers, solution)
    return written(pairs, solution)[0], made, refusals


def ops(proto: onnx.ModelProto) -> Counter[str]:
    """Nodes by op type."""
    return Counter(node.op_type for node in proto.graph.node)


def kernels(proto: onnx.ModelProto, level: str = "ALL") -> Counter[str]:
    """Nodes by op type of the graph that onnxruntime runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return ops(onnx.load(options.optimized_model_filepath))


def sqnr(reference: Array, value: Array) -> float:
    """Signal to noise, dB, with a source other than `sbonnx.metrics`."""
    reference = np.asarray(reference, np.float64)
    return float(10 * np.log10((reference**2).sum() / max(((reference - value) ** 2).sum(), 1e-300)))
