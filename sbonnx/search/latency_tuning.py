"""TUNE: placements of integers and forms of the file, tried by their measured times in the runtime.

The model is calibrated once with integers wherever the runtime has kernels. The file of another placement has the part
of that solution that it needs (`heads.protect.restricted`), and is timed in turn with the best file so far. Candidates
are tried in the order of their estimated times. One is kept if it is faster beyond the noise, twice, and if its outputs
are as good as the default's, or within the limits of the recipe. The result is a recipe: FLOAT_NODES, or another MODE
or FORMAT. It is run as any other recipe, so that the bytes of the file depend on the recipe alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

from sbonnx import graph as graphs
from sbonnx import pipeline, verify
from sbonnx.calib.observers import OBSERVERS
from sbonnx.errors import DataError, DeviceError, RecipeError, SbonnxError
from sbonnx.graph import query
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.heads.losses import Quantized
from sbonnx.heads.protect import LEAST_GAIN_DB, restricted
from sbonnx.options import RunOptions
from sbonnx.planning import Plan, Planner, costs_of
from sbonnx.planning.make import FASTER
from sbonnx.planning.times import GraphTimes, integer_nodes
from sbonnx.progress import Progress, Silent
from sbonnx.recipe import Recipe
from sbonnx.report.comparison import Comparison
from sbonnx.report.searched import LatencyTrial, LatencyTuning, override_texts
from sbonnx.search.advice import compared, problems_of, worst_db
from sbonnx.search.latency_advice import slowed
from sbonnx.search.placements import SLOWER, Placement, PlacementChange, PlacementRegions
from sbonnx.search.trials import TrialProgress, changed, settled
from sbonnx.stages.measure import read_data
from sbonnx.stages.state import PipelineState, Request, run_options
from sbonnx.stages.verify import reference_of
from sbonnx.system.cpu import target_cpu
from sbonnx.verify.paired_times import TimeRatio, cpu_seconds, runner, time_ratio
from sbonnx.verify.runtimes import open_in, runtime_here

GAIN: Final = 0.01
"""Least share of the time that a kept candidate saves."""

FEW_ROUNDS: Final = 16
"""Rounds after which a candidate is given up if its median shows no gain."""

FEEDS: Final = 4
"""Feeds that a measurement runs: the first of the data."""

MOST_REGIONS: Final = 200
"""Regions around a placement whose times are estimated."""

PLACEMENTS: Final = 0.75
"""Share of the time that trials of placements may take; the rest is for other forms of the file."""

HOPELESS: Final = 1.25
"""Estimated time over that of the best placement from which a placement is not tried; estimates are off by less."""

FORMS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("integer operators in place of Q/DQ", {"FORMAT": "qoperator"}),
    ("dynamic quantization", {"MODE": "dynamic", "FLOAT_NODES": None, "FORMAT": "qdq"}),
    ("weights alone", {"MODE": "weight_only", "FLOAT_NODES": None, "FORMAT": "qdq", "W.QUANTIZER.BIT": 8}),
    ("every weight, of any size", {"MIN_WEIGHT_SIZE": 0}),
    ("weights of at least 65536 values", {"MIN_WEIGHT_SIZE": 65536}),
)
"""Other files of the same model: recipe keys. Those that the backend or the mode does not have are left out."""

LOSES: Final = "'{output}' would have {after:.1f} dB in place of {before:.1f}; --min-sqnr sets another limit"


@dataclass(frozen=True)
class TimedFile:
    """A file of the model.

    Attributes:
        name: what differs, in words.
        recipe: makes it.
        state: of a run up to the quantized graph.
        file: the saved graph.
        placement: nodes in float.
    """

    name: str
    recipe: Recipe
    state: PipelineState
    file: Path
    placement: Placement = frozenset()


@dataclass
class LatencySearch:
    """Trials on one model.

    Attributes:
        request: with a recipe without searches, and the calibration cache of the trials.
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
    _judged: dict[Path, Comparison] = field(default_factory=dict)

    def run(self) -> tuple[TimedFile, TimedFile]:
        """Return the default file and the fastest one."""
        first = best = self.built("default", self.request.recipe)
        self._begin = time.perf_counter()
        if first.recipe.mode == "static":
            best = self._placed(first)
        for name, keys in FORMS:
            best = self._best_of(best, first, name, partial(self._of_form, best, name, keys))
        return first, best

    def built(self, name: str, recipe: Recipe) -> TimedFile:
        """Run the stages up to the quantized graph; statistics come from the cache of the trials.

        Raises: see `sbonnx.pipeline.solve`.
        """
        request = replace(self.request, recipe=recipe)
        stages = (*pipeline.PREPARE, read_data, *pipeline.MEASURE, *pipeline.INSERT)
        return self._saved(name, recipe, pipeline.run(stages, PipelineState.of(request), self._options(recipe)))

    def _saved(self, name: str, recipe: Recipe, state: PipelineState, placement: Placement = frozenset()) -> TimedFile:
        path = self.folder / str(next(self._numbers)) / "trial.onnx"
        path.parent.mkdir()
        graphs.save(state.quantized, path)
        return TimedFile(name, recipe, state, path, placement)

    def _options(self, recipe: Recipe) -> RunOptions:
        return run_options(recipe, self.progress)

    def _of_form(self, best: TimedFile, name: str, keys: Mapping[str, Any]) -> TimedFile | None:
        try:
            recipe = changed(best.recipe, dict(keys))
        except RecipeError:
            return None  # the backend or the mode does not have it
        if recipe == best.recipe or (recipe.mode == "static" and "MIN_WEIGHT_SIZE" in keys):
            return None
        if "MODE" not in keys and recipe.mode == "static":
            state = replace(best.state, prepared=replace(best.state.prepared, recipe=recipe))
            state = pipeline.run(pipeline.INSERT, state, self._options(recipe))
            return self._saved(name, recipe, state, best.placement)
        candidate = self.built(name, recipe)
        return candidate if candidate.state.prepared.plan.of_role("weight") else None

    # --- placements -----------------------------------------------------------------------------------

    def _placed(self, first: TimedFile) -> TimedFile:
        """Try placements in the order of their estimated times."""
        recipe, backend = first.recipe, self.request.backend
        full = first
        if _placement(first.state.prepared.plan):
            full = self.built("all in integers", changed(recipe, {"FLOAT_NODES": []}))
        graph, plan = full.state.prepared.graph, full.state.prepared.plan
        able = frozenset(integer_nodes(graph.nodes, plan))
        planner = Planner(graph, changed(recipe, {"FLOAT_NODES": []}), backend, observers=frozenset(OBSERVERS))
        costs = costs_of(recipe, backend)
        times = None if costs is None else GraphTimes.of(graph.nodes, query.output_names(graph), costs)
        space = _Space(full.state, planner, PlacementRegions(graph, able), times, self._options(recipe))
        best = replace(first, placement=_placement(first.state.prepared.plan) & able)
        seen, cuts = {best.placement}, list(_cuts(first, able))
        self._begin = time.perf_counter()
        regions = space.ordered(best, cuts, seen)
        while regions and self._spent < PLACEMENTS * self.seconds:
            region = regions.pop(0)
            placement = region.applied(best.placement)
            seen.add(placement)
            build = partial(self._of_placement, space, region.name, placement)
            faster = self._best_of(best, first, region.name, build)
            if faster is not best:
                best, regions = faster, space.ordered(faster, cuts, seen)
        self.ended = bool(regions)
        return best

    def _of_placement(self, space: _Space, name: str, placement: Placement) -> TimedFile | None:
        state = space.written(placement)
        recipe = changed(self.request.recipe, {"FLOAT_NODES": sorted(placement)})
        return None if state is None else self._saved(name, recipe, state, placement)

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
        """Try a candidate; return it if it is faster than the best so far and its outputs are good enough."""
        if self.over:
            self.ended = True
            return best
        self.progress.start(f"tuning: {name}", None)
        try:
            candidate = build()
            if candidate is None:
                return best
            ratio = self.ratio(best, candidate)
        except SbonnxError as error:
            self.trials.append(LatencyTrial(name, why=str(error)))
            return best
        why = "" if ratio.below(1 - GAIN) else "not faster"
        if not why:
            again = self.ratio(best, candidate)  # other sessions: memory lies elsewhere
            why = self.loss(first, candidate) if again.below(1 - GAIN) else "not faster in other sessions"
        self.trials.append(LatencyTrial(name, ratio.value, ratio.interval, ratio.rounds, not why, why))
        if why:
            rmtree(candidate.file.parent)
        return best if why else candidate

    def ratio(self, reference: TimedFile | None, candidate: TimedFile) -> TimeRatio:
        """Measure the time of a candidate over that of another; None: over that of the float model."""
        with reference_of(candidate.state) as floats:
            models = [floats if reference is None else reference.file, candidate.file]
            runtime = runtime_here(self.request.backend)[0]
            sessions = [open_in(runtime, model, threads=1, timed=True) for model in models]
        data = candidate.state.data
        assert data is not None
        before, after = (runner(opened, list(islice(iter(data.every), FEEDS))) for opened in sessions)
        return time_ratio(before, after, _decided, clock=self.clock)

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
            evaluation = verify.evaluate(models, request.evaluation, device=request.recipe.device)
        problems = replace(evaluation, max_loss=request.max_loss).problems()
        return str(problems[0]) if problems else ""

    def _comparison(self, candidate: TimedFile) -> Comparison:
        if candidate.file not in self._judged:
            self._judged[candidate.file] = compared(candidate.state, candidate.state, candidate.file)
        return self._judged[candidate.file]


@dataclass(frozen=True)
class _Space:
    """Placements of one graph: their plans, estimated times and files.

    Attributes:
        full: solved with integers wherever the runtime has kernels.
        planner, regions: of its graph.
        times: estimated; None: unknown.
        options: of runs.
    """

    full: PipelineState
    planner: Planner
    regions: PlacementRegions
    times: GraphTimes | None
    options: RunOptions

    def ordered(self, best: TimedFile, cuts: Sequence[PlacementChange], seen: Set[Placement]) -> list[PlacementChange]:
        """Return the regions that were not tried and may pay, those with the least estimated time first."""
        regions = [*cuts, *islice(self.regions.around(self.regions.able - best.placement), MOST_REGIONS)]
        now = self._time(best.placement)
        estimates: dict[Placement, tuple[float, PlacementChange]] = {}
        for region in regions:
            placement = region.applied(best.placement)
            if placement not in seen and placement not in estimates:
                estimates[placement] = (self._time(placement) / now if now else 1.0, region)
        rows = sorted(estimates.values(), key=lambda row: row[0])
        return [region for estimate, region in rows if estimate < HOPELESS]

    def _time(self, placement: Placement) -> float:
        return 0.0 if self.times is None else self.times.of_division(self.regions.able - placement)

    def _plan(self, placement: Placement) -> Plan:
        return self.planner.plan(dict.fromkeys(placement, FASTER))

    def written(self, placement: Placement) -> PipelineState | None:
        """Return the state of a placement, with the scales and codes of `full`; None if it needs others."""
        state, plan = self.full, self._plan(placement)
        solution = restricted(Quantized(state.prepared.plan, state.solution), plan, state.prepared.graph)
        if solution is None:
            return None
        state = replace(state, prepared=replace(state.prepared, plan=plan), solution=solution)
        return pipeline.run(pipeline.INSERT, state, self.options)


def _placement(plan: Plan) -> Placement:
    """Return the nodes that a plan leaves in float because integers would be slower, or not worth the loss."""
    codes = ("slower-in-integers", "head-worth-float")
    return frozenset(refusal.where for refusal in plan.refusals if refusal.code in codes)


def _cuts(first: TimedFile, able: Placement) -> Iterator[PlacementChange]:
    """Yield the partitions for other prices of integer kernels, with and without regions of heads in float."""
    prepared = first.state.prepared
    heads = frozenset(refusal.where for refusal in prepared.plan.refusals if refusal.code == "head-worth-float")
    for factor in SLOWER:
        backend = slowed(prepared.backend, factor)
        plan = Planner(prepared.graph, first.recipe, backend, observers=frozenset(OBSERVERS)).plan()
        for protected in {frozenset[str](): "", heads: ", head in float"} if heads else (frozenset[str](),):
            floats = (_placement(plan) | protected) & able
            head = ", protected regions of the head in float" if protected else ""
            yield PlacementChange(
                f"partition with integers at {factor:g} times their price{head}", floats, able - floats
            )


def _decided(ratio: TimeRatio) -> bool:
    """Return whether a candidate is faster beyond the noise, or will hardly be."""
    hardly = ratio.rounds >= FEW_ROUNDS and ratio.value > 1 - GAIN
    return ratio.below(1 - GAIN) or ratio.above(1 - GAIN) or hardly


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
        cache = recipe.calibration.cache or str(folder / "calibration")
        request = pipeline.pruned(replace(request, recipe=changed(recipe, {"CALIBRATION.CACHE": cache})), adapter)
        search = LatencySearch(request, folder, adapter, seconds, clock)
        first, best = search.run()
        gain = TimeRatio(1.0, (1.0, 1.0)) if best.recipe == first.recipe else search.ratio(first, best)
        over_float = search.ratio(None, best)
        if over_float.above(1.0):  # nothing pays
            best = search.built("float", changed(recipe, _float_keys(search)))
            gain, over_float = search.ratio(first, best), search.ratio(None, best)
        chosen = changed(best.recipe, {"CALIBRATION.CACHE": recipe.calibration.cache})
    given, keys = settled(recipe).to_dict(), chosen.to_dict()
    differs = {key: value for key, value in keys.items() if given.get(key) != value}
    result = LatencyTuning(
        runtime=runtime_here(backend)[0],
        trials=tuple(search.trials),
        ratio=gain.value,
        interval=gain.interval,
        over_float=over_float.value,
        over_float_interval=over_float.interval,
        ended=search.ended,
        overrides=override_texts(differs),
    )
    return replace(request, recipe=chosen), result


def _float_keys(search: LatencySearch) -> dict[str, Any]:
    """Return the recipe keys that leave all operators in float."""
    full = search.built("all in integers", changed(search.request.recipe, {"MODE": "static", "FLOAT_NODES": []}))
    prepared = full.state.prepared
    return {"MODE": "static", "FLOAT_NODES": sorted(integer_nodes(prepared.graph.nodes, prepared.plan))}


__all__ = ["LatencySearch", "TimedFile", "tuned"]
