"""``sbonnx lint``: check a Q/DQ model of any tool against the rules of a runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import RecipeError
from sbonnx.present.text.printer import Printer
from sbonnx.system.terminal import BELOW_QUALITY, DONE, to_json

if TYPE_CHECKING:
    from sbonnx.linting.report import LintReport

HELP: Final = (
    "Check a Q/DQ model against the rules of a runtime. --fix repairs what needs no data; exit code 1 on errors."
)

MODEL: Final = options.argument("model", "MODEL", "The ONNX model with Q/DQ, made by any tool.")
TARGET: Final = options.option(
    "--target tensorrt@11|tensorrt@10|tensorrt@8.6|onnxruntime|openvino|qnn|web",
    str,
    "The runtime whose rules are checked.",
    shown="that of the file's metadata",
)
SARIF: Final = options.output_option("--sarif FILE", "Write the findings as SARIF 2.1.0, for CI.")
FORMATS: Final = ("text", "json", "github", "junit", "sarif")
OUTPUT_FORMAT: Final = options.option(
    f"--output-format {'|'.join(FORMATS)}",
    str,
    "Form of the findings on stdout: tables, JSON, annotations of GitHub Actions, JUnit XML or SARIF 2.1.0.",
    shown="text",
)
FIX: Final = options.switch("--fix", "Fix what needs no data, write the model to -o, and check that file instead.")
OUTPUT: Final = replace(options.OUTPUT, help="The fixed model to write.")

ENGINE_LAYERS: Final = options.option(
    "--engine-layers FILE",
    Path,
    "Layers of the engine (trtexec --exportLayerInfo): show which quantized operators it runs in integers.",
)
ENGINE_PROFILE: Final = options.option(
    "--engine-profile FILE", Path, "With --engine-layers: times of the layers (trtexec --exportProfile)."
)

OPTIONS: Final = (
    MODEL,
    TARGET,
    options.FILE_CPU,
    OUTPUT_FORMAT,
    SARIF,
    FIX,
    OUTPUT,
    ENGINE_LAYERS,
    ENGINE_PROFILE,
    options.VERBOSE,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    from sbonnx.api.rule_check import lint
    from sbonnx.present.text.lint import show_lint

    form = _form(given)
    report = given.call(lint)
    printer = Printer(as_json=form == "json", quiet=given[options.QUIET] or form != "text")
    printer.value("lint", report)
    text = _in_form(form, report)
    if text:
        Printer().text(text)
    show_lint(printer, report, verbose=given[options.VERBOSE])
    for path in filter(None, (given[OUTPUT], given[SARIF])):
        printer.line(f"written: {path}")
    return BELOW_QUALITY if report.counts.error else DONE


def _in_form(form: str, report: LintReport) -> str:
    """Return the findings in a form of CI services; "" for tables and JSON."""
    from sbonnx.linting import ci_formats, rules_for
    from sbonnx.linting.findings import sarif

    rules = rules_for(report.target)
    if form == "github":
        return ci_formats.github(report.findings, report.checked)
    if form == "junit":
        return ci_formats.junit(report.findings, rules, report.checked, report.target)
    return to_json(sarif(report.findings, rules, report.checked)) if form == "sarif" else ""


def _form(given: Arguments) -> str:
    """Return the form of the output.

    Raises:
        RecipeError: an unknown form, or ``--json`` beside another one.
    """
    form = given[OUTPUT_FORMAT]
    if form is not None and form not in FORMATS:
        raise RecipeError(f"--output-format '{form}' is not known: choose one of {', '.join(FORMATS)}")
    if given[options.JSON] and form not in (None, "json"):
        raise RecipeError(f"--json and --output-format {form} are two forms: drop one")
    return "json" if given[options.JSON] else form or "text"
