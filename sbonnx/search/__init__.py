"""Recipe search and mixed precision: candidates, their evaluation, and bit widths by layer under a budget."""

from __future__ import annotations

from sbonnx.metrics import Metric
from sbonnx.search.bit_search import Measured, MixedOutcome, choose, for_budget, for_loss
from sbonnx.search.loss_survey import SensitivitySurvey, survey
from sbonnx.search.pareto import Front, Option
from sbonnx.search.recipe_search import SearchResult, search, searched
from sbonnx.search.trial_scores import Goal, Score
from sbonnx.search.trials import Trials, open_trials, settled

__all__ = [
    "Front",
    "Goal",
    "Measured",
    "Metric",
    "MixedOutcome",
    "Option",
    "Score",
    "SearchResult",
    "SensitivitySurvey",
    "Trials",
    "choose",
    "for_budget",
    "for_loss",
    "open_trials",
    "search",
    "searched",
    "settled",
    "survey",
]
