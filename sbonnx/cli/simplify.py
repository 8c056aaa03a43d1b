"""``sbonnx simplify``: simplify and fuse a float model without changing its outputs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.output.metric_tables import OUTPUT_COLUMNS, output_rows
from sbonnx.cli.output.show import Show

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.patterns import Applied
    from sbonnx.verify import Comparison

HELP: Final = "Simplify and fuse a float model. The outputs stay the same, proved in onnxruntime."

EQUAL_DB: Final = 80.0
"""SQNR from which outputs count as equal: float32 rounding alone gives about 140 dB, fusions reduce it slightly."""

EQUAL_HALF_DB: Final = 40.0
"""Threshold for models that compute in half precision (float16 or bfloat16: 50 to 70 dB)."""


def run(
    model: options.Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The model to write.", show_default=False)
    ] = None,
    no_fuse: Annotated[bool, typer.Option("--no-fuse", help="Keep batch norms and the like as they are.")] = False,
    data: options.Data = None,
    split: options.Split = None,
    samples: options.Samples = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx simplify`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx import patterns
    from sbonnx.graph.storage.staging import staged

    show = Show(as_json=as_json, quiet=quiet)
    target = options.output_of(output)
    graphs.check_target(target, inputs=[model], force=force)
    graph = graphs.load(model)
    before = _count(graph)
    steps = (patterns.SIMPLIFY,) if no_fuse else (patterns.SIMPLIFY, patterns.FUSE)
    done = [patterns.apply(graph, step) for step in steps]
    graphs.edit.sort(graph)
    with staged(target, graph.info.files, force=force) as path:
        graphs.save(graph, path)
        comparison, unproved = _prove(model, path, graph, data, split, samples)
        problems = _problems(comparison, graph) if comparison is not None else [unproved]
    _tell(show, (model, target), (before, _count(graph)), done, comparison, problems)
    for note in graph.info.notes:
        show.note(note)
    show.line(f"written: {target}")
    return show.problems(problems)


def _count(graph: Graph) -> int:
    from sbonnx.graph import query

    return sum(len(body.nodes) for _, body in query.scopes(graph))


def _prove(
    model: Path, simplified: Path, graph: Graph, data: Path | None, split: int | None, samples: int | None
) -> tuple[Comparison | None, str]:
    """Compare both files on `data`, or on synthetic feeds. Return None and the reason if neither is possible."""
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.cli.output.feeds import guesses, workable

    if data is not None:
        return verify.check(model, simplified, datasets.read(data, graph, split=split, limit=samples)), ""
    feeds, why = workable(graphs.load(model), guesses(datasets.input_specs(graph)))
    if not feeds:
        return None, f"not proved: the model does not run on made-up feeds ({why}): give --data"
    return verify.check(model, simplified, feeds), ""


def _problems(comparison: Comparison, graph: Graph) -> list[str]:
    from sbonnx.graph import query

    half = any(str(query.dtype(tensor)) in ("float16", "bfloat16") for tensor in query.all_tensors(graph))
    least = EQUAL_HALF_DB if half else EQUAL_DB
    return [
        f"output '{error.name}' is not the same: {error.sqnr_db:.1f} dB signal to error, {error.not_finite} not finite"
        for error in comparison.outputs
        if error.sqnr_db < least or error.not_finite or error.mismatched
    ]


def _tell(
    show: Show,
    paths: tuple[Path, Path],
    nodes: tuple[int, int],
    done: list[Applied],
    comparison: Comparison | None,
    problems: list[str],
) -> None:
    fired = [one for applied in done for one in applied.fired]
    refusals = [one for applied in done for one in applied.refusals]
    outputs: Any = comparison.to_dict()["outputs"] if comparison is not None else []
    show.value(
        {
            "model": paths[0],
            "output": paths[1],
            "nodes_before": nodes[0],
            "nodes_after": nodes[1],
            "applied": fired,
            "refusals": refusals,
            "outputs": outputs,
            "problems": problems,
            "ok": not problems,
        }
    )
    show.facts(str(paths[0]), {"nodes": f"{nodes[0]} -> {nodes[1]}"})
    first = {one.pattern: one.node for one in reversed(fired)}
    counts = Counter(one.pattern for one in fired)
    show.table("done", ("pattern", "times", "first at"), [(name, n, first[name]) for name, n in counts.most_common()])
    show.table("not done", ("what", "where", "why"), [(one.what, one.where, one.why) for one in refusals])
    show.table("outputs against the original", OUTPUT_COLUMNS, output_rows(outputs))
