"""``sbonnx prune``: remove channels from a float model, refit the remaining weights, and verify the result."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.create.quantize import check_report, write_report
from sbonnx.cli.evaluation_options import evaluation_of
from sbonnx.cli.options import Arguments, required_output
from sbonnx.present.text.tables import comparison_facts, remaining, show_evaluation, show_outputs, show_refusals
from sbonnx.recipe.sections import flags

if TYPE_CHECKING:
    from sbonnx.pruning.sparsity.choice import SparseChoice
    from sbonnx.recipe import Recipe
    from sbonnx.report.pruned import PruningReport

HELP: Final = "Remove channels or weights from a float model. The others are refitted, and trained on request."

WORST: Final = 8
"""Dimensions in the table, those that cost most first; the JSON has all of them."""

OUTPUT: Final = replace(options.OUTPUT, help="The pruned model to write.")


MACS: Final = options.key_option("SPARSE.BUDGET.MACS", float)
SIZE: Final = options.key_option("SPARSE.BUDGET.SIZE", float)
LATENCY: Final = options.key_option("SPARSE.BUDGET.LATENCY", float)
MAX_LOSS: Final = options.key_option("SPARSE.MAX_LOSS", str)
RATIO: Final = options.key_option("SPARSE.RATIO", float)
SPARSITY: Final = options.key_option("SPARSE.SPARSITY", float)
PATTERN: Final = options.key_option("SPARSE.TYPE", str)
STRATEGY: Final = options.key_option("SPARSE.STRATEGY", str)
MULTIPLE: Final = options.key_option("SPARSE.MULTIPLE", str)
ROUNDS: Final = options.key_option("SPARSE.ROUNDS", int)
LEAST: Final = options.key_option("SPARSE.LEAST", float)
NO_REFIT: Final = options.key_switch("SPARSE.REFIT", convert=lambda _: "none")
BACKEND: Final = replace(options.BACKEND, key="BACKEND")
FINETUNE: Final = options.key_option("SPARSE.FINETUNE.EPOCHS", int)
RATE: Final = options.key_option("SPARSE.FINETUNE.LR", float)
AUGMENT: Final = options.key_option("SPARSE.FINETUNE.AUGMENT", str)
RECIPE: Final = replace(options.RECIPE, help="A recipe, YAML, whose section SPARSE is read; options win.")
MASKED: Final = options.switch(
    "--masked", "Write zero weights instead of removing channels: shapes unchanged.", flags.GOAL
)
PLAN: Final = options.switch("--plan", "List dimensions and pinned layers with reasons, and write nothing.", flags.GOAL)

OPTIONS: Final = (
    options.MODEL,
    options.DATA,
    OUTPUT,
    RECIPE,
    BACKEND,
    MACS,
    SIZE,
    LATENCY,
    MAX_LOSS,
    RATIO,
    SPARSITY,
    PATTERN,
    STRATEGY,
    MULTIPLE,
    ROUNDS,
    LEAST,
    NO_REFIT,
    FINETUNE,
    RATE,
    AUGMENT,
    MASKED,
    options.SET,
    PLAN,
    *options.FEEDS,
    options.MEMORY,
    options.MIN_SQNR,
    options.TASK,
    *options.EVALUATING,
    options.REPORT,
    options.FORCE,
    options.VERBOSE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx.api.create import prune
    from sbonnx.backends import BACKENDS
    from sbonnx.pruning.result import no_gain

    if given[PLAN]:
        return _show_dimensions(given)
    model, output, force = given[options.MODEL], required_output(given[OUTPUT]), given[options.FORCE]
    check_report(given[options.REPORT], [model, output], force=force)
    recipe = _recipe(given)
    told = no_gain(BACKENDS[recipe.backend]) if recipe.sparse.pattern is not None else []
    for note in told:
        given.printer().note(note)
    evaluation = evaluation_of(given)
    report = given.call(prune, recipe=recipe, metric=None, evaluation=evaluation)
    write_report(given[options.REPORT], report, "prune")
    return _show_report(given, report, told)


def _recipe(given: Arguments) -> Recipe:
    """Load the recipe with the values of the options."""
    from sbonnx import recipe as recipes

    return recipes.load(given[RECIPE], overrides=given.overrides())


def _show_report(given: Arguments, report: PruningReport, told: Iterable[str] = ()) -> int:
    """Print the report, without the notes that were told before."""
    printer = given.printer()
    code = printer.problems(report.problems)
    printer.value("prune", report)
    asked = report.asked.items()
    printer.facts(
        report.model,
        {
            **{f"asked: {name}": f"{limit:g}, reached {report.reached[name]:.4g}" for name, limit in asked},
            **remaining(report),
            **comparison_facts(report.metrics),
        },
    )
    tuned = report.tuned
    if tuned is not None:
        error = f"{tuned.before:.4f} to {tuned.after:.4f} on hold-out samples"
        printer.line(f"fine-tuned for {tuned.epochs} epochs: error of the outputs {error}")
    show_outputs(printer, "outputs against the original", report.metrics)
    show_evaluation(printer, report.metrics)
    if report.sparse:
        printer.table(
            "sparse weights",
            ("layer", "pattern", "weights", "zeros", "TensorRT"),
            [(row.layer, row.pattern, row.values, row.zeros, row.tensorrt) for row in report.sparse],
        )
    rows = sorted(report.dimensions, key=lambda row: -(row.error or 0.0))[:WORST]
    printer.table(
        "dimensions (error of the outputs if pruned alone)",
        ("written by", "read by", "before", "after", "error"),
        [(_few(row.writers), _few(row.readers), row.before, row.after, row.error) for row in rows],
    )
    show_refusals(printer, report.refusals, verbose=given[options.VERBOSE])
    printer.notes((note for note in report.notes if note not in told), every=given[options.VERBOSE])
    printer.line(f"written: {report.output}")
    printer.verdict(report.verdict, _following(given, report))
    return code


def _following(given: Arguments, report: PruningReport) -> list[str]:
    """Return the command to run next: the quantization of a pruned network that is good enough."""
    if not report.verdict.ok or report.output is None or given[options.DATA] is None:
        return []
    output = Path(report.output)
    target = output.with_name(f"{output.stem}.int8{output.suffix}")
    command = given.other_command("quantize", (options.DATA, *options.FEEDS), [output])
    return [f"{command} {shlex.join(['-o', str(target)])}"]


def _show_dimensions(given: Arguments) -> int:
    """List what can be removed together, and what never is."""
    from sbonnx.pipeline import prepare_pruning
    from sbonnx.pruning.groups.dimensions import PrunableDimensions, dependencies
    from sbonnx.pruning.settings import pruning_of
    from sbonnx.pruning.sparsity.choice import choose_sparse

    printer = given.printer()
    prepared = prepare_pruning(given[options.MODEL], _recipe(given)).prepared
    graph, recipe = prepared.graph, prepared.recipe
    traced = dependencies(graph)
    if recipe.sparse.pattern is not None:
        return _show_sparse(given, choose_sparse(traced, recipe.sparse.pattern, pruning_of(recipe, graph).layers))
    pinned = tuple(traced.pinned())
    printer.value("prune-dimensions", PrunableDimensions(str(given[options.MODEL]), tuple(traced.dimensions), pinned))
    printer.table(
        "dimensions: any group of channels can be removed in place of another",
        ("written by", "read by", "groups"),
        [(_few(row.writers), _few(row.readers), row.groups) for row in traced.dimensions],
    )
    show_refusals(printer, pinned)
    return printer.problems([])


def _show_sparse(given: Arguments, chosen: Sequence[SparseChoice]) -> int:
    """List the layers that become sparse, and why others stay dense."""
    from sbonnx.pruning.sparsity.choice import SparseLayers

    printer = given.printer()
    rows = tuple(choice.plan for choice in chosen)
    printer.value("prune-sparse", SparseLayers(str(given[options.MODEL]), rows))
    printer.table(
        "weights that become sparse",
        ("layer", "pattern", "weights", "TensorRT, or why it stays dense"),
        [(row.layer, row.pattern or "-", row.values, row.why or row.tensorrt) for row in rows],
    )
    return printer.problems([])


def _few(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:2]) + (f" and {len(every) - 2} more" if len(every) > 2 else "") or "-"
