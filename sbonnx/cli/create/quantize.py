"""``sbonnx quantize``: quantize a float model and verify the result."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.evaluation_options import calibration_data, evaluation_of
from sbonnx.cli.options import Arguments, required_output
from sbonnx.errors import DataError, OutputError
from sbonnx.plugins import MODEL_FOLDERS, optional_part
from sbonnx.present.text.printer import decibels
from sbonnx.present.text.summary import facts_of, show_summary
from sbonnx.present.text.tables import (
    comparison_facts,
    pruned_text,
    show_evaluation,
    show_outputs,
    show_portability,
    show_refusals,
    show_search,
    show_tuning,
)
from sbonnx.system.terminal import to_json, versioned

if TYPE_CHECKING:
    from sbonnx.backends import Backend
    from sbonnx.report import Report
    from sbonnx.report.outcome import QuantizedFolder
    from sbonnx.report.pruned import PruningReport

HELP: Final = "Quantize a float model and verify the result. Outputs are compared with float in onnxruntime."

JSON: Final = ".json"
PAGES: Final = (".html", ".htm")
"""File name suffixes of HTML reports."""

WORST: Final = 5
"""Layers shown in the table; the JSON has all of them."""

USES: Final = {
    "onnxruntime": 'onnxruntime.InferenceSession("{file}").run(None, {{input: array}})',
    "openvino": 'benchmark_app -m {file}, or openvino.Core().compile_model("{file}", "CPU")',
    "web": 'ort.InferenceSession.create("{file}", {{executionProviders: ["wasm"]}}) in the page',
    "qnn": 'onnxruntime.InferenceSession("{file}", providers=["QNNExecutionProvider"]) on the device',
}
"""Use of the file by backend; that of tensorrt is its engine."""

MORE_SAMPLES: Final = "MORE_SAMPLES"
"""Stands for data with more samples in a command that is proposed."""

OF_ONE_MODEL: Final = (
    options.EVAL,
    options.SAVE_RECIPE,
    options.TRT_CACHE,
    options.WRITE_OVERRIDES,
    options.TRTEXEC,
)
"""Options that a folder with several models does not take."""

OPTIONS: Final = (
    options.MODEL,
    options.DATA,
    options.OUTPUT,
    *options.BASIC,
    options.EFFORT,
    options.BLOCK_SIZE,
    options.MODE,
    options.FORMAT,
    options.SET,
    *options.NODES,
    *options.FEEDS,
    options.MEMORY,
    options.GRANULARITY,
    options.CACHE,
    options.ASYM,
    options.FEEDBACK,
    options.CROSS_LAYER,
    options.SMOOTH_QUANT,
    options.MAX_LOSS,
    options.TARGET_SQNR,
    options.AVERAGE_BITS,
    options.MINIMIZE,
    options.TUNE,
    options.TUNE_TIME,
    options.TASK,
    *options.EVALUATING,
    options.SAVE_RECIPE,
    options.TRT_CACHE,
    options.OVERRIDES,
    options.WRITE_OVERRIDES,
    options.REQUANTIZE,
    options.TARGET_CPU,
    options.HIGH_PRECISION,
    options.MAX_DOWNLOAD,
    options.NO_KEEP_IO,
    options.NO_VERIFY,
    options.NO_ADVICE,
    options.REPORT,
    options.TRTEXEC,
    options.FORCE,
    options.VERBOSE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx.api.create import quantize
    from sbonnx.stages.state import read_recipe

    recipe, rules = read_recipe(given[options.RECIPE], given[options.BACKEND], given.overrides())
    if recipe.mode == "static" and given[options.DATA] is None:
        _check_no_decoder(given)
    model, output, force = given[options.MODEL], required_output(given[options.OUTPUT]), given[options.FORCE]
    evaluation = evaluation_of(given)
    trt_cache, save_recipe = given[options.TRT_CACHE], given[options.SAVE_RECIPE]
    write_overrides = given[options.WRITE_OVERRIDES]
    data = calibration_data(given, "quantize") if recipe.mode == "static" else given.data()
    others = [Path(path) for path in (model, output, data, save_recipe, trt_cache, write_overrides) if path is not None]
    check_report(given[options.REPORT], others, force=force)
    _check_trtexec(given[options.TRTEXEC], rules, [*others, given[options.REPORT]], force=force)
    progress = given.progress()
    settings: dict[str, Any] = {
        "recipe": recipe,
        "force": force,
        "verify": not given[options.NO_VERIFY],
        "split": given[options.SPLIT],
        "trt_cache": trt_cache,
        "write_overrides": write_overrides,
        "save_recipe": save_recipe,
        "progress": progress,
        "evaluation": evaluation,
        "details": given[options.REPORT] is not None,
    }
    try:
        if model.is_dir() and rules.files.variants:
            several = [row for row in OF_ONE_MODEL if row is not options.EVAL]
            _check_several(given, several, f"folder '{model}' gets several files for {rules.name}")
            settings = {name: settings[name] for name in ("recipe", "force", "verify", "split", "evaluation")}
            browser = optional_part(MODEL_FOLDERS, "browser_folder")
            limit = given[options.MAX_DOWNLOAD]
            written = browser.quantize_for_browser(
                model, data, output, variants=rules.files.variants, max_download=limit, progress=progress, **settings
            )
            return _show_variants(given, written)
        if given[options.MAX_DOWNLOAD] is not None:
            raise OutputError("--max-download chooses among files of a model folder: give one, with --backend web")
        if model.is_dir():
            reports = _of_folder(given, data, output, settings)
        else:
            reports = {"": quantize(model, data, output=output, advise=not given[options.NO_ADVICE], **settings)}
    finally:
        progress.close()
    if len(reports) > 1:
        return _show_reports(given, reports)
    (report,) = reports.values()
    return show_report(given, _with_commands(given, report))


def _check_no_decoder(given: Arguments) -> None:
    """Check that a model without calibration data is no folder of a decoder.

    Raises:
        DataError: it is one, which ``sbonnx llm quantize`` quantizes without data.
    """
    from sbonnx.llm.layout import GENAI_CONFIG

    folder = given[options.MODEL]
    if (folder / GENAI_CONFIG).is_file():
        command = shlex.join(["sbonnx", "llm", "quantize", str(folder), "-o", str(given[options.OUTPUT] or "DECODER/")])
        raise DataError(
            f"'{folder}' is a decoder for onnxruntime-genai ({GENAI_CONFIG}), and --data is missing: {command} "
            "quantizes its weights without data"
        )


def _with_commands(given: Arguments, report: Report) -> Report:
    """Return the report with the command lines of the changes that were measured to help, and of the causes."""
    causes = tuple(
        replace(cause, command=given.command("quantize", cause.overrides)) if cause.overrides else cause
        for cause in report.causes
    )
    advice = report.advice
    if advice is not None:
        helps = advice.overrides and advice.tested
        advice = replace(advice, command=given.command("quantize", advice.overrides) if helps else "")
    return replace(report, advice=advice, causes=causes)


def _of_folder(given: Arguments, data: Any, output: Path, settings: dict[str, Any]) -> dict[str, Report]:
    """Quantize the models of a folder of Hugging Face; returns the reports by file name without suffix.

    Raises:
        OutputError: the folder has several models, and an option is for one.
    """
    optimum = optional_part(MODEL_FOLDERS, "optimum")
    folder = given[options.MODEL]
    models = optimum.ModelFolder.read(folder).models
    if len(models) > 1:
        names = ", ".join(f"{name}.onnx" for name in models)
        _check_several(given, OF_ONE_MODEL, f"folder '{folder}' has several models ({names})")
    reports: dict[str, Report] = optimum.quantize_folder(folder, data, output, **settings)
    return reports


def _check_several(given: Arguments, single: Sequence[options.CommandOption[Any]], what: str) -> None:
    """Check that no option is given that several results do not take.

    Raises:
        OutputError: one is.
    """
    wrong = [f"leave out {row.flags[0]}" for row in single if given.values.get(row) is not None]
    page = given[options.REPORT]
    if page is not None and page.suffix.lower() != JSON:
        wrong.append("use --report FILE.json")
    if wrong:
        raise OutputError(f"{what}: {wrong[0]}, or give one file")


def _show_reports(given: Arguments, reports: Mapping[str, Report]) -> int:
    """Print the reports of several models, write the file of ``--report``, and return the highest exit code."""
    from sbonnx import graph as graphs
    from sbonnx.report.outcome import QuantizedFolder

    folder = QuantizedFolder(reports)
    file = given[options.REPORT]
    if file is not None:
        graphs.write_text(file, to_json(versioned("quantize-folder", folder.to_dict())) + "\n")
    printer = given.printer()
    printer.value("quantize-folder", folder)
    return max(_print_report(given, report) for report in reports.values())


def _show_variants(given: Arguments, folder: QuantizedFolder) -> int:
    """Print sizes and errors of the files of each model, write the file of ``--report``, and return the exit code."""
    from sbonnx import graph as graphs

    file = given[options.REPORT]
    if file is not None:
        graphs.write_text(file, to_json(versioned("quantize-folder", folder.to_dict())) + "\n")
    printer = given.printer()
    printer.value("quantize-folder", folder)
    printer.table(
        "files",
        ("module", "dtype", "bytes", "SQNR dB", "metric", "chosen"),
        [
            (
                row.module,
                row.dtype,
                f"{row.bytes:,}",
                "–" if row.sqnr_db is None else decibels(row.sqnr_db),
                "–" if row.metric is None else f"{row.metric:.4g}",
                "yes" if row.chosen else "",
            )
            for row in folder.variants
        ],
    )
    printer.notes(folder.notes, every=True)
    return max((printer.problems(report.problems) for report in folder.files.values()), default=0)


def check_report(file: Path | None, taken: Sequence[Path], *, force: bool) -> None:
    """Check that the report file can be written, before the work begins.

    Raises:
        OutputError: its suffix is that of no report, or it cannot be written.
    """
    from sbonnx import graph as graphs

    if file is not None:
        if file.suffix.lower() not in (JSON, *PAGES):
            raise OutputError(f"--report {file}: the suffix selects the format: use {JSON} or {PAGES[0]}")
        graphs.check_target(file, inputs=taken, force=force)


def _check_trtexec(file: Path | None, backend: Backend, taken: Sequence[Path | None], *, force: bool) -> None:
    """Check that the file of the command line can be written, before the work begins.

    Raises:
        OutputError: the backend has no trtexec, or the file cannot be written.
    """
    from sbonnx import graph as graphs

    if file is not None:
        if not backend.files.builds_engine:
            name = backend.name
            raise OutputError(f"--trtexec {file}: {name} builds no engine: use --backend tensorrt, or leave it out")
        graphs.check_target(file, inputs=[path for path in taken if path is not None], force=force)


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}" if count else "no samples: no range was needed"


def _following(given: Arguments, report: Report) -> list[str]:
    """Return the next command: a change that was measured to help; else a comparison that proves more, or the loss."""
    advice = report.advice
    if advice is not None and advice.command:
        return [advice.command]
    if not given.values.get(options.DATA) or not report.output:
        return []
    files, verdict = (Path(report.model), Path(report.output)), report.verdict
    if verdict.too_few:
        return [_with_more_samples(given, report, files)]
    if verdict.accuracy == "lost":
        return [given.other_command("profile", (options.DATA, *options.FEEDS), files)]
    return []


def _with_more_samples(given: Arguments, report: Report, files: Sequence[Path]) -> str:
    """Return the command that judges the file on more samples: all of the data if ``--samples`` limited them."""
    labelled = report.metrics is not None and report.metrics.evaluation is not None
    verb, rows = ("eval", (options.METRIC, *options.READING)) if labelled else ("compare", ())
    feeds = [row for row in options.FEEDS if row is not options.SAMPLES]
    limited = given.values.get(options.SAMPLES) and not labelled
    data = given.values[options.DATA] if limited else MORE_SAMPLES
    more = replace(given, values={**given.values, options.DATA: data})
    return more.other_command(verb, (options.DATA, *rows, *feeds), files)


def _facts(given: Arguments, report: Report) -> list[tuple[str, str]]:
    """Return the rows below the verdict."""
    facts = facts_of(report)
    script = given.values.get(options.TRTEXEC)
    if report.engine_command:
        command = f"sh {script}" if script is not None else report.engine_command
        facts.append(("engine", f"{command} (not measured here)"))
    use = USES.get(report.backend.partition("@")[0])
    if use and report.output and not report.problems:
        facts.append(("use it", use.format(file=os.path.basename(report.output))))
    page = given.values.get(options.REPORT)
    facts.append(("details", "-v, or --report FILE.html" if page is None else str(page)))
    return facts


def write_report(file: Path | None, report: Report | PruningReport, schema: str = "quantize") -> None:
    """Write the report to the file of ``--report`` if given, as JSON or as a page."""
    if file is None:
        return
    from sbonnx import graph as graphs
    from sbonnx.report.notebook import page

    as_json = file.suffix.lower() == JSON
    graphs.write_text(file, to_json(versioned(schema, report.to_dict())) + "\n" if as_json else page(report))


def show_report(given: Arguments, report: Report) -> int:
    """Print the report, write it to the file of ``--report`` if given, and return the exit code."""
    from sbonnx import graph as graphs

    printer = given.printer()
    write_report(given[options.REPORT], report)
    script = given.values.get(options.TRTEXEC)
    if script is not None:
        graphs.write_text(script, f"#!/bin/sh\n{report.engine_command}\n")
    printer.value("quantize", report)
    return _print_report(given, report)


def _print_report(given: Arguments, report: Report) -> int:
    """Print problems, the verdict and facts, all tables if asked for, and return the exit code."""
    printer = given.printer()
    code = printer.problems(report.problems)
    if report.advice is not None:
        printer.advice(report.advice.text, report.advice.command or "")
    show_summary(printer, report, _facts(given, report))
    if given.values.get(options.VERBOSE):
        printer.line("")
        _print_details(given, report)
    for command in _following(given, report):
        printer.line(f"next: {command}")
    return code


def _print_details(given: Arguments, report: Report) -> None:
    """Print all that was measured and not done."""
    printer, counts, metrics = given.printer(), report.counts, report.metrics
    printer.facts(
        f"{report.model} for {report.backend}",
        {
            "nodes": f"{counts.nodes_before} in the file, {counts.nodes_float} simplified and fused, "
            f"{counts.nodes_quantized} with Q/DQ",
            "pruned": pruned_text(report.pruning),
            "quantized": f"{counts.activations} activations, {counts.weights} weights, {counts.biases} biases",
            "calibrated on": _samples(counts.samples),
            **comparison_facts(metrics, calibrated=bool(counts.samples), backend=report.backend),
        },
    )
    show_outputs(printer, "outputs against float", metrics)
    show_evaluation(printer, metrics)
    show_portability(printer, report.portability)
    worst = report.layers[:WORST]
    printer.table(
        "worst layers (SQNR, dB)",
        ("node", "tensor", "type", "isolated", "accumulated"),
        [(row.node, row.tensor, row.label, decibels(row.alone_db), decibels(row.sqnr_db)) for row in worst],
    )
    show_refusals(printer, report.refusals, verbose=True)
    show_search(printer, report.search)
    show_tuning(printer, report.tuning)
    printer.notes(report.notes, every=True)
