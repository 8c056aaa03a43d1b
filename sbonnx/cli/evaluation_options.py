"""Labelled data and metric of a result, from the options of a command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import DataError, RecipeError

if TYPE_CHECKING:
    from sbonnx.calib.data import DataPath
    from sbonnx.verify import EvaluationData


def evaluation_of(given: Arguments, row: CommandOption[str | None] = options.METRIC) -> EvaluationData | None:
    """Return the labelled data and the metric of ``--eval``; None without it.

    Args:
        row: the option of the metric.

    Raises:
        RecipeError: one of ``--eval`` and ``--metric`` is given without the other, or the metric does not exist.
    """
    data, metric = given[options.EVAL], given[row]
    if data is None:
        rows = [row for row in options.EVALUATING if row is not options.HEAD or not given.values.get(options.TASK)]
        alone = next((option for option in rows if given.values.get(option) is not None), None)
        if alone is not None:
            tasks = " or --task detection" if alone is options.HEAD and options.TASK in given.values else ""
            raise RecipeError(f"{alone.flags[0]} is for labelled data: give it with --eval DATA{tasks}")
        return None
    if metric is None:
        raise RecipeError("--eval computes a metric: name it with --metric, such as --metric top1")
    from sbonnx.api.arguments import evaluation_data

    split = given[options.EVAL_SPLIT] or given[options.SPLIT]
    return given.call(evaluation_data, data=data, metric=metric, split=split)


def calibration_data(given: Arguments, verb: str) -> Path | DataPath:
    """Return the path of the calibration data, with its preprocessing.

    Raises:
        DataError: ``--data`` is missing. Where the labelled data is a folder of images, the message has the command.
    """
    labelled = given.values.get(options.EVAL)
    if given[options.DATA] is None and labelled is not None and _has_images(labelled):
        filled = Arguments({**given.values, options.DATA: Path("FOLDER")})
        raise DataError(
            f"--data is missing: give a folder of calibration images, which need no labels and are not those of --eval "
            f"'{labelled}': {filled.other_command(verb, filled.values)}"
        )
    return given.required_data()


def _has_images(folder: Path) -> bool:
    """Whether a folder, or one inside it, has images."""
    from sbonnx.calib.data.readers.media_files import kind_of

    return any(kind_of(path) == "images" for path in Path(folder).rglob("*"))
