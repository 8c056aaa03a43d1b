"""``sbonnx bench``: latency and throughput of one model, or of several run alternately."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.examine.run import SEED, SHAPE, shapes_of
from sbonnx.cli.options import Arguments, CommandOption

if TYPE_CHECKING:
    from sbonnx.verify.benchmark import Speed

HELP: Final = "Measure latency and throughput. Several models run alternately, compared with the first."

MODELS: Final[CommandOption[list[Path]]] = CommandOption(
    "models",
    (),
    list[Path],
    "The models, such as the float and the quantized one; the first is the reference.",
    "MODEL",
    inspect.Parameter.empty,
)
THREADS: Final = options.setting("--threads N[,N...]", "1", "Threads inside operators; several: measure each.")
BATCH: Final = options.option(
    "--batch N[,N...]", str, "Samples of a run; several: measure each.", shown="1, or that of the data"
)
SECONDS: Final = options.setting("--seconds S", 2.0, "Time limit of each measurement.")
SAMPLES: Final = options.option("--samples N", int, "Run the first N feeds of the data in turn; default: the first.")

OPTIONS: Final = (
    MODELS,
    options.DATA,
    THREADS,
    BATCH,
    SECONDS,
    options.SPLIT,
    SAMPLES,
    options.PREPROCESS,
    options.DEVICE,
    options.RUNTIME,
    SHAPE,
    SEED,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx.api.speed_comparison import bench

    printer, models = given.printer(), given[MODELS]
    result = given.call(bench, shape=shapes_of(given[SHAPE] or ()))
    printer.value("bench", result)
    for text in _summary(result.rows, models):
        printer.line(text)
    inputs = "random inputs" if given[options.DATA] is None else "data"
    printer.table(
        f"latency in milliseconds in {result.runtime}, with 95 % intervals ({inputs})",
        ("model", "threads", "batch", "median", "interval", "best", "95th percentile", "samples/s", *_ratio(models)),
        [
            (
                row.model,
                row.threads,
                row.batch,
                row.median_ms,
                _range(row.interval_ms),
                row.best_ms,
                row.p95_ms,
                f"{row.samples_per_second:,.0f}" if row.samples_per_second >= 100 else row.samples_per_second,
                *_ratio(models, _ratio_text(row) if row.model != str(models[0]) else ""),
            )
            for place, row in enumerate(result.rows)
        ],
    )
    return 0


def _summary(rows: Sequence[Speed], models: list[Path]) -> list[str]:
    """Return a line for each model but the first: how it compares with the first, in the first setting."""
    if len(models) == 1:
        return [f"{models[0]}: {rows[0].median_ms:.3g} ms a run"]
    others = [row for row in rows[: len(models)] if row.model != str(models[0])]
    return [f"{row.model} takes {_ratio_text(row, f' times as long as {models[0]}')}" for row in others]


def _ratio(models: list[Path], text: str = "time relative to the first") -> tuple[str, ...]:
    """Return the last column, which one model alone does not have."""
    return (text,) if len(models) > 1 else ()


def _ratio_text(row: Speed, words: str = "") -> str:
    from sbonnx.report.verdict import interval_text

    low, high = row.ratio_interval
    return f"{row.ratio:.3g}{words}{interval_text(low, high, more='the machine is busy' if row.busy else '')}"


def _range(interval: tuple[float, float]) -> str:
    from sbonnx.report.verdict import interval_text

    return interval_text(*interval).strip(" ()")
