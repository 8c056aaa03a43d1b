"""``sbonnx simplify``: simplify and fuse a float model without changing its outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, required_output
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


OUTPUT: Final = replace(options.OUTPUT, help="The model to write.")
NO_FUSE: Final = options.switch("--no-fuse", "Keep batch norms and the like as they are.")

OPTIONS: Final = (
    options.MODEL,
    OUTPUT,
    NO_FUSE,
    options.DATA,
    options.SPLIT,
    options.SAMPLES,
    options.FORCE,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    """Run ``sbonnx simplify`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx import patterns
    from sbonnx.graph.storage.staging import staged

    show, model, force = given.show(), given[options.MODEL], given[options.FORCE]
    target = required_output(given[OUTPUT])
    graphs.check_target(target, inputs=[model], force=force)
    graph = graphs.load(model)
    before = _count(graph)
    steps = (patterns.SIMPLIFY,) if given[NO_FUSE] else (patterns.SIMPLIFY, patterns.FUSE)
    done = [patterns.apply(graph, step) for step in steps]
    graphs.edit.sort(graph)
    with staged(target, graph.info.files, force=force) as path:
        graphs.save(graph, path)
        comparison, unproved = _prove(given, path, graph)
        problems = _problems(comparison, graph) if comparison is not None else [unproved]
    _tell(show, (model, target), (before, _count(graph)), done, comparison, problems)
    for note in graph.info.notes:
        show.note(note)
    show.line(f"written: {target}")
    return show.problems(problems)


def _count(graph: Graph) -> int:
    from sbonnx.graph import query

    return sum(len(body.nodes) for _, body in query.scopes(graph))


def _prove(given: Arguments, simplified: Path, graph: Graph) -> tuple[Comparison | None, str]:
    """Compare both files on ``--data``, or on synthetic feeds. Return None and the reason if neither is possible."""
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.cli.output.feeds import guesses, workable

    model, data = given[options.MODEL], given[options.DATA]
    if data is not None:
        feeds = datasets.read(data, graph, split=given[options.SPLIT], limit=given[options.SAMPLES])
        return verify.check(model, simplified, feeds), ""
    guessed, why = workable(graphs.load(model), guesses(datasets.input_specs(graph)))
    if not guessed:
        return None, f"not proved: the model does not run on made-up feeds ({why}): give --data"
    return verify.check(model, simplified, guessed), ""


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
