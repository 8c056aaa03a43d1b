"""``sbonnx bench``: latency and throughput of one model, or of several run alternately."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.examine.run import SEED, SHAPE, random_feeds
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import DataError

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.verify import Feeds
    from sbonnx.verify.benchmark import Speed

HELP: Final = "Measure latency and throughput. Several models run alternately, compared with the first."

MODELS: Final[CommandOption[list[Path]]] = CommandOption(
    "models",
    (),
    list[Path],
    "The models, such as the float and the quantized one; the first is the reference.",
    "MODEL...",
    inspect.Parameter.empty,
)
THREADS: Final = options.setting("--threads N[,N...]", "1", "Threads inside operators; several: measure each.")
BATCH: Final = options.option(
    "--batch N[,N...]", str, "Samples of a run; several: measure each.", shown="1, or that of the data"
)
SECONDS: Final = options.setting("--seconds S", 2.0, "Time limit of each measurement.")

OPTIONS: Final = (
    MODELS,
    options.DATA,
    THREADS,
    BATCH,
    SECONDS,
    options.SPLIT,
    options.PREPROCESS,
    options.DEVICE,
    options.RUNTIME,
    SHAPE,
    SEED,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.verify.benchmark import Benchmark, benchmark
    from sbonnx.verify.runtimes import chosen_runtime

    printer, models = given.printer(), given[MODELS]
    threads = _numbers("--threads", given[THREADS])
    if given[BATCH] is not None and given[options.SPLIT] is not None:
        raise DataError("--batch and --split are both the samples of a run: drop one")
    batches: list[int | None] = [given[options.SPLIT]]
    if given[BATCH] is not None:
        batches = [*_numbers("--batch", given[BATCH])]
    if given[SECONDS] <= 0:
        raise DataError(f"--seconds {given[SECONDS]}: the time limit is above 0")
    loaded = [graphs.load(model, opset=1) for model in models]  # validates the files, for clear error messages
    device = given[options.DEVICE] or "cpu"
    runtime = chosen_runtime(given[options.RUNTIME], models, device=device)
    feeds = [_feed(given, loaded[0], batch) for batch in batches]
    rows: list[Speed] = []
    progress = given.progress()
    try:
        progress.start("benchmark", len(feeds) * len(threads))
        for feed in feeds:
            for count in threads:
                seconds = given[SECONDS]
                rows += benchmark(models, feed, threads=count, seconds=seconds, device=device, runtime=runtime)
                progress.advance()
    finally:
        progress.close()
    printer.value("bench", Benchmark(tuple(map(str, models)), runtime, tuple(rows)))
    for text in _summary(rows, models):
        printer.line(text)
    inputs = "random inputs" if given[options.DATA] is None else "data"
    printer.table(
        f"latency in milliseconds in {runtime}, with 95 % intervals ({inputs})",
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
            for place, row in enumerate(rows)
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


def _feed(given: Arguments, graph: Graph, batch: int | None) -> Feeds:
    """Return the feed of a batch size: the first of the data, or a random one."""
    source = given.data()
    if source is None:
        return random_feeds(given, graph, batch or 1)
    from sbonnx.calib.data import dataset as datasets

    return next(iter(datasets.read(source, graph, split=batch, limit=1)))


def _numbers(flag: str, text: Any) -> list[int]:
    """Parse ``1,2,4``.

    Raises:
        DataError: text that is no list of numbers of 1 or more.
    """
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in str(text).split(",")]
    if not all(numbers):
        raise DataError(f"{flag} is a number of 1 or more, or several separated by commas, got '{text}'")
    return numbers
