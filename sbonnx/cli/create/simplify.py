"""``sbonnx simplify``: simplify and fuse a float model without changing its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, required_output
from sbonnx.cli.output.tables import show_outputs
from sbonnx.errors import DataError, ModelError

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.spec import Array
    from sbonnx.verify import Comparison

HELP: Final = "Simplify and fuse a float model. Equal outputs are verified in onnxruntime."

EQUAL_DB: Final = 80.0
"""SQNR from which outputs count as equal: float32 rounding alone gives about 140 dB, fusions reduce it slightly."""

EQUAL_HALF_DB: Final = 40.0
"""Threshold for models that compute in half precision (float16 or bfloat16: 50 to 70 dB)."""

OUTPUT: Final = replace(options.OUTPUT, help="The model to write.")
NO_FUSE: Final = options.switch("--no-fuse", "Do not fuse batch norms and other operators.")

OPTIONS: Final = (
    options.MODEL,
    OUTPUT,
    NO_FUSE,
    options.DATA,
    options.PREPROCESS,
    options.SPLIT,
    options.SAMPLES,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx import patterns
    from sbonnx.graph.storage.output_files import staged

    printer, model, force = given.printer(), given[options.MODEL], given[options.FORCE]
    target = required_output(given[OUTPUT])
    graphs.check_target(target, inputs=[model], force=force, model=True)
    graph = graphs.load(model)
    before = _count(graph)
    steps = (patterns.SIMPLIFY,) if given[NO_FUSE] else (patterns.SIMPLIFY, patterns.FUSE)
    done = [patterns.apply(graph, step) for step in steps]
    graphs.edit.sort(graph)
    with staged(target, graph.info.files, force=force) as path:
        graphs.save(graph, path)
        comparison, reason = _verify(given, path, graph)
        problems = _problems(comparison, graph) if comparison is not None else list(filter(None, [reason]))
    after = _count(graph)
    fired = [match for applied in done for match in applied.fired]
    refusals = [refusal for applied in done for refusal in applied.refusals]
    metrics: dict[str, Any] = {} if comparison is None else comparison.to_dict()
    printer.value(
        "simplify",
        {
            "model": model,
            "output": target,
            "nodes_before": before,
            "nodes_after": after,
            "applied": fired,
            "refusals": refusals,
            "outputs": metrics.get("outputs", []),
            "quality": metrics.get("quality", []),
            "problems": problems,
            "ok": not problems,
        },
    )
    printer.facts(str(model), {"nodes": f"{before} -> {after}"})
    first = {match.pattern: match.node for match in reversed(fired)}
    counts = Counter(match.pattern for match in fired)
    printer.table(
        "applied", ("pattern", "times", "first at"), [(name, n, first[name]) for name, n in counts.most_common()]
    )
    printer.table(
        "not done", ("what", "where", "why"), [(refusal.what, refusal.where, refusal.why) for refusal in refusals]
    )
    show_outputs(printer, "outputs against the original", metrics)
    for note in graph.info.notes:
        printer.note(note)
    printer.line(f"written: {target}")
    return printer.problems(problems)


def _count(graph: Graph) -> int:
    from sbonnx.graph import query

    return sum(len(body.nodes) for _, body in query.scopes(graph))


def _verify(given: Arguments, simplified: Path, graph: Graph) -> tuple[Comparison | None, str]:
    """Compare both files on ``--data``, or on synthetic feeds.

    Return None and the reason if neither is possible. If onnxruntime cannot open the model, there is a note instead.
    """
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.calib.data.random_feeds import guessed_feeds

    model, data = given[options.MODEL], given.data()
    original = graphs.load(model)
    unopened = _why_unopened(original)
    if unopened:
        graphs.check_file(simplified)
        graph.info.notes.append(f"not verified by execution: {unopened}")
        return None, ""
    if data is not None:
        feeds = datasets.read(data, graph, split=given[options.SPLIT], limit=given[options.SAMPLES])
        return verify.check(model, simplified, feeds), ""
    guessed, why = _first_accepted(original, guessed_feeds(datasets.input_specs(graph)))
    if not guessed:
        return None, f"not verified: the model does not run on synthetic feeds ({why}): give --data"
    return verify.check(model, simplified, guessed), ""


def _why_unopened(graph: Graph) -> str:
    """Return why onnxruntime cannot open the model, or ""."""
    from sbonnx.calib.engine.runner import LayerRunner

    try:
        LayerRunner(graph, optimisation="off").close()
    except ModelError as error:
        return str(error)
    return ""


def _first_accepted(graph: Graph, guessed: Iterable[list[dict[str, Array]]]) -> tuple[list[dict[str, Array]], str]:
    """Return the first guess that the model runs on; else an empty list and the reason of the last failure."""
    from sbonnx.calib.engine.runner import LayerRunner

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


def _problems(comparison: Comparison, graph: Graph) -> list[str]:
    from sbonnx.graph import query

    half = any(str(query.dtype(tensor)) in ("float16", "bfloat16") for tensor in query.all_tensors(graph))
    least = EQUAL_HALF_DB if half else EQUAL_DB
    return [
        f"output '{error.name}' differs: {error.sqnr_db:.1f} dB signal to error, {error.not_finite} not finite"
        for error in comparison.outputs
        if error.sqnr_db < least or error.not_finite or error.mismatched
    ]
