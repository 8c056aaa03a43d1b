"""``sbonnx lint``: check a Q/DQ model of any tool against the rules of a runtime."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, required_output
from sbonnx.errors import OutputError, RecipeError
from sbonnx.present.text.printer import Printer, to_json
from sbonnx.system.terminal import BELOW_QUALITY, DONE

if TYPE_CHECKING:
    from sbonnx.lint import Finding, Severity
    from sbonnx.lint.engine_layers import EngineReport
    from sbonnx.lint.fix import Fixed

HELP: Final = (
    "Check a Q/DQ model against the rules of a runtime. --fix repairs what needs no data; exit code 1 on errors."
)

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")

MOST_REFORMATS: Final = 8
"""Reformats in the table; the JSON has all of them."""

UNQUANTIZED: Final = (
    "the model has no Q/DQ pairs and no integer operators: there is nothing to check; quantize it first"
)

MODEL: Final = options.argument("model", "MODEL", "The ONNX model with Q/DQ, made by any tool.")
TARGET: Final = options.option(
    "--target tensorrt@11|tensorrt@10|tensorrt@8.6|onnxruntime|openvino|qnn",
    str,
    "The runtime whose rules are checked.",
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
    from sbonnx import graph as graphs
    from sbonnx.lint import TARGETS, ci_formats, lint, rules_for
    from sbonnx.lint.findings import sarif as to_sarif
    from sbonnx.lint.fix import fix as fix_model
    from sbonnx.lint.fix import fixes_for
    from sbonnx.lint.report import FixedFile, LintReport, SeverityCounts
    from sbonnx.recipe.names import full_backend
    from sbonnx.report.codes import Note

    model, target, output = given[MODEL], given[TARGET], given[OUTPUT]
    sarif, fix, force = given[SARIF], given[FIX], given[options.FORCE]
    if target is None:
        raise RecipeError(f"--target is missing: name the runtime, one of {', '.join(TARGETS)}")
    if output is not None and not fix:
        raise OutputError("-o names the model that --fix writes: add --fix")
    target = full_backend(target)
    cpu = given.file_cpu(target)
    if fix and target in TARGETS and not fixes_for(target):
        raise RecipeError(f"--fix: nothing is fixed for {target}: quantize the model again, with --requantize and data")
    if given[ENGINE_PROFILE] is not None and given[ENGINE_LAYERS] is None:
        raise RecipeError("--engine-profile has the times of layers: add --engine-layers")
    if given[ENGINE_LAYERS] is not None and not target.startswith("tensorrt"):
        raise RecipeError(f"--engine-layers is about a TensorRT engine, and --target is {target}")
    form = _form(given)
    printer = Printer(as_json=form == "json", quiet=given[options.QUIET] or form != "text")
    rules = rules_for(target)
    if sarif is not None:
        graphs.check_target(sarif, inputs=[model, *([output] if output else [])], force=force)
    checked = model
    rows: tuple[Fixed, ...] = ()
    if fix:
        checked = required_output(output)
        graphs.check_target(checked, inputs=[model], force=force, model=True)
        done = fix_model(model, target, cpu=cpu)
        graphs.save(done.graph, checked, force=force)
        rows = done.rows
    findings = sorted(lint(checked, target, cpu=cpu), key=lambda finding: SEVERITIES.index(finding.severity))
    engine = _engine(given, checked)
    notes = [] if _is_quantized(checked) else [Note("nothing-to-check", UNQUANTIZED)]
    if sarif is not None:
        graphs.write_text(sarif, to_json(to_sarif(findings, rules, checked)) + "\n")
    counts = Counter(finding.severity for finding in findings)
    report = LintReport(
        model=str(model),
        target=target,
        rules=len(rules),
        counts=SeverityCounts(**{severity: counts[severity] for severity in SEVERITIES}),
        findings=tuple(findings),
        notes=tuple(notes),
        engine=engine,
        fix=FixedFile(str(output), rows) if fix else None,
    )
    printer.value("lint", report)
    if form == "github":
        text = ci_formats.github(findings, checked)
    elif form == "junit":
        text = ci_formats.junit(findings, rules, checked, target)
    else:
        text = to_json(to_sarif(findings, rules, checked)) if form == "sarif" else ""
    if text:
        Printer().text(text)
    _fix_tables(printer, rows)
    _tables(printer, findings, verbose=given[options.VERBOSE])
    if engine is not None:
        _engine_tables(printer, engine)
    summary = ", ".join(_counted(counts[severity], severity) for severity in SEVERITIES)
    printer.notes(notes)
    printer.line(f"{checked} for {target}: {len(rules)} rules, {summary}")
    for path in filter(None, (output, sarif)):
        printer.line(f"written: {path}")
    return BELOW_QUALITY if counts["error"] else DONE


def _is_quantized(model: Path) -> bool:
    """Whether a file has quantized operators of any form."""
    from sbonnx import graph as graphs
    from sbonnx.graph import query

    return any(
        "quant" in node.op.lower() or "Integer" in node.op or "NBits" in node.op or node.op.startswith("QLinear")
        for node in query.all_nodes(graphs.load(model, opset=1))
    )


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


def _engine(given: Arguments, model: Path) -> EngineReport | None:
    """Join the layers of the engine with the model; None if they were not given."""
    from sbonnx import graph as graphs
    from sbonnx.lint.engine_layers import engine_report

    layers = given[ENGINE_LAYERS]
    return None if layers is None else engine_report(graphs.load(model), layers, given[ENGINE_PROFILE])


def _engine_tables(printer: Printer, engine: EngineReport) -> None:
    """Show the operators that the engine runs in float, the slowest reformats, and a line with the counts."""
    others = [row for row in engine.planned if row.runs_in != "integers"]
    printer.table(
        "planned in integers, and not run so by the engine",
        ("node", "op", "runs in", "types", "ms"),
        [(row.node, row.op, row.runs_in, row.types, row.ms) for row in others],
    )
    printer.table(
        "reformats of the engine",
        ("layer", "ms"),
        [(layer.name, layer.ms) for layer in engine.reformats[:MOST_REFORMATS]],
    )
    took = "" if engine.ms is None else f", {engine.reformat_ms:.3g} of {engine.ms:.3g} ms"
    printer.line(
        f"engine: {len(engine.planned) - len(others)} of {len(engine.planned)} planned operators in integers; "
        f"{len(engine.reformats)} reformats{took}"
    )


def _fix_tables(printer: Printer, rows: tuple[Fixed, ...]) -> None:
    """Show applied fixes, one row per rule with the first node (the JSON has all), and failed ones, one per reason."""
    done = [row for row in rows if row.done]
    first = {row.rule: row for row in reversed(done)}
    printer.table(
        f"fixed: {len(done)}",
        ("rule", "times", "with equal values", "first at", "change"),
        [
            (rule, count, sum(row.exact for row in done if row.rule == rule), first[rule].node, first[rule].what)
            for rule, count in Counter(row.rule for row in done).items()
        ],
    )
    failed = [row for row in rows if not row.done]
    places = {(row.rule, row.what): row.node for row in reversed(failed)}
    printer.table(
        "not fixed",
        ("rule", "times", "first at", "why"),
        [
            (*key[:1], count, places[key], key[1])
            for key, count in Counter((row.rule, row.what) for row in failed).items()
        ],
    )


def _tables(printer: Printer, findings: list[Finding], *, verbose: bool) -> None:
    """Show a table per severity, the most severe first: each rule with its first finding, or all if `verbose`."""
    for severity in SEVERITIES:
        some = [finding for finding in findings if finding.severity == severity]
        kinds: dict[object, list[Finding]] = {}
        for number, finding in enumerate(some):
            kinds.setdefault(number if verbose else finding.rule, []).append(finding)
        several = len(kinds) < len(some)
        rows = [
            (*((len(alike),) if several else ()), one.rule, one.node or None, one.tensor or None, one.why, one.mend)
            for alike in kinds.values()
            for one in alike[:1]
        ]
        titles = ("times", "rule", "first node", "first tensor", "why", "fix")
        plain = ("rule", "node", "tensor", "why", "fix")
        printer.table(_counted(len(some), severity), titles if several else plain, rows)


def _counted(count: int, severity: Severity) -> str:
    """``1 error``, ``2 warnings``, ``3 info``."""
    return f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}"
