"""``sbonnx quantize``: the pipeline from a float model to a proved quantized one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.figures import OUTPUT_COLUMNS, measured, output_rows
from sbonnx.cli.show import Show, to_json

if TYPE_CHECKING:
    from sbonnx.report import Report

HELP: Final = "Quantize a float model and prove the result. It is compared with float in onnxruntime."

WORST: Final = 5
"""Layers shown in the table; all of them are in the JSON."""


def run(
    model: options.Model,
    data: options.Data = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The quantized model to write.", show_default=False)
    ] = None,
    backend: options.Backend = None,
    recipe: options.RecipePath = None,
    bits: options.Bits = None,
    sets: options.Sets = None,
    split: options.Split = None,
    samples: options.Samples = None,
    device: options.Device = None,
    memory: options.Memory = None,
    granularity: options.Granularity = None,
    workers: options.Workers = None,
    cache: options.Cache = None,
    asym: options.Asym = False,
    feedback: options.Feedback = None,
    trt_cache: options.TrtCache = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare the result with float.")] = False,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.json", help="Write the whole report.", show_default=False)
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    json_progress: options.JsonProgress = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """See `HELP`."""
    from sbonnx import graph as graphs
    from sbonnx.calib.progress import make_progress
    from sbonnx.prepare import read_recipe
    from sbonnx.quantize import quantize

    show = Show(as_json=as_json, quiet=quiet)
    source = options.required(data)
    target = options.output_of(output)
    flags = options.overrides(sets, bits=bits, device=device, samples=samples, memory=memory, workers=workers)
    flags = options.overrides(flags, granularity=granularity, cache=cache, asym=asym, feedback=options.pairs(feedback))
    wishes, _ = read_recipe(recipe, backend, flags)
    if report_file is not None:
        graphs.check_target(report_file, inputs=[model, source, target], force=force)
    progress = make_progress(quiet=quiet, as_json=json_progress)
    try:
        report = quantize(
            model,
            source,
            recipe=wishes,
            output=target,
            force=force,
            verify=not no_verify,
            split=split,
            progress=progress,
            trt_cache=trt_cache,
        )
    finally:
        progress.close()
    return _said(show, report, report_file)


def _said(show: Show, report: Report, file: Path | None) -> int:
    """Print the report, and write it where asked for; the exit code."""
    from sbonnx import graph as graphs

    if file is not None:
        graphs.write_text(file, to_json(report.to_dict()) + "\n")
    show.value(report.to_dict())
    _tables(show, report)
    return show.problems(report.problems)


def _tables(show: Show, report: Report) -> None:
    counts = report.counts
    metrics = report.metrics
    show.facts(
        f"{report.model} for {report.backend}",
        {
            "nodes": f"{counts['nodes before']} in the file, {counts['nodes float']} simplified and fused, "
            f"{counts['nodes quantized']} with Q/DQ",
            "quantized": f"{counts['activations']} activations, {counts['weights']} weights, {counts['biases']} biases",
            "calibrated on": f"{counts['samples']} samples",
            **measured(metrics),
        },
    )
    show.table("outputs against float", OUTPUT_COLUMNS, output_rows(metrics.get("outputs", ())))
    worst = report.layers[:WORST]
    show.table(
        "worst layers (signal to noise, dB)",
        ("node", "tensor", "type", "alone", "with all before it"),
        [(row["node"], row["tensor"], row["label"], row["alone_db"], row["sqnr_db"]) for row in worst],
    )
    reasons = Counter((refusal.what, refusal.why) for refusal in report.refusals)
    first = {(refusal.what, refusal.why): refusal.where for refusal in reversed(report.refusals)}
    show.table(
        "not done",
        ("times", "what", "why", "first at"),
        [(count, what, why, first[what, why]) for (what, why), count in reasons.most_common()],
    )
    for note in report.notes:
        show.line(f"note: {note}")
    show.line(f"written: {report.output}")
