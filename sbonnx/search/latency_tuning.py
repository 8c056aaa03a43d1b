"""TUNE: placements of integers and forms of the file, tried by their measured times in the runtime.

Other modes are tried first, then placements in the order of their estimated times. The model is calibrated once with
integers wherever the runtime has kernels. The file of another placement has the part of that solution that it needs
(`heads.protect.restricted`), and is timed in turn with the best file so far. A candidate is kept if it is faster beyond
the noise, twice, and if its outputs are as good as the default's, or within the limits of the recipe.

The result is a recipe: FLOAT_NODES, or another MODE or FORMAT. It is run as any other recipe, so that the bytes of the
file depend on the recipe alone. That file is timed again against the default and float before it is written: if it is
not faster than the default, the default takes its place, and if that is slower than float, the float model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

from sbonnx import graph as graphs
from sbonnx import pipeline, verify
from sbonnx.errors import DataError, DeviceError, RecipeError, SbonnxError
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.heads.protect import LEAST_GAIN_DB
from sbonnx.options import RunOptions
from sbonnx.progress import Progress, Silent
from sbonnx.recipe import Recipe
from sbonnx.report.comparison import Comparison
from sbonnx.report.searched import LatencyTrial, LatencyTuning, override_texts
from sbonnx.search.advice import compared, problems_of, worst_db
from sbonnx.search.placements import Placement, PlacementSpace, partitions, placement_of
from sbonnx.search.trials import TrialProgress, changed, settled
from sbonnx.stages.measure import choose_accuracy_levels, read_data
from sbonnx.stages.state import PipelineState, Request, run_options
from sbonnx.stages.verify import reference_of
from sbonnx.stages.write import quantizes_nothing
from sbonnx.system.cpu import target_cpu
from sbonnx.verify.paired_times import TimeRatio, cpu_seconds, runner, time_ratio
from sbonnx.verify.runtimes import open_in, runtime_here

GAIN: Final = 0.01
"""Least share of the time that a kept candidate saves."""

FEW_ROUNDS: Final = 16
"""Rounds after which a candidate is given up if its median shows no gain."""

FEEDS: Final = 4
"""Feeds that a measurement runs: the first of the data."""

PLACEMENTS: Final = 0.75
"""Share of the time that trials of placements may take; the rest is for other forms of the file."""

MODES: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("dynamic quantization", {"MODE": "dynamic", "FLOAT_NODES": None, "FORMAT": "qdq"}),
    ("weights alone", {"MODE": "weight_only", "FLOAT_NODES": None, "FORMAT": "qdq", "W.QUANTIZER.BIT": 8}),
)
"""Other modes: recipe keys. They are tried once, before the placements."""

FORMS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("integer operators in place of Q/DQ", {"FORMAT": "qoperator"}),
    ("every weight, of any size", {"MIN_WEIGHT_SIZE": 0}),
    ("weights of at least 65536 values", {"MIN_WEIGHT_SIZE": 65536}),
)
"""Forms of the best file: recipe keys. Those that the backend or the mode does not have are left out."""

AGAIN: Final = "the best file, solved by its recipe, over the default"
FLOAT_MODEL: Final = "the float model"
SAME: Final = TimeRatio(1.0, (1.0, 1.0))

LOSES: Final = "'{output}' would have {after:.1f} dB in place of {before:.1f}; --min-sqnr sets another limit"


@dataclass(frozen=True)
class TimedFile:
    """A file of the model.

    Attributes:
        changes: what differs from the default, in words.
        recipe: makes it.
        state: of a run up to the quantized graph.
        file: the saved graph.
        placement: nodes in float.
    """

    changes: tuple[str, ...]
    recipe: Recipe
    state: PipelineState
    file: Path
    placement: Placement = frozenset()


@dataclass(frozen=True)
class TunedFile:
    """The file that is written.

    Attributes:
        file: the best file of the trials, the default, or the float model.
        over_default, over_float: its time over theirs.
    """

    file: TimedFile
    over_default: TimeRatio
    over_float: TimeRatio


@dataclass
class LatencySearch:
    """Trials on one model.

    Attributes:
        request: with a recipe without searches.
        folder: for files of trials.
        clock: returns seconds of CPU time, see `time_ratio`.
        trials: in order.
    """

    request: Request
    folder: Path
    progress: Progress
    seconds: float
    clock: Callable[[], float] = cpu_seconds
    trials: list[LatencyTrial] = field(default_factory=list)
    ended: bool = False
    _begin: float = field(default_factory=time.perf_counter)
    _numbers: Iterator[int] = field(default_factory=count)
    _caches: dict[str, str | os.PathLike[str] | None] = field(default_factory=dict)
    _judged: dict[Path, Comparison] = field(default_factory=dict)

    def run(self) -> TunedFile:
        """Try candidates, and return the fastest file that its recipe alone gives again."""
        first = best = self.built((), self.request.recipe)
        full = self._in_integers(first) if first.recipe.mode == "static" else None
        self._begin = time.perf_counter()
        for name, keys in MODES:
            best = self._best_of(best, first, name, partial(self._of_form, first, name, keys))
        if full is not None:
            placed = self._placed(first, full)
            if placed.changes and best.changes:
                best = self._tried(best, first, f"placements in place of {best.changes[-1]}", lambda: placed)
            elif not best.changes:
                best = placed
        for name, keys in FORMS:
            best = self._best_of(best, first, name, partial(self._of_form, best, name, keys))
        return self._confirmed(first, best)

    def _confirmed(self, first: TimedFile, best: TimedFile) -> TunedFile:
        """Return the best file if its recipe gives a faster one than the default's again; else the default, or float.

        The float model takes the place of a file that is slower than it, or in which nothing is quantized.
        """
        over_default = SAME
        if best.changes:
            best, over_default = self._solved_again(first, best)
        over_float = self.ratio(None, best, _compared)
        if over_float.above(1.0) or quantizes_nothing(best.state):
            best = self.built((FLOAT_MODEL,), changed(self.request.recipe, self._float_keys()))
            over_default, over_float = (self.ratio(other, best, _compared) for other in (first, None))
        return TunedFile(best, over_default, over_float)

    def _solved_again(self, first: TimedFile, best: TimedFile) -> tuple[TimedFile, TimeRatio]:
        """Solve the best file by its recipe, and return it with its time over that of the default.

        Return the default if that file is not faster, or not good enough.
        """
        self.progress.start(f"tuning: {AGAIN}", None)
        solved, ratio = first, None
        try:
            solved = self.built(best.changes, best.recipe)
            ratio = self.ratio(first, solved, _compared)
            why = self.loss(first, solved) if ratio.below(1.0) else "not faster"
        except SbonnxError as error:
            why = str(error)
        self._note(AGAIN, ratio, why)
        return (first, SAME) if why or ratio is None else (solved, ratio)

    def _float_keys(self) -> dict[str, Any]:
        """Return the recipe keys that leave all operators in float."""
        request = self.request
        recipe = changed(request.recipe, {"MODE": "static", "FLOAT_NODES": []})
        plan = pipeline.prepare(request.model, recipe, request.backend, pruned=request.pruned).plan
        nodes = {reader.node for site in plan.sites for reader in site.readers}
        return {"MODE": "static", "FLOAT_NODES": sorted(nodes), "HIGH_PRECISION": "fp32"}

    def built(self, changes: tuple[str, ...], recipe: Recipe) -> TimedFile:
        """Run the stages up to the quantized graph; statistics come from the cache of the trials, if it has them.

        Raises: see `sbonnx.pipeline.solve`.
        """
        options = self._options(recipe)
        state = pipeline.run(pipeline.PREPARE, PipelineState.of(replace(self.request, recipe=recipe)), options)
        identity = f"{recipe.mode}-{state.prepared.graph.opset}"  # of the graph, to which a cache belongs
        cache = self._caches.setdefault(identity, str(self.folder / identity) if self._caches else options.cache)
        options = replace(options, cache=cache or str(self.folder / identity))
        stages = (read_data, *pipeline.MEASURE, choose_accuracy_levels, *pipeline.INSERT)
        return self._saved(changes, recipe, pipeline.run(stages, state, options))

    def _saved(
        self, changes: tuple[str, ...], recipe: Recipe, state: PipelineState, placement: Placement = frozenset()
    ) -> TimedFile:
        path = self.folder / str(next(self._numbers)) / "trial.onnx"
        path.parent.mkdir()
        graphs.save(state.quantized, path)
        return TimedFile(changes, recipe, state, path, placement)

    def _options(self, recipe: Recipe) -> RunOptions:
        return run_options(recipe, self.progress)

    def _of_form(self, base: TimedFile, name: str, keys: Mapping[str, Any]) -> TimedFile | None:
        try:
            recipe = changed(base.recipe, dict(keys))
        except RecipeError:
            return None  # the backend or the mode does not have it
        if recipe == base.recipe or (recipe.mode == "static" and "MIN_WEIGHT_SIZE" in keys):
            return None
        if "MODE" not in keys and recipe.mode == "static":
            state = replace(base.state, prepared=replace(base.state.prepared, recipe=recipe))
            state = pipeline.run(pipeline.INSERT, state, self._options(recipe))
            return self._saved((*base.changes, name), recipe, state, base.placement)
        changes = (name,) if "MODE" in keys else (*base.changes, name)
        candidate = self.built(changes, recipe)
        return candidate if candidate.state.prepared.plan.of_role("weight") else None

    # --- placements -----------------------------------------------------------------------------------

    def _in_integers(self, first: TimedFile) -> TimedFile:
        """Return the file with integers wherever the runtime has kernels."""
        if not placement_of(first.state.prepared.plan):
            return first
        return self.built(("all in integers",), changed(first.recipe, {"FLOAT_NODES": []}))

    def _placed(self, first: TimedFile, full: TimedFile) -> TimedFile:
        """Try placements in the order of their estimated times."""
        recipe = changed(first.recipe, {"FLOAT_NODES": []})
        space = PlacementSpace.of(full.state, recipe, self.request.backend, self._options(recipe))
        able = space.regions.able
        best = replace(first, placement=placement_of(first.state.prepared.plan) & able)
        seen, cuts = {best.placement}, list(partitions(first.state.prepared, first.recipe, able))
        regions = space.ordered(best.placement, cuts, seen)
        while regions and self._spent < PLACEMENTS * self.seconds:
            region = regions.pop(0)
            placement = region.applied(best.placement)
            seen.add(placement)
            build = partial(self._of_placement, space, (*best.changes, region.name), placement)
            faster = self._best_of(best, first, region.name, build)
            if faster is not best:
                best, regions = faster, space.ordered(faster.placement, cuts, seen)
        self.ended = self.ended or bool(regions)
        return best

    def _of_placement(self, space: PlacementSpace, changes: tuple[str, ...], placement: Placement) -> TimedFile | None:
        state = space.written(placement)
        recipe = changed(self.request.recipe, {"FLOAT_NODES": sorted(placement)})
        return None if state is None else self._saved(changes, recipe, state, placement)

    # --- trials ---------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the time for trials is used up."""
        return self._spent > self.seconds

    @property
    def _spent(self) -> float:
        return time.perf_counter() - self._begin

    def _best_of(
        self, best: TimedFile, first: TimedFile, name: str, build: Callable[[], TimedFile | None]
    ) -> TimedFile:
        """Try a candidate if there is time; return it if it is faster than the best so far and good enough."""
        if not self.over:
            return self._tried(best, first, name, build)
        self.ended = True
        return best

    def _tried(self, best: TimedFile, first: TimedFile, name: str, build: Callable[[], TimedFile | None]) -> TimedFile:
        """Try a candidate; return it if it is faster than the best so far and its outputs are good enough."""
        self.progress.start(f"tuning: {name}", None)
        try:
            candidate = build()
            if candidate is None:
                return best
            ratio = self.ratio(best, candidate)
        except SbonnxError as error:
            self._note(name, None, str(error))
            return best
        why = "" if ratio.below(1 - GAIN) else "not faster"
        if not why:
            again = self.ratio(best, candidate)  # other sessions: memory lies elsewhere
            why = self.loss(first, candidate) if again.below(1 - GAIN) else "not faster in other sessions"
        self._note(name, ratio, why)
        if why:
            rmtree(candidate.file.parent)
        return best if why else candidate

    def _note(self, name: str, ratio: TimeRatio | None, why: str) -> None:
        """Add a trial, with the reason if it is not kept."""
        trial = LatencyTrial(name, kept=not why, why=why)
        if ratio is not None:
            trial = replace(trial, ratio=ratio.value, interval=ratio.interval, rounds=ratio.rounds)
        self.trials.append(trial)

    def ratio(
        self,
        reference: TimedFile | None,
        candidate: TimedFile,
        decided: Callable[[TimeRatio], bool] | None = None,
    ) -> TimeRatio:
        """Measure the time of a candidate over that of another in new sessions; None: over that of the float model.

        Args:
            decided: whether the ratio so far answers the question; None: whether the candidate saves `GAIN`.
        """
        with reference_of(candidate.state) as floats:
            models = [floats if reference is None else reference.file, candidate.file]
            runtime = runtime_here(self.request.backend)[0]
            sessions = [open_in(runtime, model, threads=1, timed=True) for model in models]
        data = candidate.state.data
        assert data is not None
        before, after = (runner(opened, list(islice(iter(data.every), FEEDS))) for opened in sessions)
        return time_ratio(before, after, decided or _decided, clock=self.clock)

    def loss(self, first: TimedFile, candidate: TimedFile) -> str:
        """Return why the outputs of a candidate are not good enough; "" if they are.

        Without a limit in the recipe, no output may lose `LEAST_GAIN_DB` against the default.
        """
        before, after = (self._comparison(which) for which in (first, candidate))
        problems = problems_of(first.state, after)
        if problems and not problems_of(first.state, before):
            return str(problems[0])
        section = self.request.recipe.verify
        limited = not problems and (section.min_sqnr_db is not None or section.min_cosine is not None)
        if not limited and worst_db(after) < worst_db(before) - LEAST_GAIN_DB:
            worst = min(after.outputs, key=lambda output: output.sqnr_db)
            return LOSES.format(output=worst.name, before=worst_db(before), after=worst_db(after))
        return self._labelled_loss(candidate)

    def _labelled_loss(self, candidate: TimedFile) -> str:
        request = self.request
        if request.evaluation is None or request.max_loss is None:
            return ""
        with reference_of(candidate.state) as floats:
            models = {"float": floats, "quantized": candidate.file}
            evaluation = verify.evaluate(models, request.evaluation)
        problems = replace(evaluation, max_loss=request.max_loss).problems()
        return str(problems[0]) if problems else ""

    def _comparison(self, candidate: TimedFile) -> Comparison:
        if candidate.file not in self._judged:
            self._judged[candidate.file] = compared(candidate.state, candidate.state, candidate.file)
        return self._judged[candidate.file]


def _decided(ratio: TimeRatio) -> bool:
    """Return whether a candidate is faster beyond the noise, or will hardly be."""
    hardly = ratio.rounds >= FEW_ROUNDS and ratio.value > 1 - GAIN
    return ratio.below(1 - GAIN) or ratio.above(1 - GAIN) or hardly


def _compared(ratio: TimeRatio) -> bool:
    """Return whether a file is faster than another, or slower, beyond the noise."""
    return ratio.below(1.0) or ratio.above(1.0)


def tuned(
    request: Request, *, seconds: float, progress: Progress | None = None, clock: Callable[[], float] = cpu_seconds
) -> tuple[Request, LatencyTuning]:
    """Measure candidates for `seconds`. Return the request with the recipe to run, and what was tried.

    Args:
        request: its recipe has no other search.

    Raises:
        DataError: there are no data.
        DeviceError: the runtime is not installed.
        RecipeError: the recipe is for another CPU.
        SbonnxError: the recipe cannot be run on the model.
    """
    recipe, backend = settled(request.recipe), request.backend
    absent = runtime_here(backend)[1]
    if absent:
        raise DeviceError(f"TUNE measures files in their runtime. {absent}")
    if target_cpu(recipe.cpu).name != target_cpu().name:
        raise RecipeError(f"TUNE measures on this CPU ({target_cpu().name}), and CPU is {recipe.cpu}: drop one of them")
    if request.data is None:
        raise DataError("TUNE measures the files on samples: give calibration data")
    adapter = TrialProgress(progress or Silent())
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        request = pipeline.pruned(replace(request, recipe=recipe), adapter)
        search = LatencySearch(request, folder, adapter, seconds, clock)
        tuned_file = search.run()
        chosen = tuned_file.file.recipe
    given, keys = settled(recipe).to_dict(), chosen.to_dict()
    differs = {key: value for key, value in keys.items() if given.get(key) != value}
    result = LatencyTuning(
        runtime=runtime_here(backend)[0],
        trials=tuple(search.trials),
        changes=tuned_file.file.changes,
        in_float=not tuned_file.file.state.prepared.plan.sites,
        ratio=tuned_file.over_default.value,
        interval=tuned_file.over_default.interval,
        over_float=tuned_file.over_float.value,
        over_float_interval=tuned_file.over_float.interval,
        ended=search.ended,
        overrides=override_texts(differs),
    )
    return replace(request, recipe=chosen), result


__all__ = ["LatencySearch", "TimedFile", "TunedFile", "tuned"]
