"""`check` and `compare`: a quantized file against its float model, at every optimization level of onnxruntime."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.backends import BACKENDS
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import check_file, read_proto
from sbonnx.graph.storage.model_file import open_model
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.metrics import OutputDifferences
from sbonnx.ops import INTEGER_PRODUCTS
from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import LevelDifference, OutputDifference, OutputQuality
from sbonnx.report.verdict import ON_CPU
from sbonnx.system.cpu import target_cpu
from sbonnx.verify.intervals import UNKNOWN
from sbonnx.verify.labelled.conversions import readers_of
from sbonnx.verify.natures import CLASSES
from sbonnx.verify.ort_options import ALL_TRANSFORMERS, VerifyOptions
from sbonnx.verify.quality import QualitySamples
from sbonnx.verify.sessions import (
    ENDS,
    LEVEL_NAMES,
    MANY_NODES,
    OPTIMIZED,
    Feeds,
    Latency,
    Models,
    file_bytes,
    interface,
    output_names,
    run,
    same_interface,
    session,
    side_by_side,
)

FEEDS: Final = 4
"""Maximum number of feeds run at every level."""

SECONDS: Final = 0.05
"""Time in seconds after which level "off", the slowest, starts no further feed; the others run the same number."""

FLOAT: Final = "float"


class Interface(Exception):
    """Raised for a level at which the quantized model's inputs or outputs differ from those of the float model."""


def differences(
    models: Models,
    data: Iterable[Feeds],
    *,
    limit: int | None,
    strict: bool = True,
    keep_io: bool = True,
) -> tuple[LevelDifference, ...]:
    """Compare the outputs at each of `models.levels` with the float model and with the first of those levels.

    Args:
        data: feeds; the first `FEEDS` are run, or `limit` if that is less.
        strict: the interface must be that of the float model, at every level.
        keep_io: with `strict`: the float types of inputs and outputs must also be equal.

    Raises:
        Interface: an interface differs, with `strict`.
        ModelError: the quantized model does not load at some level.
        DataError: a model cannot run on a feed.
    """
    most = FEEDS if limit is None else min(FEEDS, limit)
    rows: list[LevelDifference] = []
    with TensorStore(WAITING_BYTES) as store:
        base = models.levels[0]
        opened = models.open_quantized(base)
        offered = interface(opened, keep_io=keep_io)
        done = _run(store, base, opened, islice(iter(data), most), SECONDS)
        opened = None  # release a session before the next is opened
        opened = models.open_float()
        wanted, names = interface(opened, keep_io=keep_io), output_names(opened)
        _run(store, FLOAT, opened, islice(iter(data), done))
        for level in models.levels:
            if level != base:
                opened = None
                opened = models.open_quantized(level)
                offered = interface(opened, keep_io=keep_io)
                _run(store, level, opened, islice(iter(data), done))
            if strict and not same_interface(offered, wanted):
                raise Interface(level)
            if len(offered[1]) == len(names):
                rows.extend(_rows(level, base, names, done, store))
    return tuple(rows)


def _run(store: TensorStore, who: str, model: Any, data: Iterator[Feeds], seconds: float = math.inf) -> int:
    """Run at least one feed, until the feeds or the time are used up. Store the outputs that are float tensors.

    Other outputs are skipped: a changed index is not a measure of error.
    """
    begin, done = time.perf_counter(), 0
    for feeds in data:
        for place, output in enumerate(run(model, feeds, done)):
            if isinstance(output, np.ndarray) and output.dtype.kind == "f":
                store.put((who, done, place), output)
        done += 1
        if time.perf_counter() - begin > seconds:
            break
    return done


def _rows(level: str, base: str, names: list[str], done: int, store: TensorStore) -> Iterator[LevelDifference]:
    """Compare one level's outputs, if they have the same shape as in float."""
    errors_by_level = {}
    for reference in (FLOAT, base):
        errors = OutputDifferences(names)
        for index in range(done):
            errors.add(_kept(store, reference, index, names), _kept(store, level, index, names))
        errors_by_level[reference] = {error.name: error for error in errors.result() if error.compared}
    for name, error in errors_by_level[FLOAT].items():
        other = errors_by_level[base].get(name)
        if other is not None:
            yield LevelDifference(level, name, error.sqnr_db, other.sqnr_db, other.max_abs, done)
    if level != base:
        for index in range(done):
            for place in range(len(names)):
                store.drop((level, index, place))


def _kept(store: TensorStore, who: str, index: int, names: list[str]) -> list[Any]:
    keys = [(who, index, place) for place in range(len(names))]
    return [store.get(key) if key in store else None for key in keys]


TOGETHER_BYTES: Final = 1 << 30
"""Total size in bytes above which models are opened one after the other, without a latency measurement."""

WAITING_BYTES: Final = 256 << 20
"""Memory in bytes for outputs that are stored until the other model has run."""


@dataclass(frozen=True)
class Depth:
    """Optional measurements of `compare`, in addition to the outputs.

    Attributes:
        latency: the latency ratio.
        levels: the first feeds at every optimization level.
        kernels: the integer kernels.
        strict: with `levels`: inputs and outputs must be the same at each level, including types and shapes.
        keep_io: with `strict`: float types must also be equal; else they may be narrower than in the float model.
        limit: maximum number of feeds of each set; None: all.
    """

    latency: bool = True
    levels: bool = False
    kernels: bool = False
    strict: bool = False
    keep_io: bool = True
    limit: int | None = None


def compare(
    float_model: Path | bytes,
    quantized: Path,
    data: Iterable[Feeds] | None,
    *,
    seen: Iterable[Feeds] | None = None,
    timed: Feeds | None = None,
    depth: Depth = Depth(),
    options: VerifyOptions = ALL_TRANSFORMERS,
) -> Comparison:
    """Run both models on the same feeds and measure the differences of the outputs.

    Args:
        float_model, quantized: files (the float one may be a serialized model).
        data: feeds as the sessions take them; iterated more than once. None: nothing is run.
        seen: calibration feeds, for `Comparison.calibration`, if `data` is a hold-out set.
        timed: the feed for the latency measurement; None: the first of `data`.
        depth: optional measurements, and the number of feeds.
        options: device and runtime, transformers to disable, tasks of the outputs. Of a file that `check` compares,
            whether it is also opened with all transformers, as users do.

    Raises:
        RecipeError: an output cannot have the task that is given.
        ModelError: a model does not load, or the interfaces differ.
        DeviceError: the runtime is not installed.
        DataError: there are no feeds, or a model cannot run one.
    """
    exact, limit = options.exact, depth.limit
    read, own = read_proto(quantized), BACKENDS[options.runtime].runtime
    sizes = file_bytes(float_model) if isinstance(float_model, Path) else len(float_model), file_bytes(quantized, read)
    together = sum(sizes) <= TOGETHER_BYTES
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder()) if depth.kernels else None
        # with one model open at a time the graph of level "all" is not written, and kernels are counted in "extended"
        levels = ENDS if together and len(read.graph.node) > MANY_NODES else LEVEL_NAMES
        if exact and not target_cpu().exact and any(node.op_type in INTEGER_PRODUCTS for node in read.graph.node):
            levels = OPTIMIZED  # at the others, onnxruntime ignores its option for exact products
        models = Models(
            float_model,
            quantized,
            options.device,
            options.without,
            together,
            folder,
            levels,
            data is not None,
            own,
            exact,
        )
        rows: tuple[LevelDifference, ...] = ()
        feed = None if data is None else next(iter(data), None)
        if together and feed is not None:
            models.leave_out_broken(feed)
        if depth.levels:
            try:
                rows = differences(models, data or (), limit=limit, strict=depth.strict, keep_io=depth.keep_io)
            except Interface as error:
                text = f"inputs or outputs of {models.quantized} are not those of the float model"
                raise ModelError(f"{text} (at optimisation level '{error}')") from error
        outcome = _Outcome()
        took, done = Latency(), [0]
        if data is not None:
            sets = [partial(islice, feeds, limit) for feeds in ([data] if seen is None else [data, seen])]
            outcome, done = (_together if together else _apart)(models, sets, options)
            if not done[0]:
                raise DataError("there is nothing to compare: the data has no feeds")
            if depth.latency and together and (own is not None or not models.saturating):
                feed = next(iter(data)) if timed is None else timed
                took = side_by_side(models.executed_float(), models.executed(), feed)
        return Comparison(
            outputs=outcome.differences,
            calibration=outcome.calibration,
            quality=outcome.quality,
            feeds=done[0],
            bytes_float=sizes[0],
            bytes_quantized=sizes[1],
            ms_float=took.best[0],
            ms_quantized=took.best[1],
            median_ms_float=took.middle[0],
            median_ms_quantized=took.middle[1],
            latency_runs=took.runs,
            latency_ratio=took.ratio or None,
            latency_interval=took.interval if took.interval != UNKNOWN else None,
            busy=took.busy,
            levels=rows,
            levels_left_out=tuple(level for level in LEVEL_NAMES if depth.levels and level not in levels),
            kernels=models.kernels(read) if depth.kernels else None,
            dot_product=target_cpu().exact if exact is None else exact,
            saturating=tuple(models.saturating) if own is None else (),
            unknown_sums=tuple(models.unknown_sums) if own is None else (),
            broken_in_float=models.broken_in_float,
            runtime=ON_CPU if own is None else options.runtime,
        )


def check(
    float_model: Path | bytes,
    quantized: Path,
    data: Iterable[Feeds] | None,
    *,
    seen: Iterable[Feeds] | None = None,
    timed: Feeds | None = None,
    depth: Depth = Depth(),
    options: VerifyOptions = ALL_TRANSFORMERS,
) -> Comparison:
    """Validate the file with onnx.checker (full check) and compare interface and outputs with all of `Depth`.

    Args:
        depth: whether there is a latency, the maximum number of feeds, and whether float types must be equal.

    Other arguments are those of `compare`.

    Raises:
        ModelError: the file is not valid, does not load at some level, or its interface changed.
    """
    check_file(quantized)
    if options.without and options.opens:
        session(quantized, device=options.device, packs=data is not None, exact=options.exact)
    depth = replace(depth, levels=True, kernels=True, strict=True)
    return compare(float_model, quantized, data, seen=seen, timed=timed, depth=depth, options=options)


@dataclass(frozen=True)
class _Outcome:
    """Differences of the outputs on the compared feeds, on calibration feeds, and quality on the compared feeds."""

    differences: tuple[OutputDifference, ...] = ()
    calibration: tuple[OutputDifference, ...] = ()
    quality: tuple[OutputQuality, ...] = ()


class _OutputSums:
    """Accumulates the outputs of each set of feeds; the first set is the compared one."""

    def __init__(self, models: Models, names: list[str], sets: int, options: VerifyOptions) -> None:
        floats = models.floats
        read = open_model(floats).model if isinstance(floats, Path) else onnx.load_from_string(floats)
        self._differences = [OutputDifferences(names) for _ in range(sets)]
        self._quality = QualitySamples(names, read, options.task, readers_of(floats).graph, options.head)

    def add(self, which: int, reference: list[Any], value: list[Any], feeds: Feeds) -> None:
        self._differences[which].add(reference, value)
        if which == 0:
            self._quality.add(reference, value, feeds)

    def result(self) -> _Outcome:
        """Return the differences; only outputs of classes have an agreement, that of their quality."""
        quality = self._quality.result()
        agreements = {output.name: output.figure("agreement") for output in quality if output.nature in CLASSES}
        classes = {output.name for output in quality if output.nature == "classes"}
        sets = [
            tuple(error if error.name in classes else replace(error, agreement=None) for error in errors.result())
            for errors in self._differences
        ]
        sets[0] = tuple(
            replace(error, agreement=figure.value) if (figure := agreements.get(error.name)) is not None else error
            for error in sets[0]
        )
        return _Outcome(sets[0], sets[1] if len(sets) > 1 else (), quality)


def _together(
    models: Models, sets: Sequence[Callable[[], Iterator[Feeds]]], options: VerifyOptions
) -> tuple[_Outcome, list[int]]:
    """Run both models on each feed of each set. Return the differences, and the number of feeds per set."""
    float_model, quantized_model = models.open_float(), models.executed()
    names = _same_outputs(output_names(float_model), output_names(quantized_model))
    sums, done = _OutputSums(models, names, len(sets), options), []
    for which, walk in enumerate(sets):
        count = 0
        for feeds in walk():
            sums.add(which, run(float_model, feeds, count), run(quantized_model, feeds, count), feeds)
            count += 1
        done.append(count)
    return sums.result(), done


def _apart(
    models: Models, sets: Sequence[Callable[[], Iterator[Feeds]]], options: VerifyOptions
) -> tuple[_Outcome, list[int]]:
    """Run `_together` with one model open at a time. Float outputs are stored, on disk if there are many."""
    with TensorStore(WAITING_BYTES) as store:
        model = models.open_float()
        names = output_names(model)
        done = []
        for which, walk in enumerate(sets):
            count = 0
            for feeds in walk():
                for place, output in enumerate(run(model, feeds, count)):
                    if isinstance(output, np.ndarray):
                        store.put((which, count, place), output)
                count += 1
            done.append(count)
        model = None  # release the session before the next is opened
        model = models.executed()
        _same_outputs(names, output_names(model))
        sums = _OutputSums(models, names, len(sets), options)
        for which, walk in enumerate(sets):
            for number, feeds in enumerate(walk()):
                keys = [(which, number, place) for place in range(len(names))]
                waiting = [store.take(key) if key in store else None for key in keys]
                sums.add(which, waiting, run(model, feeds, number), feeds)
    return sums.result(), done


def _same_outputs(names: list[str], others: list[str]) -> list[str]:
    """Return `names` if they are also the outputs of the quantized model."""
    if names != others:
        raise ModelError(
            f"the outputs of the quantized model ({', '.join(others)}) are not those of the float one "
            f"({', '.join(names)})"
        )
    return names
