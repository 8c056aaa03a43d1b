"""Recipe search and mixed precision: candidates, their evaluation, and bit widths by layer under a budget."""

from __future__ import annotations

from sbonnx.search.bit_search import choose, for_budget, for_loss
from sbonnx.search.evaluation import Goal, Judge, Metric, Score
from sbonnx.search.outcome import Measured, Outcome
from sbonnx.search.pareto import Front, Option
from sbonnx.search.recipe_search import Attempt, Found, search
from sbonnx.search.sensitivity import Survey, survey
from sbonnx.search.trials import Trials, open_trials, settled

__all__ = [
    "Attempt",
    "Found",
    "Front",
    "Goal",
    "Judge",
    "Measured",
    "Metric",
    "Option",
    "Outcome",
    "Score",
    "Survey",
    "Trials",
    "choose",
    "for_budget",
    "for_loss",
    "open_trials",
    "search",
    "settled",
    "survey",
]
