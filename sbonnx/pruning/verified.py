"""Entry point `sbonnx.prune`: load, prune, write and verify a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx import patterns, verify
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.held_out import HeldOutSplit, divide
from sbonnx.graph import Graph
from sbonnx.graph.edit import sort
from sbonnx.graph.storage.output_files import staged
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.options import RunOptions
from sbonnx.progress import Progress, Silent
from sbonnx.pruning.prune import Pruned, Pruning, prune_graph
from sbonnx.report import Refusal

HELD_OUT: Final = 0.1
"""Share of the samples on which the file is verified, and which pruning does not see."""

SAME: Final = 1e-4
"""Difference of the removed from the masked network, relative to the largest output, that sums of other length make.

It is 1e-6 on trained networks; a wrong slice makes 1e-2 and more.
"""

PROVED_ON: Final = 4
"""Feeds on which removed and masked network are compared."""

SLOWER: Final = (
    "the pruned file is slower than the original ({:.2f}): kernels compute whole blocks of channels; prune with a "
    "multiple of 8 or 16 channels (--multiple)"
)
"""Note if the measured latency is higher."""

UNCOMPARED: Final = "no data was given: the file was checked, and not compared with the original"


@dataclass(frozen=True)
class PruningReport:
    """Outcome of `prune`.

    Attributes:
        model, output: the float model and the path of the result.
        macs, weights: remaining share of the multiplications and of the stored values.
        dimensions: one row per dimension: layers that write and read it, groups before and after, error alone.
        layers: one row per refitted layer: columns, strength, error on hold-out samples without and with the refit.
        refusals: pinned channels and layers that were not refitted, with the reason.
        metrics: comparison with the original, see `sbonnx.verify`; empty without data.
        plan: removed channels, see `PruningPlan.to_dict`.
        notes: changes and findings of loading and verification.
        problems: reasons why the result is unusable or below a limit.
        pruned: the model itself if no output path was given (left out of `to_dict`).
    """

    model: str
    output: str | None
    macs: float
    weights: float
    dimensions: tuple[dict[str, Any], ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    refusals: tuple[Refusal, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    pruned: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``; problems come first."""
        return {"ok": self.ok, "problems": self.problems, **asdict(replace(self, pruned=None))}


def load_for_pruning(model: str | os.PathLike[str] | onnx.ModelProto) -> Graph:
    """Load a float model, simplify and fuse it.

    Raises:
        ModelError: the file cannot be used.
    """
    graph = graphs.load(model)
    for stage in (patterns.SIMPLIFY, patterns.FUSE):
        patterns.apply(graph, stage)
    sort(graph)
    return graph


def prune(  # noqa: PLR0913 - public entry point
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any = None,
    *,
    macs: float | None = None,
    weights: float | None = None,
    ratio: float | None = None,
    strategy: str = "auto",
    multiple: int = 1,
    least: float = 0.1,
    refit: bool = True,
    masked: bool = False,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    min_sqnr_db: float | None = None,
    split: int | None = None,
    limit: int | None = None,
    device: str = "cpu",
    memory: int | str = "2 GiB",
    threads: int | None = None,
    progress: Progress | None = None,
) -> PruningReport:
    """Remove channels from a float ONNX model, refit the remaining weights, and verify the result.

    Args:
        model: path or ModelProto. It is never modified.
        data: calibration data: path or any reader that `sbonnx.calib.data.dataset.read` accepts. None: only with
            `ratio`, by norms of the weights and without refit.
        macs, weights, ratio: the goal, one of them: share of the multiplications or of the stored values that may
            remain, or share of the channels to remove from each dimension.
        strategy: order of removal, a name in `sbonnx.pruning.criteria.CRITERIA`; "auto": obs with data, else l1norm.
        multiple: remaining channels are a multiple of this, or all of them (docs/pruning.md has advice).
        least: share of each dimension that always remains.
        refit: fit the remaining weights on inputs from the pruned network.
        masked: write the masked model: shapes unchanged, weights that read removed channels zero.
        output, force: path of the result, and whether to overwrite a file; None keeps it in memory
            (`PruningReport.pruned`).
        min_sqnr_db: lower SQNR of an output is a problem, decibel.
        split, limit: cut arrays with a long leading axis into batches of `split` samples; use `limit` feeds at most.
        device, memory, threads, progress: see `RunOptions`.

    Returns:
        The report. ``report.ok`` is False if the result is below a limit or fails verification.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    settings = Pruning(strategy, macs, weights, ratio, multiple, least, refit)
    target = None if output is None else Path(output)
    if target is not None:
        inputs = [Path(one) for one in (model, data) if isinstance(one, (str, os.PathLike))]
        graphs.check_target(target, inputs=inputs, force=force)
    graph = load_for_pruning(model)
    options = RunOptions(device, threads, memory, progress=progress or Silent())
    feeds = None if data is None else datasets.read(data, graph, split=split, limit=limit)
    parts = None if feeds is None else divide(feeds, graph, HELD_OUT, device=device)
    done = prune_graph(graph, None if parts is None else parts.fit, settings, options)
    chosen = done.masked if masked else done.graph
    name = str(model) if isinstance(model, (str, os.PathLike)) else "a model in memory"
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else Path(model)
    with ExitStack() as stack:
        if target is None:
            path = Path(stack.enter_context(temporary_folder())) / "pruned.onnx"
        else:
            path = stack.enter_context(staged(target, graph.info.files, force=force))
        graphs.save(chosen, path)
        metrics, problems = _verified(source, path, done, parts, options, min_sqnr_db)
        proto = graphs.read_proto(path) if target is None else None
    return PruningReport(
        model=name,
        output=None if target is None else str(target),
        macs=done.macs,
        weights=done.weights,
        dimensions=tuple(asdict(row) for row in done.dimensions),
        layers=tuple(asdict(row) for row in done.layers),
        refusals=done.refusals,
        metrics=metrics,
        plan=done.plan.to_dict(),
        notes=(*graph.info.notes, *_notes(metrics)),
        problems=tuple(problems),
        pruned=proto,
    )


def _notes(metrics: dict[str, Any]) -> list[str]:
    if not metrics:
        return [UNCOMPARED]
    ratio = metrics.get("latency_ratio")
    return [SLOWER.format(ratio)] if ratio is not None and ratio > 1 else []


def _verified(
    source: Path | bytes,
    path: Path,
    done: Pruned,
    parts: HeldOutSplit | None,
    options: RunOptions,
    min_sqnr_db: float | None,
) -> tuple[dict[str, Any], list[str]]:
    """Check the file, compare it with the original, and compare removed with masked channels."""
    graphs.check_file(path)
    if parts is None:
        return {}, []
    depth = verify.Depth(latency=True, levels=True, strict=True)
    found = verify.compare(source, path, parts.judged, seen=parts.seen, device=options.device, depth=depth)
    problems = [
        f"output '{error.name}' has {error.sqnr_db:.1f} dB signal to error, and {min_sqnr_db:g} are asked for"
        for error in found.outputs
        if min_sqnr_db is not None and error.sqnr_db < min_sqnr_db
    ]
    problems += [
        f"output '{error.name}' holds {error.not_finite} values that are not finite, or has another shape"
        for error in found.outputs
        if error.not_finite or error.mismatched
    ]
    worst = _removal_error(done, parts.judged)
    if worst > SAME:
        problems.append(
            f"removing channels differs from masking them by {worst:.1e} of the largest output: the file computes "
            "something else than was fitted; please report this model"
        )
    return {**found.to_dict(), "held_out": parts.count}, problems


def _removal_error(done: Pruned, data: Dataset) -> float:
    """Return the largest difference of the removed from the masked network, relative to the largest output."""
    names = [tensor.name for tensor in done.graph.outputs]
    worst = 0.0
    with ExitStack() as stack:
        runs = [
            stack.enter_context(LayerRunner(each, threads=1, optimisation="off", name="the pruned model"))
            for each in (done.masked, done.graph)
        ]
        for where, feed in islice(data.items(), PROVED_ON):
            want, got = (_copied(run.run(feed, names, where=where), names) for run in runs)
            for left, right in zip(want, got, strict=True):
                if left.dtype.kind != "f":
                    continue
                if left.shape != right.shape:
                    return float("inf")
                if left.size:
                    largest = float(np.abs(left).max()) or 1.0
                    worst = max(worst, float(np.abs(left - right).max()) / largest)
    return worst


def _copied(found: dict[str, Any], names: Sequence[str]) -> list[Any]:
    return [np.array(found[name]) for name in names]
