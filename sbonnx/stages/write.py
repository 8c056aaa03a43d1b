"""Stages that write the file: insert Q/DQ, convert the float part, legalise, export, save."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from sbonnx import export, precision, qdq
from sbonnx import graph as graphs
from sbonnx.backends import full_name
from sbonnx.backends.kernel_costs import DIGEST
from sbonnx.backends.runtime_types import EngineInput
from sbonnx.backends.tensorrt import calibration_cache
from sbonnx.backends.tensorrt.profiles import INT4_BITS
from sbonnx.graph import query
from sbonnx.graph.constant_edits import to_metadata
from sbonnx.graph.storage.output_files import staged
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.graph.storage.weights import release_pages
from sbonnx.options import RunOptions
from sbonnx.patterns.blocks.contraction import contract_gelus
from sbonnx.planning import Plan, Site, Solution
from sbonnx.planning.tensor_overrides import overrides_of
from sbonnx.planning.types import INTEGER_RECURRENT, STORED
from sbonnx.recipe.names import FLOAT
from sbonnx.report import Note, Problem, QuantizedTensor, Report
from sbonnx.report.codes import most_frequent
from sbonnx.report.comparison import without_rewrites
from sbonnx.report.outcome import NodeCounts
from sbonnx.spec import Bounds
from sbonnx.stages.contract import stage
from sbonnx.stages.state import PipelineState
from sbonnx.stages.verify import OLDEST_OPSET, verify, with_details
from sbonnx.system import native as loops
from sbonnx.system.cpu import RECORDED_CPU
from sbonnx.system.machine_costs import RECORDED_COSTS
from sbonnx.verify.runtimes import RECORDED


@stage()
def check_targets(state: PipelineState, options: RunOptions) -> PipelineState:
    """Check that the outputs can be written, before any work is done.

    Raises:
        OutputError: a target exists and `force` is not set, is an input, or cannot be written.
    """
    request = state.request
    taken = request.files
    for target in (request.output, request.trt_cache, request.write_overrides):
        if target is not None:
            graphs.check_target(Path(target), inputs=taken, force=request.force, model=target is request.output)
            taken.append(Path(target))
    return state


@stage(needs=("plan", "solution"))
def write_calibration_cache(state: PipelineState, options: RunOptions) -> PipelineState:
    """Write TensorRT's calibration cache if the request names one."""
    request = state.request
    if request.trt_cache is not None:
        ranges = _ranges(state.prepared.plan, state.solution)
        calibration_cache.write_calibration_cache(request.trt_cache, ranges, force=request.force)
    return state


@stage(needs=("plan", "solution"))
def write_overrides(state: PipelineState, options: RunOptions) -> PipelineState:
    """Write the types and scales of all tensors as overrides of onnxruntime's quantizer, if the request names a file.

    Raises:
        OutputError: see `check_target`.
    """
    request = state.request
    if request.write_overrides is not None:
        target = Path(request.write_overrides)
        graphs.check_target(target, (), force=request.force)
        text = json.dumps(overrides_of(state.prepared.plan, state.solution), indent=1)
        graphs.write_text(target, text + "\n")
    return state


NOTED_BYTES: Final = 1024
"""Bytes of metadata from which it is noted that they are left out."""


@stage(needs=("graph", "plan", "solution"), sets=("quantized",))
def insert(state: PipelineState, options: RunOptions) -> PipelineState:
    """Copy the graph and insert the Q/DQ pairs of the solution. The metadata name backend, CPU and kernel costs.

    Metadata that exporters write for debugging is left out. If nothing is quantized or converted, the model is written
    as it was given: rewrites for quantization, such as biases that are added, would only make it larger.
    """
    in_memory = not state.request.float_model  # a graph that QuantModel was given, or has changed
    unchanged = quantizes_nothing(state) and state.prepared.plan.float_type == "fp32" and not in_memory
    graph = _as_given(state) if unchanged else graphs.copy(state.prepared.graph)
    debug = graphs.drop_debug_metadata(graph)
    if debug >= NOTED_BYTES:
        graph.info.notes.append(
            Note("debug-metadata", f"{debug:,} bytes of the exporter's debug metadata (stack traces, classes) left out")
        )
    if unchanged:
        return replace(state, prepared=replace(state.prepared, applied=()), quantized=graph)
    qdq.insert(graph, state.prepared.plan, state.solution)
    graph.info.metadata.update(to_metadata(graph.info.edits))
    graph.info.metadata[RECORDED] = full_name(state.prepared.backend)
    if state.prepared.plan.cpu:
        graph.info.metadata[RECORDED_CPU] = state.prepared.plan.cpu
    if state.prepared.plan.kernel_costs.startswith(DIGEST):
        graph.info.metadata[RECORDED_COSTS] = state.prepared.plan.kernel_costs
    return replace(state, quantized=graph)


def _as_given(state: PipelineState) -> graphs.Graph:
    """Load the model again, without changes except that pairs that the recipe requantizes are removed."""
    graph = graphs.load(state.request.float_model, opset=OLDEST_OPSET)
    qdq.make_float(graph, requantize=state.prepared.recipe.requantize)
    graph.info.notes = list(state.prepared.graph.info.notes)
    return graph


@stage(needs=("plan", "solution", "quantized"), sets=("quantized",))
def convert_float(state: PipelineState, options: RunOptions) -> PipelineState:
    """Convert the float part of the quantized graph to the type of HIGH_PRECISION, in place."""
    plan, graph = state.prepared.plan, state.quantized
    if plan.float_type == "fp32":
        return state
    keep_io = state.prepared.recipe.keep_io
    done = precision.convert(graph, state.solution.magnitudes, plan.float_type, keep_io=keep_io)
    graph.info.notes.extend(done.notes)
    return replace(state, unwritten=(*state.unwritten, *done.refusals))


@stage(needs=("quantized",), sets=("quantized",))
def legalise(state: PipelineState, options: RunOptions) -> PipelineState:
    """Make the quantized graph legal for the runtime, in place, without changing any value.

    Recurrent ops planned in integers are replaced by operators that quantize their inputs at run time.
    """
    backend, graph = state.prepared.backend, state.quantized
    planned: dict[str, set[str]] = {INTEGER_RECURRENT: set(), STORED: set()}
    for site in state.prepared.plan.sites:
        planned.get(site.rule, set()).update(reader.node for reader in site.readers)
    recurrent = backend.files.quantize_recurrent(graph, planned[INTEGER_RECURRENT])
    if recurrent:
        more = f", and {len(recurrent) - 1} more" if len(recurrent) > 1 else ""
        graph.info.notes.append(Note("written-in-format", f"written in place of Q/DQ: {recurrent[0]}{more}"))
    gelus = contract_gelus(graph) if backend.files.whole_gelus else []
    changes = [*gelus, *backend.files.decode_weights(graph, planned[STORED]), *backend.files.legalise(graph)]
    if changes:
        more = f", and {len(changes) - 1} more such changes" if len(changes) > 1 else ""
        graph.info.notes.append(
            Note(
                "written-for-backend", f"written as {backend.name} wants it, with the same numbers: {changes[0]}{more}"
            )
        )
    return state


@stage(needs=("solution", "quantized"), sets=("quantized",))
def convert_format(state: PipelineState, options: RunOptions) -> PipelineState:
    """Replace Q/DQ pairs by the operators of the recipe's MODE and FORMAT, in place."""
    converted = export.finish(state.quantized, state.prepared.recipe, state.solution.levels)
    if converted is None:
        return state
    state.quantized.info.notes.append(Note("written-in-format", f"written in place of Q/DQ: {converted.text()}"))
    return replace(state, unwritten=(*state.unwritten, *converted.refusals))


@stage(needs=("graph", "plan", "data", "solution", "quantized"), sets=("report",))
def save(state: PipelineState, options: RunOptions) -> PipelineState:
    """Save the file next to its target, verify it there, and move it into place.

    Raises:
        SbonnxError: a subclass. No partial file is left.
    """
    request = state.request
    report = _report(state)
    with placed(request.output, state.prepared.graph.info.files, force=request.force) as path:
        graphs.save(state.quantized, path)
        release_pages()
        if request.output is None:
            report = replace(report, quantized=onnx.load(str(path)))
        state = replace(state, report=report)
        return verify(state, path) if request.verify else with_details(state)


@contextmanager
def placed(output: str | os.PathLike[str] | None, inputs: Sequence[Path], *, force: bool) -> Iterator[Path]:
    """Yield the path where a model is verified: staged next to its target, or in a temporary folder.

    Args:
        output: the target; None: the model stays in memory.
        inputs: files that it may not replace.
        force: overwrite a file.
    """
    if output is not None:
        with staged(Path(output), inputs, force=force) as path:
            yield path
        return
    with temporary_folder() as folder:
        yield folder / "model.onnx"


def _ranges(plan: Plan, solution: Solution) -> dict[str, Bounds]:
    """Return the range of each quantized activation of the main graph, by tensor: the union over its readers."""
    ranges: dict[str, Bounds] = {}
    for site in plan.of_role("activation"):
        bounds = solution.bounds.get(site.key)
        if site.fixed is not None:
            bounds = Bounds(*(np.asarray(end, np.float32) for end in site.fixed))
        if bounds is not None and not site.scope:
            ranges[site.tensor] = ranges[site.tensor].union(bounds) if site.tensor in ranges else bounds
    return ranges


def _solved(state: PipelineState) -> list[Site]:
    """Return the sites that have scales or codes."""
    solution = state.solution
    return [site for site in state.prepared.plan.sites if site.key in solution.qparams or site.key in solution.codes]


def quantizes_nothing(state: PipelineState) -> bool:
    """Return whether nothing was quantized, though the recipe asks for more than another float type or FLOAT_NODES."""
    recipe = state.prepared.recipe
    in_float = recipe.w.quantizer.bit == FLOAT
    only_converted = recipe.high_precision != "fp32" and in_float and recipe.a.quantizer.bit == FLOAT
    only_caches = recipe.llm.kv_bits is not None and in_float
    by_measured_times = recipe.float_nodes is not None
    return not (_solved(state) or only_converted or only_caches or by_measured_times)


def _report(state: PipelineState) -> Report:
    """Build the report of what was planned, solved and written; verification adds its figures."""
    request, prepared, solution = state.request, state.prepared, state.solution
    plan, recipe = prepared.plan, prepared.recipe
    solved = _solved(state)
    refusals = (*prepared.refusals, *solution.refusals)
    problems: tuple[Problem, ...] = ()
    if request.pruned is not None:
        problems = tuple(Problem(problem.code, f"pruning: {problem}") for problem in request.pruned.report.problems)
    if quantizes_nothing(state):
        left = [refusal for refusal in refusals if refusal.leaves_float]
        why = f", such as '{most_frequent(left).where}': {most_frequent(left).why}" if left else ""
        problems = (*problems, Problem("no-tensor-quantized", f"nothing was quantized{why}"))
    broken = prepared.graph.info.broken_rewrites
    left_out = (without_rewrites(broken),) if broken else ()
    return Report(
        model=request.label,
        output=None if request.output is None else os.fspath(Path(request.output)),
        backend=prepared.backend.name,
        counts=NodeCounts(
            nodes_before=prepared.nodes_before,
            nodes_float=query.node_count(prepared.graph),
            nodes_quantized=query.node_count(state.quantized),
            activations=sum(site.role == "activation" for site in solved),
            weights=sum(site.role == "weight" for site in solved),
            biases=sum(site.role == "bias" for site in solved),
            samples=solution.samples,
        ),
        sites=tuple(map(_site_row, solved)),
        applied=prepared.applied,
        refusals=(*refusals, *state.unwritten),
        settings=recipe.to_dict(),
        notes=(
            *state.quantized.info.notes,
            *solution.notes,
            *(Note("without-compiled-loops", text) for text in loops.notes()),
            *left_out,
        ),
        problems=problems,
        pruning=None if request.pruned is None else request.pruned.report,
        engine_command=_engine_command(state, solved),
        cpu=plan.cpu,
        kernel_costs=plan.kernel_costs,
    )


def _engine_command(state: PipelineState, solved: Iterable[Site]) -> str:
    """Return the command that builds an engine from the output file; "" if the runtime has none."""
    prepared, output = state.prepared, state.request.output
    if output is None:
        return ""
    feed = {} if state.data is None else next(iter(state.data.every), {})
    inputs = [
        EngineInput(
            tensor.name,
            tuple(size if isinstance(size, int) and size >= 0 else None for size in tensor.shape or ()),
            np.shape(feed[tensor.name]) if tensor.name in feed else None,
        )
        for tensor in state.quantized.inputs
    ]
    types = {
        site.spec.kind if site.spec.is_float else "int4" if site.spec.bits == INT4_BITS else "int8" for site in solved
    }
    strong = prepared.plan.float_type != "fp32"
    return prepared.backend.files.engine_command(os.fspath(output), inputs, types=types, strong=strong)


def _site_row(site: Site) -> QuantizedTensor:
    reader = site.readers[0].node if site.readers else ""
    return QuantizedTensor(site.tensor, site.role, site.spec.label(), site.spec.bits, reader)
