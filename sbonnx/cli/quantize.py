"""``sbonnx quantize``: quantize a float model and verify the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.output.metric_tables import OUTPUT_COLUMNS, measured, output_rows
from sbonnx.cli.output.search_tables import show_search
from sbonnx.cli.output.show import Show, to_json
from sbonnx.errors import OutputError

if TYPE_CHECKING:
    from sbonnx.report import Report

HELP: Final = "Quantize a float model and prove the result. It is compared with float in onnxruntime."

JSON: Final = ".json"
PAGES: Final = (".html", ".htm")
"""File name suffixes of HTML reports."""

WORST: Final = 5
"""Layers shown in the table; the JSON has all of them."""


def run(
    model: options.Model,
    data: options.Data = None,
    output: options.Output = None,
    backend: options.Backend = None,
    recipe: options.RecipePath = None,
    bits: options.Bits = None,
    block_size: options.BlockSize = None,
    mode: options.Mode = None,
    form: options.Format = None,
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
    cross_layer: options.CrossLayer = False,
    smooth_quant: options.SmoothQuant = None,
    max_loss: options.MaxLoss = None,
    min_sqnr: options.LeastSqnr = None,
    average_bits: options.AverageBits = None,
    save_recipe: options.SaveRecipe = None,
    trt_cache: options.TrtCache = None,
    requantize: options.Requantize = False,
    high_precision: options.HighPrecision = None,
    no_keep_io: options.NoKeepIo = False,
    no_verify: options.NoVerify = False,
    report_file: options.ReportFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
    json_progress: options.JsonProgress = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx quantize`` and return the exit code."""
    from sbonnx.stages.state import read_recipe

    target = options.output_of(output)
    flags = options.overrides(sets, bits=bits, device=device, samples=samples, memory=memory, workers=workers)
    flags = options.overrides(flags, granularity=granularity, cache=cache, asym=asym, feedback=options.pairs(feedback))
    flags = options.overrides(flags, requantize=requantize, block_size=block_size)
    flags = options.overrides(flags, high_precision=high_precision, keep_io="false" if no_keep_io else None)
    flags = options.overrides(flags, mode=mode, format=form, cross_layer=cross_layer, smooth_quant=smooth_quant)
    flags = options.overrides(flags, max_loss=max_loss, min_sqnr=options.decibel(min_sqnr))
    flags = options.overrides(flags, average_bits=None if average_bits is None else str(average_bits))
    wishes, _ = read_recipe(recipe, backend, flags)
    source = options.required(data) if wishes.mode == "static" else data
    taken = [path for path in (model, target, source, save_recipe, trt_cache) if path is not None]
    check_report(report_file, taken, force=force)
    how = {"output": target, "force": force, "verify": not no_verify, "split": split, "trt_cache": trt_cache}
    how["save_recipe"] = save_recipe
    report = _made(model, source, recipe=wishes, quiet=quiet, as_json=json_progress, **how)
    return said(Show(as_json=as_json, quiet=quiet), report, report_file)


def check_report(file: Path | None, taken: Sequence[Path], *, force: bool) -> None:
    """Check that the report file can be written, before the work begins.

    Raises:
        OutputError: its suffix is neither JSON nor HTML, or it cannot be written.
    """
    from sbonnx import graph as graphs

    if file is not None:
        if file.suffix.lower() not in (JSON, *PAGES):
            raise OutputError(f"--report {file}: its name says what is written: end it in .json or .html")
        graphs.check_target(file, inputs=taken, force=force)


def _made(model: Path, source: Path | None, *, quiet: bool, as_json: bool, **how: Any) -> Report:
    """Call `sbonnx.quantize` with the keyword arguments `how`, with progress on stderr."""
    from sbonnx.api import quantize
    from sbonnx.progress import make_progress

    progress = make_progress(quiet=quiet, as_json=as_json)
    try:
        return quantize(model, source, progress=progress, **how)
    finally:
        progress.close()


def said(show: Show, report: Report, file: Path | None) -> int:
    """Print the report, write it to `file` if given, and return the exit code."""
    from sbonnx import graph as graphs

    if file is not None:
        graphs.write_text(file, _written(report, file))
    code = show.problems(report.problems)
    show.value(report.to_dict())
    _tables(show, report)
    return code


def _written(report: Report, file: Path) -> str:
    """Render the report in the format given by the file's suffix."""
    if file.suffix.lower() == JSON:
        return to_json(report.to_dict()) + "\n"
    from sbonnx.html_report import single_page

    return single_page(report.to_dict())


def _tables(show: Show, report: Report) -> None:
    counts = report.counts
    metrics = report.metrics
    show.facts(
        f"{report.model} for {report.backend}",
        {
            "nodes": f"{counts['nodes before']} in the file, {counts['nodes float']} simplified and fused, "
            f"{counts['nodes quantized']} with Q/DQ",
            "quantized": f"{counts['activations']} activations, {counts['weights']} weights, {counts['biases']} biases",
            "calibrated on": f"{counts['samples']} samples" if counts["samples"] else "nothing: no range was needed",
            **measured(metrics, calibrated=bool(counts["samples"])),
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
    show_search(show, report.search)
    for note in report.notes:
        show.note(note)
    show.line(f"written: {report.output}")
