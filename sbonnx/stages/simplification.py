"""Last stage of a simplification: save the model and verify that its outputs are equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx

from sbonnx import graph as graphs
from sbonnx import verify as proof
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.random_feeds import guessed_feeds
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import Graph, edit, query
from sbonnx.options import RunOptions
from sbonnx.report.codes import Note, Problem
from sbonnx.report.comparison import Comparison
from sbonnx.report.simplified import SimplifyReport
from sbonnx.spec import Array
from sbonnx.stages.contract import stage
from sbonnx.stages.state import PipelineState
from sbonnx.stages.write import placed

EQUAL_DB: Final = 80.0
"""SQNR from which outputs count as equal: float32 rounding alone gives about 140 dB, fusions reduce it slightly."""

EQUAL_HALF_DB: Final = 40.0
"""Threshold for models that compute in half precision (float16 or bfloat16: 50 to 70 dB)."""


@stage(needs=("graph",), sets=("simplified",))
def save_simplified(state: PipelineState, options: RunOptions) -> PipelineState:
    """Save the model, and compare its outputs with those of the original: on the data, or on synthetic feeds.

    Raises:
        SbonnxError: a subclass. No partial file is left.
    """
    request, prepared = state.request, state.prepared
    graph = prepared.graph
    edit.sort(graph)
    with placed(request.output, graph.info.files, force=request.force) as path:
        graphs.save(graph, path)
        comparison, problems = _compared(state, path)
        simplified = onnx.load(str(path)) if request.output is None else None
    report = SimplifyReport(
        request.label,
        None if request.output is None else str(Path(request.output)),
        prepared.nodes_before,
        query.node_count(graph),
        prepared.applied,
        prepared.refusals,
        () if comparison is None else comparison.outputs,
        () if comparison is None else comparison.quality,
        problems,
        tuple(graph.info.notes),
        simplified,
    )
    return replace(state, simplified=report)


def _compared(state: PipelineState, simplified: Path) -> tuple[Comparison | None, tuple[Problem, ...]]:
    """Compare both models, and return the problems. If onnxruntime cannot open the model, there is a note instead."""
    request, graph = state.request, state.prepared.graph
    original = graphs.load(request.model)
    unopened = _why_unopened(original)
    if unopened:
        graphs.check_file(simplified)
        graph.info.notes.append(Note("not-run", f"not verified by execution: {unopened}"))
        return None, ()
    if request.data is not None:
        feeds = datasets.read(request.data, graph, split=request.split, limit=request.recipe.samples)
        return _judged(proof.check(request.source, simplified, feeds), graph)
    guessed, why = _first_accepted(original, guessed_feeds(datasets.input_specs(graph)))
    if not guessed:
        text = f"not verified: the model does not run on synthetic feeds ({why}): give --data"
        return None, (Problem("not-verified", text),)
    return _judged(proof.check(request.source, simplified, guessed), graph)


def _why_unopened(graph: Graph) -> str:
    """Return why onnxruntime cannot open the model, or ""."""
    try:
        LayerRunner(graph, optimisation="off").close()
    except ModelError as error:
        return str(error)
    return ""


def _first_accepted(graph: Graph, guessed: Iterable[list[dict[str, Array]]]) -> tuple[list[dict[str, Array]], str]:
    """Return the first guess that the model runs on; else an empty list and the reason of the last failure."""
    why = "it has no inputs to guess"
    with LayerRunner(graph) as run:
        try:
            for feeds in guessed:
                try:
                    for feed in feeds:
                        run(feed)
                except DataError as error:
                    why = str(error)
                    continue
                return feeds, ""
        except DataError as error:  # raised by `guessed_feeds`
            why = str(error)
    return [], why


def _judged(comparison: Comparison, graph: Graph) -> tuple[Comparison, tuple[Problem, ...]]:
    """Return the comparison, and the outputs that differ by more than rounding."""
    half = any(str(query.dtype(tensor)) in ("float16", "bfloat16") for tensor in query.all_tensors(graph))
    least = EQUAL_HALF_DB if half else EQUAL_DB
    problems = (
        Problem(
            "outputs-differ",
            f"output '{row.name}' differs: {row.sqnr_db:.1f} dB signal to error, {row.not_finite} not finite",
        )
        for row in comparison.outputs
        if row.sqnr_db < least or row.lost
    )
    return comparison, tuple(problems)
