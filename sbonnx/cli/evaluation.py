"""Labelled data and metric of a result, from the options of a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from sbonnx.verify import EvaluationData


def evaluation_of(given: Arguments, row: CommandOption[str | None] = options.METRIC) -> EvaluationData | None:
    """Return the labelled data and the metric of ``--eval``; None without it.

    Args:
        row: the option of the metric.

    Raises:
        RecipeError: one of ``--eval`` and ``--metric`` is given without the other, or the metric does not exist.
    """
    data, metric = given.data(options.EVAL), given[row]
    if data is None:
        alone = next((option for option in options.EVALUATING if given.values.get(option) is not None), None)
        if alone is not None:
            raise RecipeError(f"{alone.flags[0]} is for labelled data: give it with --eval DATA")
        return None
    if metric is None:
        raise RecipeError("--eval computes a metric: name it with --metric, such as --metric top1")
    split = given[options.EVAL_SPLIT] or given[options.SPLIT]
    return evaluation_data(given, data, metric, split)


def evaluation_data(given: Arguments, data: Any, metric: str, split: int | None) -> EvaluationData:
    """Return labelled data and metric with the further options of ``options.READING``.

    Raises:
        RecipeError: the metric or a function of it does not exist.
    """
    from sbonnx.verify import EvaluationData
    from sbonnx.verify.labelled.conversions import readers_of

    vocabulary = given[options.VOCABULARY]
    evaluation = EvaluationData(
        data,
        metric,
        given[options.LABELS],
        given[options.DECODE],
        split,
        vocabulary=None if vocabulary is None else str(vocabulary),
        blank=given[options.BLANK],
        head=given[options.HEAD],
    )
    evaluation.kind()
    evaluation.converter(readers_of(b""))
    return evaluation
