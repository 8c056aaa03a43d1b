"""``sbonnx demo``: quantize the bundled digits model for every backend and evaluate it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import OutputError
from sbonnx.present.text.printer import Printer, decibels
from sbonnx.present.text.tables import percent

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
    rows = [{"model": "float", "accuracy": _accuracy(floats, paths), "bytes": floats.stat().st_size, "file": floats}]
    try:
        for backend in BACKENDS:
            rows.append(_quantized(backend, floats, paths, out / f"digits_{backend}.onnx", given.progress()))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the files in '{out}' are complete, but some are missing") from None
    problems = _problems(rows)
    printer.value(
        "demo", {"models": rows, "problems": problems, "ok": not problems, "seconds": time.perf_counter() - begin}
    )
    _tables(printer, rows)
    for row in rows:
        printer.line(f"{row['model']}: {row['file']}")
    printer.line(f"finished in {time.perf_counter() - begin:.0f} s")
    return printer.problems(problems)


def _quantized(backend: str, floats: Path, paths: DigitsPaths, target: Path, progress: Progress) -> dict[str, Any]:
    """Build one row of the table: quantize, then evaluate on images that were not used for calibration."""
    from sbonnx import verify
    from sbonnx.api import quantize
    from sbonnx.verify.runtimes import exact_products

    try:
        report = quantize(
            floats, paths.calib, backend=backend, output=target, force=True, split=BATCH, progress=progress
        )
    finally:
        progress.close()
    comparison = verify.compare(floats, target, [{"image": _evaluation(paths)[0]}], exact=exact_products(target))
    keys = ("node", "tensor", "label", "alone_db", "sqnr_db")
    return {
        "model": backend,
        "accuracy": _accuracy(target, paths),
        "agreement": comparison.outputs[0].agreement,
        "sqnr_db": comparison.outputs[0].sqnr_db,
        "bytes": comparison.bytes_quantized,
        "latency_ratio": comparison.latency_ratio if backend == comparison.runtime else None,  # if it ran the file
        "worst": [{key: getattr(row, key) for key in keys} for row in report.layers[:WORST]],
        "file": target,
        "problems": report.problems,
    }


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


def _problems(rows: list[dict[str, Any]]) -> list[str]:
    problems = [f"{row['model']}: {problem}" for row in rows for problem in row.get("problems", ())]
    reference = rows[0]["accuracy"]
    for row in rows[1:]:
        lost = reference - row["accuracy"]
        if lost > MOST_LOST:
            problems.append(f"{row['model']} loses {100 * lost:.1f} percentage points of accuracy against float")
    return problems


def _tables(printer: Printer, rows: list[dict[str, Any]]) -> None:
    from sbonnx.progress import size_text

    size = rows[0]["bytes"]
    printer.table(
        "handwritten digits, 8 bits: 450 images that were not used for training or calibration",
        ("model", "accuracy", "agreement with float", "SQNR, dB", "size", "size ratio", "latency ratio"),
        [
            (
                row["model"],
                percent(row["accuracy"]),
                percent(row.get("agreement")),
                row.get("sqnr_db"),
                size_text(row["bytes"]),
                f"{row['bytes'] / size:.2f}",
                None if row.get("latency_ratio") is None else f"{row['latency_ratio']:.2f}",
            )
            for row in rows
        ],
    )
    printer.table(
        "worst layers (SQNR, dB)",
        ("model", "node", "tensor", "type", "isolated", "accumulated"),
        [
            (
                row["model"],
                *(worst[key] for key in ("node", "tensor", "label")),
                *map(decibels, (worst["alone_db"], worst["sqnr_db"])),
            )
            for row in rows[1:]
            for worst in row["worst"]
        ],
    )
