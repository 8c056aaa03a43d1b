"""One file in several runtimes: outputs against float and against the reference, and the operators that differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sbonnx.backends.fixed_shapes import open_for
from sbonnx.backends.runtime_types import Runtime
from sbonnx.errors import SbonnxError
from sbonnx.metrics import OutputDifferences
from sbonnx.report.comparison import Portability, RuntimeRow, RuntimeState
from sbonnx.report.figures import Evaluation
from sbonnx.runtimes.first_difference import first_difference
from sbonnx.runtimes.ort_variants import ORT_REFERENCE
from sbonnx.spec import Array
from sbonnx.verify.file_check import FLOAT
from sbonnx.verify.labelled.evaluation import EvaluationData, evaluate
from sbonnx.verify.sessions import output_names, run, session

FEEDS: Final = 4
"""Maximum number of feeds that each runtime runs."""

MARGIN_DB: Final = 10.0
"""Outputs that are nearer to the reference than the reference is to float, by this, are equal up to rounding. Chosen on
small networks: others are examined operator by operator."""

LOSS_DB: Final = 3.0
"""Loss of SQNR against float, of the reference's, that no sum of rounding differences explains. Chosen on ResNet-20:
saturating products lose 15 dB there, and OpenVINO and the levels of onnxruntime at most 2.3 dB."""

Feeds = Mapping[str, Array]


def portability(
    float_model: Path | bytes,
    file: Path,
    data: Iterable[Feeds],
    runtimes: Sequence[Runtime],
    evaluation: EvaluationData | None = None,
) -> Portability:
    """Run a file in several runtimes, and find the operators that differ.

    Args:
        float_model: the model that it was quantized from.
        data: feeds; the first `FEEDS` are run.
        evaluation: labelled data and a metric, which is computed in each runtime.

    Raises:
        ModelError, DataError: the reference cannot run the file, or onnxruntime the float model.
    """
    feeds = list(islice(iter(data), FEEDS))
    opened = session(float_model)
    names, floats = output_names(opened), _outputs(opened, feeds)
    reference = _outputs(ORT_REFERENCE.open(file, None), feeds)
    own = _lowest(names, floats, reference)
    rows = []
    for runtime in runtimes:
        why = runtime.absent()
        if why is not None:
            rows.append(RuntimeRow(runtime.name, runtime.title, "absent", why=why))
            continue
        try:
            rows.append(_row(runtime, file, feeds, names, floats, reference, own))
        except SbonnxError as error:
            rows.append(RuntimeRow(runtime.name, runtime.title, "refused", why=str(error)))
    ran = [runtime for runtime, row in zip(runtimes, rows, strict=True) if row.sqnr_db is not None]
    metric = None if evaluation is None else _metric(float_model, file, ran, evaluation)
    return Portability(ORT_REFERENCE.name, len(feeds), tuple(rows), metric)


def _metric(
    float_model: Path | bytes, file: Path, runtimes: Sequence[Runtime], evaluation: EvaluationData
) -> Evaluation:
    """Compute a metric of the float model in onnxruntime, and of the file in each runtime."""
    models = {FLOAT: float_model, **{runtime.name: file for runtime in runtimes}}
    return evaluate(models, evaluation, runtimes={runtime.name: runtime for runtime in runtimes})


def _row(
    runtime: Runtime,
    file: Path,
    feeds: Sequence[Feeds],
    names: list[str],
    floats: list[list[Any]],
    reference: list[list[Any]],
    own: float,
) -> RuntimeRow:
    opened = open_for(runtime, file, feeds[0])
    if not runtime.executes():
        return RuntimeRow(runtime.name, runtime.title, "built", fallback=opened.fallback())
    outputs = _outputs(opened, feeds)
    from_float, from_reference = _lowest(names, floats, outputs), _lowest(names, reference, outputs)
    state: RuntimeState = "same" if from_reference == math.inf else "rounding"
    differs = None
    if from_reference < own + MARGIN_DB:
        distances = [_lowest(names, [expected], [values]) for expected, values in zip(reference, outputs, strict=True)]
        differs = first_difference(runtime, file, feeds[distances.index(min(distances))])
        state = "differs" if differs is not None or from_float < own - LOSS_DB else "rounding"
    fallback = opened.fallback()
    return RuntimeRow(runtime.name, runtime.title, state, from_float, from_reference, fallback, differs)


def _outputs(opened: Any, feeds: Sequence[Feeds]) -> list[list[Any]]:
    return [run(opened, feed, number) for number, feed in enumerate(feeds)]


def _lowest(names: list[str], reference: list[list[Any]], value: list[list[Any]]) -> float:
    """Return the lowest SQNR of an output in dB."""
    differences = OutputDifferences(names)
    for expected, other in zip(reference, value, strict=True):
        differences.add(expected, other)
    return min((-math.inf if row.lost else row.sqnr_db for row in differences.result()), default=math.inf)
