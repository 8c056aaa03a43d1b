"""Trials of recipes: calibrate on one part of the feeds, evaluate on the hold-out set; results are cached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx.backends import Backend
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.metrics import LossKind, Metric, loss_kind
from sbonnx.pipeline import prepare, quantized_graph, solve
from sbonnx.planning import Solution
from sbonnx.progress import Progress, Silent, count_samples
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FLOAT
from sbonnx.search.trial_scores import Score, TrialFeeds, divide, score_of
from sbonnx.stages.measure import divided
from sbonnx.stages.state import Prepared, Request, run_options
from sbonnx.verify import LabelledLoss, file_bytes
from sbonnx.verify.judge import Judge


def settled(keys: Recipe | dict[str, Any]) -> Recipe:
    """Return a recipe without AUTO, MIXED and TUNE, so that nothing is left to search.

    Raises:
        RecipeError: invalid keys.
    """
    return recipes.load(keys, overrides={"AUTO": None, "MIXED": None, "TUNE": None})


def changed(recipe: Recipe, overrides: dict[str, Any]) -> Recipe:
    """Return a recipe with other values for some keys, by key path."""
    return recipes.load(recipe, overrides=overrides)


FEEDS: Final = ("SAMPLES", "CALIBRATION.CACHE", "CALIBRATION.FEEDBACK", "CALIBRATION.PICK")
"""Keys that choose and read feeds; a trial has its feeds."""


@final
class TrialProgress(Progress):
    """Progress adapter that prefixes the name of the current trial. Closing it does not close the `Progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.what = ""

    def start(self, what: str, total: int | None) -> None:
        self._progress.start(f"{self.what}: {what}" if self.what else what, total)

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        self._progress.state(segment=segment, spilled=spilled)

    def advance(self, pieces: int = 1) -> None:
        self._progress.advance(pieces)

    def count_samples(self, samples: int) -> None:
        count_samples(self._progress, samples)

    def close(self) -> None:
        """No-op: the next trial uses the same `Progress`."""


@final
@dataclass
class Trials:
    """Calibrates and evaluates recipes for one model.

    Attributes:
        request: the float model, the backend, and what to evaluate by.
        samples: calibration set and hold-out set.
        judge: evaluates solutions.
        progress: prefixed with the name of the trial.
        count: number of trials so far.
    """

    request: Request
    samples: TrialFeeds
    judge: Judge
    progress: TrialProgress
    count: int = 0
    _known: dict[str, Score] = field(default_factory=dict)

    @property
    def rules(self) -> Backend:
        """The backend."""
        return self.request.backend

    def prepare(self, recipe: Recipe) -> Prepared:
        """Return the graph and plan of a recipe. Raises: see `sbonnx.pipeline.prepare`."""
        return _prepared(self.request, recipe)

    def trial(self, recipe: Recipe) -> Recipe:
        """Return `recipe` for a trial: the given feeds in order, no cache, no hold-out, nothing to search."""
        return changed(settled(recipe), {**dict.fromkeys(FEEDS), "VERIFY.HELD_OUT": 0})

    def solve(self, recipe: Recipe, what: str) -> tuple[Prepared, Solution]:
        """Calibrate a recipe on the calibration set.

        Raises: see `sbonnx.pipeline.solve`.
        """
        self.progress.what = what
        request = replace(self.request, recipe=self.trial(recipe), data=self.samples.fit, split=None)
        state = solve(request, self.progress)
        return state.prepared, state.solution

    def score(self, recipe: Recipe, what: str) -> Score:
        """Return the score of a recipe on the hold-out set. Scores are cached by recipe.

        Raises: see `solve`, `score_of`.
        """
        digest = self.trial(recipe).digest
        if digest not in self._known:
            self.count += 1
            self._known[digest] = score_of(self.judge, *self.solve(recipe, what))
        return self._known[digest]

    def size_ratio(self, recipe: Recipe) -> float:
        """Return the size of the quantized file of a recipe, divided by that of the float model."""
        prepared, solution = self.solve(recipe, "the size of the file")
        source = self.request.source
        before = len(source) if isinstance(source, bytes) else file_bytes(source)
        with temporary_folder() as folder:
            path = folder / "sized.onnx"
            graphs.save(quantized_graph(prepared, solution), path)
            return file_bytes(path) / before


def _check_candidates(recipe: Recipe) -> None:
    """Check that a limit of the loss alone does not come with widths below those of the recipe.

    Raises:
        RecipeError: it does.
    """
    mixed = recipe.mixed
    if mixed.max_loss is None or mixed.minimize != "none":
        return
    for key, side, now, candidates in (
        ("WEIGHTS", "W", recipe.w.quantizer.bit, mixed.weights),
        ("ACTIVATIONS", "A", recipe.a.quantizer.bit, mixed.activations),
    ):
        narrower = [str(bits) for bits in candidates if bits != FLOAT and (now == FLOAT or bits < now)]
        if narrower:
            own = "float" if now == FLOAT else f"{now} bits"
            raise RecipeError(
                f"MIXED.{key} has {', '.join(narrower)} bits and {side} has {own}: MAX_LOSS alone only gives layers "
                "more bits. Drop them, or set MIXED.MINIMIZE: bits (--minimize bits) for the fewest within the loss"
            )


def _prepared(request: Request, recipe: Recipe) -> Prepared:
    return prepare(request.model, recipe, request.backend, pruned=request.pruned)


def open_trials(request: Request, *, metric: Metric | None = None, progress: Progress | None = None) -> Trials:
    """Create trials of recipes: split the feeds as the recipe requires, and prepare the float model for comparison.

    Args:
        request: model, recipe and data. With an evaluation, MIXED.MAX_LOSS limits the loss in its metric.
        metric: the loss that MIXED.MAX_LOSS limits, a function of outputs.

    Raises:
        DataError: there is no calibration data.
        RecipeError: MIXED has several goals, or widths that none of them allows.
        ModelError: the model cannot be used.
    """
    recipe, evaluation = request.recipe, request.evaluation
    if recipe.mixed.contradiction is not None:
        raise RecipeError(recipe.mixed.contradiction)
    _check_candidates(recipe)
    plain = changed(settled(recipe), {"EQUALIZE": None})  # with CLIP: relu it changes what the model computes
    base = _prepared(request, plain)
    given = None if request.data is None else divided(request.data, base, request.split, run_options(recipe))
    if given is None:
        raise DataError("AUTO and MIXED judge what they try on samples that are held out: give calibration data")
    samples = divide(given.fit.data, base.graph, recipe.auto.held_out, recipe.auto.samples)
    own = metric is not None or (evaluation is not None and recipe.mixed.max_loss is not None)
    kind: LossKind = "metric" if own else loss_kind(recipe.mixed.loss, base.graph)
    labelled = LabelledLoss(request.source, evaluation, device=recipe.device) if own and evaluation else None
    judge = Judge(base.graph, samples.held, kind, metric, labelled, recipe.device)
    return Trials(request, samples, judge, TrialProgress(progress or Silent()))
