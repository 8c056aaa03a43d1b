"""``sbonnx demo``: quantize the bundled digits model for every backend and evaluate it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import Interrupted, OutputError
from sbonnx.present.text.printer import Printer, decibels
from sbonnx.present.text.tables import percent
from sbonnx.values import INLINE

if TYPE_CHECKING:
    from sbonnx.assets import DigitsPaths
    from sbonnx.progress import Progress

HELP: Final = "Quantize the bundled model for every backend. Handwritten digits, each result compared with float."

MOST_LOST: Final = 0.02
"""Maximum loss of accuracy against float: 2 points."""

WORST: Final = 3
"""Worst layers shown for each backend."""

BATCH: Final = 32


OUT: Final = replace(
    options.setting("--out DIR", Path("sbonnx-demo"), "Output folder; files of an earlier demo are replaced."),
    writes=True,
    typed=True,
)

OPTIONS: Final = (OUT, *options.COMMON)


@dataclass(frozen=True)
class WorstLayer:
    """A layer.

    Attributes:
        node, tensor, label: node, quantized tensor and its type.
        alone_db, sqnr_db: isolated and accumulated signal-to-noise ratio in dB.
    """

    node: str
    tensor: str
    label: str
    alone_db: float
    sqnr_db: float


@dataclass(frozen=True)
class DemoFigures:
    """Figures of a quantized model.

    Attributes:
        agreement: share of samples with the class of float.
        sqnr_db: signal-to-noise ratio in dB.
        latency_ratio: latency relative to float.
        worst: layers with the largest error.
        problems: reasons why the result is unusable.
    """

    agreement: float | None
    sqnr_db: float
    latency_ratio: float | None
    worst: tuple[WorstLayer, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class DemoRow:
    """A model of the demo.

    Attributes:
        model: "float", or the runtime.
        accuracy: share of correct classes.
        bytes: size of the file.
        file: the file.
        figures: of a quantized model; None for float.
    """

    model: str
    accuracy: float
    bytes: int
    file: str
    figures: DemoFigures | None = field(default=None, metadata=INLINE)


@dataclass(frozen=True)
class DemoOutput:
    """Output of demo.

    Attributes:
        models: the float model, then one for each runtime.
        problems: reasons why a result is unusable.
        ok: whether there are no problems.
        seconds: duration.
    """

    models: tuple[DemoRow, ...]
    problems: tuple[str, ...]
    ok: bool
    seconds: float


def run(given: Arguments) -> int:
    from sbonnx.assets import digits
    from sbonnx.backends import BACKENDS
    from sbonnx.graph.storage.output_files import write_bytes

    printer, out = given.printer(), given[OUT]
    begin = time.perf_counter()
    paths = digits()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the folder '{out}' cannot be created: {error.strerror or error}") from error
    floats = out / "digits_float.onnx"
    write_bytes(floats, paths.model.read_bytes())
    rows = [DemoRow("float", _accuracy(floats, paths), floats.stat().st_size, str(floats))]
    try:
        for backend in BACKENDS:
            rows.append(_quantized(backend, floats, paths, out / f"digits_{backend}.onnx", given.progress()))
    except KeyboardInterrupt:
        raise Interrupted(f"the files in '{out}' are complete, but some are missing") from None
    problems = _problems(rows)
    seconds = time.perf_counter() - begin
    printer.value("demo", DemoOutput(tuple(rows), problems, ok=not problems, seconds=seconds))
    _tables(printer, rows)
    for row in rows:
        printer.line(f"{row.model}: {row.file}")
    printer.line(f"finished in {time.perf_counter() - begin:.0f} s")
    return printer.problems(problems)


def _quantized(backend: str, floats: Path, paths: DigitsPaths, target: Path, progress: Progress) -> DemoRow:
    """Build one row of the table: quantize, then evaluate on images that were not used for calibration."""
    from sbonnx import verify
    from sbonnx.api.create import quantize
    from sbonnx.verify.runtimes import exact_products

    try:
        report = quantize(
            floats, paths.calib, target, recipe={"BACKEND": backend}, force=True, split=BATCH, progress=progress
        )
    finally:
        progress.close()
    judged = verify.VerifyOptions(exact=exact_products(target))
    comparison = verify.compare(floats, target, [{"image": _evaluation(paths)[0]}], options=judged)
    output = comparison.outputs[0]
    figures = DemoFigures(
        output.agreement,
        output.sqnr_db,
        comparison.latency_ratio if backend == comparison.runtime else None,  # if it ran the file
        tuple(WorstLayer(row.node, row.tensor, row.label, row.alone_db, row.sqnr_db) for row in report.layers[:WORST]),
        report.problems,
    )
    return DemoRow(backend, _accuracy(target, paths), comparison.bytes_quantized, str(target), figures)


def _evaluation(paths: DigitsPaths) -> tuple[Any, Any]:
    import numpy as np

    with np.load(paths.eval) as arrays:
        return arrays["image"], arrays["label"]


def _accuracy(model: Path, paths: DigitsPaths) -> float:
    from sbonnx.calib.engine.runner import LayerRunner
    from sbonnx.graph import load

    images, labels = _evaluation(paths)
    with LayerRunner(load(model)) as session:
        scores = session({"image": images})["scores"]
    return float((scores.argmax(1) == labels).mean())


def _problems(rows: list[DemoRow]) -> tuple[str, ...]:
    problems = [f"{row.model}: {problem}" for row in rows if row.figures for problem in row.figures.problems]
    for row in rows[1:]:
        lost = rows[0].accuracy - row.accuracy
        if lost > MOST_LOST:
            problems.append(f"{row.model} loses {100 * lost:.1f} percentage points of accuracy against float")
    return tuple(problems)


def _tables(printer: Printer, rows: list[DemoRow]) -> None:
    from sbonnx.system.sizes import size_text

    size = rows[0].bytes
    quantized = [(row.model, row.figures) for row in rows if row.figures is not None]
    printer.table(
        "handwritten digits, 8 bits: 450 images that were not used for training or calibration",
        ("model", "accuracy", "agreement with float", "SQNR, dB", "size", "size ratio", "latency ratio"),
        [
            (
                row.model,
                percent(row.accuracy),
                *((None, None) if row.figures is None else (percent(row.figures.agreement), row.figures.sqnr_db)),
                size_text(row.bytes),
                f"{row.bytes / size:.2f}",
                f"{ratio:.2f}" if row.figures and (ratio := row.figures.latency_ratio) is not None else None,
            )
            for row in rows
        ],
    )
    printer.table(
        "worst layers (SQNR, dB)",
        ("model", "node", "tensor", "type", "isolated", "accumulated"),
        [
            (model, layer.node, layer.tensor, layer.label, decibels(layer.alone_db), decibels(layer.sqnr_db))
            for model, figures in quantized
            for layer in figures.worst
        ],
    )
