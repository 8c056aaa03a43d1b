"""Mixed precision: a width for each layer, under a budget or for a loss, measured and not guessed."""

from __future__ import annotations

from sbonnx.mixed.front import Front, Option
from sbonnx.mixed.judge import Goal, Judge, Metric, Score
from sbonnx.mixed.outcome import Measured, Outcome
from sbonnx.mixed.search import choose, for_budget, for_loss
from sbonnx.mixed.survey import Survey, survey
from sbonnx.mixed.trials import Trials, open_trials, settled

__all__ = [
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
    "settled",
    "survey",
]
