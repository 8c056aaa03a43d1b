"""``bench``: latency and throughput of one model, or of several run alternately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sbonnx import graph as graphs
from sbonnx.api.arguments import File, Shapes, feeds_of, known_keywords, listed, model_files, random_inputs, reading
from sbonnx.calib.data import Preprocessing
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.progress import Progress, Silent, shown_by_default
from sbonnx.verify import Feeds
from sbonnx.verify.benchmark import Benchmark, Speed, benchmark
from sbonnx.verify.runtimes import CPU, chosen_runtime

Numbers = int | str | Sequence[int]
"""A number of 1 or more, several, or text such as ``1,4``."""


@known_keywords
@shown_by_default
def bench(
    models: ModelSource | Sequence[ModelSource],
    data: Any = None,
    *,
    threads: Numbers = 1,
    batch: Numbers | None = None,
    seconds: float = 2.0,
    split: int | None = None,
    samples: int | None = None,
    preprocess: Preprocessing | None = None,
    device: str = CPU,
    runtime: str | None = None,
    shape: Shapes | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    ort_libraries: Sequence[File] = (),
) -> Benchmark:
    """Measure latency and throughput. Several models run alternately, and are compared with the first.

    Args:
        models: path of an ONNX file, or several, such as the float and the quantized one; or models in memory.
        data: feeds, as calibration data of `sbonnx.quantize`, the first `samples` of which are run; None: a random one.
        threads: threads inside operators; several: each is measured.
        batch: samples of a run; several: each is measured. None: 1, or that of the data.
        seconds: time limit of each measurement.
        split, preprocess: see `sbonnx.quantize`.
        samples: number of feeds, which run in turn; None: the first alone.
        device: "cpu", "cuda" or "auto".
        runtime: "onnxruntime" or "openvino"; None: that of the files' backend if it is installed, else onnxruntime.
        shape, seed: random inputs: shapes of inputs with dynamic axes by name, seed of the values.
        progress: receiver of progress updates; None: a bar in notebooks and on terminals.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    sources, progress = listed(models), progress or Silent()
    counts = _numbers("--threads", threads)
    if batch is not None and split is not None:
        raise DataError("--batch and --split are both the samples of a run: drop one")
    batches: list[int | None] = [split] if batch is None else [*_numbers("--batch", batch)]
    if seconds <= 0:
        raise DataError(f"--seconds {seconds}: the time limit is above 0")

    if samples is not None and (data is None or samples < 1):
        raise DataError(
            f"--samples {samples}: {'give --data with it' if data is None else 'use a number of 1 or more'}"
        )

    def feeds_of_batch(graph: Graph, size: int | None) -> list[Feeds]:
        if data is None:
            return [random_inputs(graph, batch=size or 1, shape=shape, seed=seed)]
        return list(feeds_of(data, graph, preprocess=preprocess, split=size, samples=samples or 1))

    rows: list[Speed] = []
    with reading(ort_libraries=ort_libraries), model_files(*sources) as (files, names):
        graph, *_ = [graphs.load(file, opset=1) for file in files]  # validates the files, for clear error messages
        runtime = chosen_runtime(runtime, files, device=device)
        progress.start("benchmark", len(batches) * len(counts))
        for size in batches:
            feeds = feeds_of_batch(graph, size)
            for count in counts:
                speeds = benchmark(files, feeds, threads=count, seconds=seconds, device=device, runtime=runtime)
                rows += [replace(speed, model=name) for speed, name in zip(speeds, names, strict=True)]
                progress.advance()
    return Benchmark(names, runtime, tuple(rows))


def _numbers(flag: str, value: Numbers) -> list[int]:
    """Parse ``1,2,4``.

    Raises:
        DataError: it is no list of numbers of 1 or more.
    """
    parts = str(value).split(",") if isinstance(value, (int, str)) else list(map(str, value))
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if not numbers or not all(numbers):
        raise DataError(f"{flag} is a number of 1 or more, or several separated by commas, got '{value}'")
    return numbers
