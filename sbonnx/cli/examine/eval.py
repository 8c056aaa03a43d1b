"""``sbonnx eval``: compute a metric of one or several models on labelled data."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx.cli import options
from sbonnx.cli.evaluation import evaluation_data
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError
from sbonnx.present.text.tables import evaluation_rows

HELP: Final = "Compute a metric on labelled data. Models side by side, with 95 % intervals."

MODELS: Final[CommandOption[list[Path]]] = CommandOption(
    "models",
    (),
    list[Path],
    "Float or quantized models; the first is the reference. The last path is the data if --data is not given.",
    "MODEL...",
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
    from sbonnx import graph as graphs
    from sbonnx.calib.data import with_preprocess
    from sbonnx.verify import labelled
    from sbonnx.verify.runtimes import chosen_runtime

    models, named = given[MODELS], given[options.METRIC]
    if named is None:
        raise RecipeError("--metric is missing: name what to compute, such as --metric top1")
    labelled_data: Any = None
    if given.data() is None and len(models) > 1 and models[-1].suffix != ".onnx":
        *models, last = models
        labelled_data = with_preprocess(last, given[options.PREPROCESS])
    data = evaluation_data(given, labelled_data or given.required_data(), named, given[options.SPLIT])
    data = replace(data, limit=given[options.SAMPLES])
    for model in models:
        graphs.load(model)  # validates the file, for a clear error message
    device = given[options.DEVICE] or "cpu"
    runtimes = {str(model): chosen_runtime(given[options.RUNTIME], [model], device=device) for model in models}
    progress = given.progress()
    try:
        progress.start("evaluation", None)
        names = {str(model): model for model in models}
        evaluation = labelled.evaluate(names, data, device=device, feeds_done=progress.advance, runtimes=runtimes)
    finally:
        progress.close()
    printer = given.printer()
    used = tuple(runtimes[str(model)] for model in models)
    printer.value("eval", labelled.MetricTable(**vars(evaluation), runtimes=used))
    title, columns, rows = evaluation_rows(evaluation)
    printer.table(title, columns, rows)
    return 0
