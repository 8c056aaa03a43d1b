"""Report of a pruning: what was removed, what it reaches of its goal, and the comparison with the original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx

from sbonnx.backends import Backend
from sbonnx.pruning.graph_pruning import Pruned
from sbonnx.pruning.settings import Pruning
from sbonnx.report import Note, Problem
from sbonnx.report.comparison import NOTICEABLE, SLOWER, Comparison
from sbonnx.report.pruned import BUDGETS, PruningReport

ROUNDING: Final = 1e-9
"""Relative error of shares that are sums of floats."""

NO_SPARSE_KERNELS: Final = (
    "{} has no kernels for sparse weights: the file does not run faster, and its zeros only compress well"
)
"""Note for backends without such kernels."""

UNCOMPARED: Final = Note("not-compared", "no data was given: the file was checked, and not compared with the original")


def report_of(
    model: str,
    output: str | None,
    done: Pruned,
    settings: Pruning,
    comparison: Comparison | None,
    *,
    notes: tuple[Note, ...] = (),
    problems: tuple[Problem, ...] = (),
    pruned: onnx.ModelProto | None = None,
) -> PruningReport:
    """Return the report of a pruned network.

    Args:
        model, output: the float model and the path of the result.
        done, settings: the result and what was asked for.
        comparison: with the original; None: not compared.
        notes, problems: of loading and of the check of the file; those of the goal are added.
        pruned: the model, if it was not written.
    """
    asked, reached = _goal(done, settings)
    return PruningReport(
        model=model,
        output=output,
        macs=done.macs,
        size=done.size,
        latency=done.latency,
        kernel_costs="" if done.latency is None or settings.costs is None else settings.costs.source,
        asked=asked,
        reached=reached,
        dimensions=done.dimensions,
        sparse=done.sparse,
        layers=done.layers,
        refusals=done.refusals,
        tuned=done.tuned,
        metrics=comparison,
        plan=done.plan.channels,
        notes=(*notes, *_notes(done, settings, comparison)),
        problems=(*_missed(done, settings, comparison), *problems),
        pruned=pruned,
    )


def _goal(done: Pruned, settings: Pruning) -> tuple[dict[str, float], dict[str, float]]:
    """Return what was asked for and what was reached, by name."""
    if settings.max_loss is not None and done.loss is not None:
        return {"max_loss": settings.max_loss}, {"max_loss": done.loss}
    reached = None if settings.budget is None else done.of(settings.budget)
    if settings.budget is None or settings.share is None or reached is None:
        return {}, {}
    return {settings.budget: settings.share}, {settings.budget: reached}


def _missed(done: Pruned, settings: Pruning, comparison: Comparison | None) -> Iterator[Problem]:
    """Yield one problem for a budget or loss that was not reached, and for a file that is slower."""
    for name, limit in _goal(done, settings)[0].items():
        reached = _goal(done, settings)[1][name]
        if name == "max_loss" and reached > limit:
            yield Problem(
                "goal-missed",
                f"the loss is {reached:.3g}, and {limit:g} is asked for: even with {done.macs:.3f} of the "
                "multiplications; this network was written",
            )
        elif name != "max_loss" and reached > limit * (1 + ROUNDING):
            yield Problem(
                "goal-missed",
                f"{reached:.3f} of the {BUDGETS[settings.budget or 'macs']} remain, and {limit:g} are asked for: "
                f"the nearest network was written; ask for more, or lower LEAST ({settings.least:g}) or MULTIPLE",
            )
    if settings.latency is not None and comparison is not None and comparison.slower:
        yield Problem(
            "slower",
            f"the file is {SLOWER}: a run takes {comparison.latency_figure()} of its time; its kernels differ from the "
            "table of KERNEL_COSTS (sbonnx tune measures one)",
        )


def _notes(done: Pruned, settings: Pruning, found: Comparison | None) -> Iterator[Note]:
    asked, interval = settings.latency, None if found is None else found.latency_interval
    if done.tuned is not None and done.tuned.note is not None:
        yield done.tuned.note
    if settings.pattern is not None:
        yield from no_gain(settings.backend)
    if found is None:
        yield UNCOMPARED
    elif settings.pattern is not None:
        pass  # the same kernels: a measured difference is noise
    elif settings.latency is None or not found.slower:
        yield from found.notes()
    if asked is not None and found is not None and interval is not None and interval[0] > NOTICEABLE * asked:
        yield Note(
            "latency-above-budget",
            f"a run takes {found.latency_figure()} of the time in float on this machine, {asked:g} by the table",
        )
    if done.unaligned:
        first = done.unaligned[0]
        yield (
            Note(
                "channels-not-in-blocks",
                f"numbers of channels that do not fill whole blocks of the kernels of {settings.backend.name}: "
                f"{len(done.unaligned)} (first: {first.after} of {first.before} of '{first.name}'); the latency falls "
                "less than the multiplications, and MULTIPLE: auto avoids it",
            )
        )


def no_gain(backend: Backend) -> list[Note]:
    """Return a note if a backend runs sparse weights no faster."""
    return [] if backend.placement.skips_zeros else [Note("no-sparse-kernels", NO_SPARSE_KERNELS.format(backend.name))]
