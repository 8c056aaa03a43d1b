"""``sbonnx eval``: compute a metric of one or several models on labelled data."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError
from sbonnx.present.text.tables import evaluation_rows

HELP: Final = "Compute a metric on labelled data. Models side by side, with 95 % intervals."

MODELS: Final[CommandOption[list[Path]]] = CommandOption(
    "models",
    (),
    list[Path],
    "Float or quantized models; the first is the reference. The last path is the data if --data is not given.",
    "MODEL",
    inspect.Parameter.empty,
)

OPTIONS: Final = (
    MODELS,
    options.DATA,
    options.METRIC,
    *options.READING,
    *options.FEEDS,
    options.RUNTIME,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx.api.task_evaluation import eval

    if given[options.METRIC] is None:
        raise RecipeError("--metric is missing: name what to compute, such as --metric top1")
    models, data = given[MODELS], given[options.DATA]
    if data is None and len(models) > 1 and models[-1].suffix != ".onnx":
        *models, data = models
    elif data is None:
        given.required_data()
    printer, table = given.printer(), given.call(eval, models=models, data=data)
    printer.value("eval", table)
    title, columns, rows = evaluation_rows(table)
    printer.table(title, columns, rows)
    printer.notes(table.notes)
    return 0
