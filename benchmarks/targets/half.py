"""Half precision: what stays float32, and how far float16 alone and int8 with float16 are from float."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from benchmarks.accuracy import ours
from benchmarks.results import table
from benchmarks.targets.models import Subject, first_line
from sbonnx.metrics import OutputDifferences
from sbonnx.ops import DEQUANTIZE
from sbonnx.report.figures import OutputDifference
from sbonnx.tuning.kernel_timing import session

HEADER = (
    "model",
    "file",
    "nodes in float32",
    "in float16",
    "islands of float32",
    "SQNR dB",
    "largest error",
    "NaN, Inf",
)
FILES: dict[str, dict[str, Any]] = {
    "float16": {"high_precision": "fp16", "exclude": ["*"]},
    "int8 and float16": {"high_precision": "fp16"},
}
COMPARED = 8
"""Number of feeds on which the outputs are compared."""


@dataclass(frozen=True)
class Kept:
    """Counts of nodes by float type, without Cast and DequantizeLinear nodes.

    Attributes:
        single, half: number of nodes that write float32 or float16.
        islands: number of groups of float32 nodes that are connected by float32 tensors.
    """

    single: int
    half: int
    islands: int


def kept(model: onnx.ModelProto) -> Kept:
    """Count over all graphs of a model; a branch is counted separately from the surrounding graph."""
    typed = onnx.shape_inference.infer_shapes(model)
    found = [kept_in(graph) for graph in graphs_of(typed.graph)]
    return Kept(*(sum(getattr(one, name) for one in found) for name in ("single", "half", "islands")))


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)


def kept_in(graph: onnx.GraphProto) -> Kept:
    """Count the nodes of one graph."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    written = {name: node for node in graph.node for name in node.output}
    counts = {TensorProto.FLOAT: 0, TensorProto.FLOAT16: 0}
    group: dict[int, int] = {}

    def root(key: int) -> int:
        while group[key] != key:
            key = group[key]
        return key

    for node in graph.node:
        kind = next((types[name] for name in node.output if types.get(name) in counts), None)
        if kind is None or node.op_type == "Cast" or node.op_type in DEQUANTIZE or has_branch(node):
            continue
        counts[kind] += 1
        if kind != TensorProto.FLOAT:
            continue
        group[id(node)] = id(node)
        for name in node.input:
            maker = written.get(name)
            if maker is not None and id(maker) in group and types.get(name) == TensorProto.FLOAT:
                group[root(id(maker))] = root(id(node))
    islands = sum(key == parent for key, parent in group.items())
    return Kept(counts[TensorProto.FLOAT], counts[TensorProto.FLOAT16], islands)


def has_branch(node: onnx.NodeProto) -> bool:
    """Return whether a node has a subgraph, i.e. only selects which graph runs."""
    return any(attribute.HasField("g") for attribute in node.attribute)


def apart(one: Subject, path: Path) -> tuple[OutputDifference, ...]:
    """Compare a file's outputs with those of the float model, on calibration feeds."""
    float_run, half_run = session(one.model, optimise=True), session(path, optimise=True)
    names = [value.name for value in float_run.get_outputs()]
    wanted = [value.name for value in float_run.get_inputs()]
    errors = OutputDifferences(names)
    for feed in one.feeds[:COMPARED]:
        given = {name: feed[name] for name in wanted}
        errors.add(float_run.run(names, given), half_run.run(names, given))
    return errors.result()


def row(one: Subject, label: str, folder: Path) -> list[str]:
    """Return the row of one file of one model; the output with the largest error counts."""
    path = folder / f"{label}.onnx"
    try:
        ours(one.model, one.feeds, "tensorrt", verify=False, **FILES[label])(path)
        found = apart(one, path)
    except Exception as error:
        return [one.name, label, first_line(error), *[""] * 5]
    left = kept(onnx.load(str(path)))
    counts = [str(left.single), str(left.half), str(left.islands)]
    worst = min(error.sqnr_db for error in found)
    largest = max(error.max_abs for error in found)
    return [one.name, label, *counts, f"{worst:.1f}", f"{largest:.3g}", str(sum(error.not_finite for error in found))]


def text(subjects: Sequence[Subject]) -> str:
    """Return the table with its explanation."""
    rows: list[list[str]] = []
    for one in subjects:
        with tempfile.TemporaryDirectory() as folder:
            rows.extend(row(one, label, Path(folder)) for label in FILES)
        print("\n".join(" | ".join(line) for line in rows[-len(FILES) :]), flush=True)
    return (
        "## Half precision\n\n"
        '`backend="tensorrt", high_precision="fp16"`, run by onnxruntime on CPU; float16: nothing quantized. Counted '
        "are nodes that write float32 or float16, Casts and DequantizeLinear left out; an island is a group of float32 "
        f"nodes joined by float32 tensors. Outputs against the float model on {COMPARED} batches of calibration data, "
        "the worst output of each.\n\n" + table(HEADER, rows)
    )
