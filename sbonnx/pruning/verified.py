"""Entry point `sbonnx.prune`: load, prune, write and verify a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx import patterns, verify
from sbonnx import recipe as recipes
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.held_out import HeldOutSplit, divide
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.edit import sort
from sbonnx.graph.query import tensors_by_name
from sbonnx.graph.storage.output_files import staged
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.html_report import pruning_card, render_card
from sbonnx.input_files import protecting
from sbonnx.metrics import Metric
from sbonnx.options import RunOptions
from sbonnx.plan.node_infos import node_infos
from sbonnx.progress import Progress, Silent, shown_by_default
from sbonnx.pruning.budgets.budget import Budget
from sbonnx.pruning.prune import Pruned, measure_graph, prune_graph
from sbonnx.pruning.settings import Pruning, pruning_of
from sbonnx.python_files import input_paths
from sbonnx.recipe import Recipe, names
from sbonnx.report import Refusal
from sbonnx.report.verdict import Verdict, verdict_of
from sbonnx.verify import EvaluationData
from sbonnx.verify.comparison import NOTICEABLE, SLOWER, Comparison

HELD_OUT: Final = 0.1
"""Share of the samples on which the file is verified, and which pruning does not see."""

SAME: Final = 1e-4
"""Difference of the removed from the masked network, relative to the largest output, that sums of other length make.

It is 1e-6 on trained networks; a wrong slice makes 1e-2 and more.
"""

PROVED_ON: Final = 4
"""Feeds on which removed and masked network are compared."""

HELD_OUT_FOR_LOSS: Final = 0.25
"""Share of the samples with MAX_LOSS, on which trial networks are evaluated as well."""

BUDGET_TEXT: Final[dict[Budget, str]] = {
    "macs": "multiplications",
    "size": "bytes of constants",
    "latency": "estimated time",
}

ROUNDING: Final = 1e-9
"""Relative error of shares that are sums of floats."""

NO_SPARSE_KERNELS: Final = (
    "{} has no kernels for sparse weights: the file does not run faster, and its zeros only compress well"
)
"""Note for backends other than TensorRT."""

UNCOMPARED: Final = "no data was given: the file was checked, and not compared with the original"


@dataclass(frozen=True)
class PruningReport:
    """Outcome of `prune`.

    Attributes:
        model, output: the float model and the path of the result.
        macs, size: remaining share of the multiplications, and of the bytes of all constants.
        latency: remaining share of the time of a sample in float by the table of kernel costs; None without a table.
            `metrics` has the measured one, ``latency_ratio``.
        asked, reached: the budget or MAX_LOSS, by its name, and what the file has; empty with a ratio.
        dimensions: one row per dimension: layers that write and read it, groups before and after, error alone.
        sparse: one row per layer whose weight became sparse: pattern, values, zeros, and what TensorRT does with it.
        layers: one row per refitted layer: columns, strength, error on hold-out samples without and with the refit.
        refusals: pinned channels and layers that were not refitted, with the reason.
        tuned: outcome of fine-tuning, see `FineTuneRow`; None without.
        metrics: comparison with the original, see `sbonnx.verify`; empty without data.
        plan: removed channels, see `PruningPlan.to_dict`.
        notes: changes and findings of loading and verification.
        problems: reasons why the result is unusable or below a limit.
        pruned: the model itself if no output path was given (left out of `to_dict`).
    """

    model: str
    output: str | None
    macs: float
    size: float
    latency: float | None = None
    asked: dict[str, float] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)
    dimensions: tuple[dict[str, Any], ...] = ()
    sparse: tuple[dict[str, Any], ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    refusals: tuple[Refusal, ...] = ()
    tuned: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    pruned: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def verdict(self) -> Verdict:
        """Accuracy, speed and size against the original in one sentence."""
        return verdict_of(self.metrics, problems=self.problems)

    def _repr_html_(self) -> str:
        """Return the summary that notebooks show."""
        return render_card(pruning_card(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``; problems and the verdict come first."""
        verdict = {"accuracy": self.verdict.accuracy, "text": self.verdict.text}
        plain = asdict(replace(self, pruned=None))
        del plain["pruned"]
        return {"ok": self.ok, "problems": self.problems, "verdict": verdict, **plain}


def load_for_pruning(
    model: str | os.PathLike[str] | onnx.ModelProto, recipe: Recipe | None = None
) -> tuple[Graph, Recipe]:
    """Load a float model, simplify and fuse it, and resolve the patterns of a recipe.

    Raises:
        ModelError: the file cannot be used.
        RecipeError: a pattern matches nothing.
    """
    graph = graphs.load(model)
    resolved, _ = (recipe or recipes.load()).for_model(node_infos(graph), list(tensors_by_name(graph)))
    simplify(graph, resolved)
    return graph, resolved


def simplify(graph: Graph, recipe: Recipe) -> None:
    """Simplify and fuse, in place. Batch norms stay if SPARSE.FUSE_BN is false."""
    patterns.apply(graph, patterns.SIMPLIFY)
    folds = recipe.sparse.fuse_bn
    patterns.apply(graph, [each for each in patterns.FUSE if folds or not each.name.startswith("fuse_bn")])
    sort(graph)


def fuse(found: Pruned) -> None:
    """Fuse what `simplify` left, in place, in the pruned and in the masked graph."""
    for graph in (found.graph, found.masked):
        patterns.apply(graph, patterns.FUSE)
        sort(graph)


@shown_by_default
def prune(  # noqa: PLR0913 - public entry point
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any = None,
    *,
    recipe: Any = None,
    masked: bool = False,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    split: int | None = None,
    metric: Metric | None = None,
    evaluation: EvaluationData | None = None,
    quantized: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> PruningReport:
    """Remove channels from a float ONNX model, refit the remaining weights, and verify the result.

    Args:
        model: path or ModelProto. It is never modified.
        data: calibration data: path or any reader that `sbonnx.calib.data.dataset.read` accepts, or a `HeldOutSplit`.
            None: only with `ratio`, by norms of the weights and without refit.
        recipe: path, nested dict or `Recipe`, of which the section SPARSE is read, and DEVICE, SAMPLES, CALIBRATION
            and VERIFY.MIN_SQNR_DB. None: no file.
        masked: write the masked model: shapes unchanged, weights that read removed channels zero.
        output, force: path of the result, and whether to overwrite a file; None keeps it in memory
            (`PruningReport.pruned`).
        split: cut arrays with a long leading axis into batches of this many samples.
        metric: maps the (pruned, float) outputs of one feed, by name, to a loss, which ``max_loss`` then limits.
        evaluation: labelled data and a metric, which is computed for the original and the pruned model, see
            ``report.metrics["evaluation"]``; ``max_loss`` then limits the loss in it.
        quantized: the pruned model will be quantized, so that MULTIPLE: auto is for kernels in integers.
        progress: receiver of progress updates; None: a bar in notebooks and on terminals. `sbonnx.Silent()` shows none.
        settings: recipe keys by keyword. A goal is needed, here or in the recipe: `macs`, `size` or `latency` (share of
            the multiplications, of the bytes of all constants, or of the estimated time that may remain), `max_loss`
            (loss on hold-out samples up to which multiplications are removed), `ratio` (share of the channels to
            remove from each dimension), `sparsity` (share of the weights of each layer that become zero) or `pattern`
            (of zeros, "2:4"). Others are `strategy`, `multiple`, `rounds`, `least`, `loss`, `refit`,
            `specific`, `finetune` (epochs), `lr` and `augment` (SPARSE in docs/recipe.md), `backend`, `min_sqnr`,
            `samples`, `device`, `memory` and `threads`.

    Returns:
        The report. ``report.ok`` is False if the result misses the budget or another limit (the nearest network is
        written then), is slower than the original with a `latency` budget, or fails verification.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    overrides = {names.PRUNING_FORMS.get(name, name): value for name, value in settings.items()}
    wishes = recipes.load(recipe, overrides=overrides)
    target = None if output is None else Path(output)
    if target is not None:
        inputs = input_paths([model, data], [recipe])
        with protecting([*inputs, *([] if evaluation is None else evaluation.inputs())]):
            graphs.check_target(target, (), force=force, model=True)
    graph, wishes = load_for_pruning(model, wishes)
    options = _options_of(wishes, progress)
    limits = verify.Limits(min_sqnr_db=wishes.verify.min_sqnr_db)
    limits.check_outputs([tensor.name for tensor in graph.outputs])
    if metric is not None and evaluation is not None:
        raise RecipeError("max_loss is of one metric: give metric, or evaluation")
    if evaluation is not None and data is None:
        raise RecipeError("an evaluation is part of the verification: give calibration data")
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else Path(model)
    chosen_by = pruning_of(wishes, graph, integers=quantized, metric=metric)
    if evaluation is not None:
        verify.check_labels(source, evaluation, device=wishes.device)
        if chosen_by.max_loss is not None:
            labelled = verify.LabelledLoss(source, evaluation, device=wishes.device)
            chosen_by = replace(chosen_by, labelled=labelled)
    share = HELD_OUT if chosen_by.max_loss is None else HELD_OUT_FOR_LOSS
    parts = data if data is None or isinstance(data, HeldOutSplit) else _divided(data, graph, wishes, split, share)
    fit, judged = (None, None) if parts is None else (parts.fit, parts.judged)
    done = prune_graph(graph, fit, chosen_by, options, judged)
    fuse(done)
    chosen = done.masked if masked else done.graph
    name = str(model) if isinstance(model, (str, os.PathLike)) else "a model in memory"
    with ExitStack() as stack:
        if target is None:
            path = Path(stack.enter_context(temporary_folder())) / "pruned.onnx"
        else:
            path = stack.enter_context(staged(target, graph.info.files, force=force))
        graphs.save(chosen, path)
        found, problems = _verified(source, path, done, parts, options, limits)
        if found is not None and evaluation is not None:
            models = {"float": source, "pruned": path}
            found = replace(found, evaluation=verify.evaluate(models, evaluation, device=wishes.device))
        proto = graphs.read_proto(path) if target is None else None
    asked, reached = _goal(done, chosen_by)
    metrics = {} if found is None else found.to_dict()
    return PruningReport(
        model=name,
        output=None if target is None else str(target),
        macs=done.macs,
        size=done.size,
        latency=done.latency,
        asked=asked,
        reached=reached,
        dimensions=tuple(asdict(row) for row in done.dimensions),
        sparse=tuple(asdict(row) for row in done.sparse),
        layers=tuple(asdict(row) for row in done.layers),
        refusals=done.refusals,
        tuned=None if done.tuned is None else asdict(done.tuned),
        metrics=metrics,
        plan=done.plan.to_dict(),
        notes=(*graph.info.notes, *_notes(done, chosen_by, found)),
        problems=(*_missed(done, chosen_by, found), *problems),
        pruned=proto,
    )


def measure(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: HeldOutSplit,
    recipe: Recipe,
    *,
    quantized: bool = False,
    progress: Progress | None = None,
) -> None:
    """Measure what `prune` reads from CALIBRATION.CACHE: it is the same for budgets of different size.

    Args and Raises: see `prune`.
    """
    graph, wishes = load_for_pruning(model, recipe)
    settings = pruning_of(wishes, graph, integers=quantized)
    measure_graph(graph, data.fit, settings, _options_of(wishes, progress))


def _options_of(recipe: Recipe, progress: Progress | None) -> RunOptions:
    section = recipe.calibration
    chosen = (recipe.device, section.threads, section.memory, section.granularity, section.cache)
    return RunOptions(*chosen, progress=progress or Silent())


def _divided(data: Any, graph: Graph, recipe: Recipe, split: int | None, share: float) -> HeldOutSplit:
    """Read the feeds and split off a share of the samples, for verification."""
    pick, seed = recipe.calibration.pick, recipe.calibration.seed
    feeds = datasets.read(data, graph, split=split, limit=recipe.samples, pick=pick, seed=seed)
    return divide(feeds, graph, share, device=recipe.device)


def _goal(done: Pruned, settings: Pruning) -> tuple[dict[str, float], dict[str, float]]:
    """Return what was asked for and what was reached, by name."""
    if settings.max_loss is not None and done.loss is not None:
        return {"max_loss": settings.max_loss}, {"max_loss": done.loss}
    reached = None if settings.budget is None else done.of(settings.budget)
    if settings.budget is None or settings.share is None or reached is None:
        return {}, {}
    return {settings.budget: settings.share}, {settings.budget: reached}


def _missed(done: Pruned, settings: Pruning, found: Comparison | None) -> Iterator[str]:
    """Yield one problem for a budget or loss that was not reached, and for a file that is slower."""
    for name, limit in _goal(done, settings)[0].items():
        reached = _goal(done, settings)[1][name]
        if name == "max_loss" and reached > limit:
            yield (
                f"the loss is {reached:.3g}, and {limit:g} is asked for: even with {done.macs:.3f} of the "
                "multiplications; this network was written"
            )
        elif name != "max_loss" and reached > limit * (1 + ROUNDING):
            yield (
                f"{reached:.3f} of the {BUDGET_TEXT[settings.budget or 'macs']} remain, and {limit:g} are asked for: "
                f"the nearest network was written; ask for more, or lower LEAST ({settings.least:g}) or MULTIPLE"
            )
    if settings.latency is not None and found is not None and found.slower:
        yield (
            f"the file is {SLOWER}: a run takes {found.latency_figure()} of its time; its kernels differ from the "
            "table of KERNEL_COSTS (python -m benchmarks.kernels measures one)"
        )


def _notes(done: Pruned, settings: Pruning, found: Comparison | None) -> Iterator[str]:
    asked, interval = settings.latency, None if found is None else found.latency_interval
    if done.tuned is not None and done.tuned.note:
        yield done.tuned.note
    if settings.pattern is not None:
        yield from no_gain(settings.backend.name)
    if found is None:
        yield UNCOMPARED
    elif settings.pattern is not None:
        pass  # the same kernels: a measured difference is noise
    elif settings.latency is None or not found.slower:
        yield from found.notes()
    if asked is not None and found is not None and interval is not None and interval[0] > NOTICEABLE * asked:
        yield f"a run takes {found.latency_figure()} of the time in float on this machine, {asked:g} by the table"
    if done.unaligned:
        first = done.unaligned[0]
        yield (
            f"numbers of channels that do not fill whole blocks of the kernels of {settings.backend.name}: "
            f"{len(done.unaligned)} (first: {first.after} of {first.before} of '{first.name}'); the latency falls less "
            "than the multiplications, and MULTIPLE: auto avoids it"
        )


def no_gain(backend: str) -> list[str]:
    """Return a note if a backend runs sparse weights no faster."""
    return [] if backend.startswith("tensorrt") else [NO_SPARSE_KERNELS.format(backend)]


def _verified(
    source: Path | bytes,
    path: Path,
    done: Pruned,
    parts: HeldOutSplit | None,
    options: RunOptions,
    limits: verify.Limits,
) -> tuple[Comparison | None, list[str]]:
    """Check the file, compare it with the original, and compare removed with masked channels."""
    graphs.check_file(path)
    if parts is None:
        return None, []
    depth = verify.Depth(latency=True, levels=True, strict=True)
    found = verify.compare(source, path, parts.judged, seen=parts.seen, device=options.device, depth=depth)
    least = limits.min_sqnr_db
    asked = dict(least) if isinstance(least, Mapping) else dict.fromkeys((error.name for error in found.outputs), least)
    problems = [
        f"output '{error.name}' has {error.sqnr_db:.1f} dB signal to error, and {bound:g} are asked for"
        for error in found.outputs
        if (bound := asked.get(error.name)) is not None and error.sqnr_db < bound
    ]
    problems += [
        f"output '{error.name}' holds {error.not_finite} values that are not finite, or has another shape"
        for error in found.outputs
        if error.not_finite or error.mismatched
    ]
    worst = 0.0 if done.masked is done.graph else removal_error(done, parts.judged)
    if worst > SAME:
        problems.append(
            f"removing channels differs from masking them by {worst:.1e} of the largest output: the file computes "
            "something else than was fitted; please report this model"
        )
    return replace(found, held_out=parts.count), problems


def removal_error(done: Pruned, data: Dataset) -> float:
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
