"""`check` and `compare`: verification of a quantized file against its float model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.cpu import has_dot_product
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import check_file, read_proto
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.metrics import OutputDifference, OutputDifferences
from sbonnx.verify import levels as by_level
from sbonnx.verify.comparison import Comparison, LevelDifference
from sbonnx.verify.latency import Latency, side_by_side
from sbonnx.verify.models import Models
from sbonnx.verify.sessions import Feeds, file_bytes, output_names, run, session

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
    """

    latency: bool = True
    levels: bool = False
    kernels: bool = False
    strict: bool = False
    keep_io: bool = True


def compare(
    float_model: Path | bytes,
    quantized: Path,
    data: Iterable[Feeds] | None,
    *,
    seen: Iterable[Feeds] | None = None,
    timed: Feeds | None = None,
    device: str = "cpu",
    limit: int | None = None,
    without: Sequence[str] = (),
    depth: Depth = Depth(),
) -> Comparison:
    """Run both models on the same feeds and measure the differences of the outputs.

    Args:
        float_model, quantized: files (the float one may be a serialized model).
        data: feeds as the sessions take them; iterated more than once. None: nothing is run.
        seen: calibration feeds, for `Comparison.calibration`, if `data` is a hold-out set.
        timed: the feed for the latency measurement; None: the first of `data`.
        limit: maximum number of feeds, also of `seen`.
        without: onnxruntime graph transformers to disable in the quantized model's session.
        depth: optional measurements.

    Raises:
        ModelError: a model does not load, or the interfaces differ.
        DataError: there are no feeds, or a model cannot run one.
    """
    read = read_proto(quantized)
    sizes = file_bytes(float_model) if isinstance(float_model, Path) else len(float_model), file_bytes(quantized, read)
    together = sum(sizes) <= TOGETHER_BYTES
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder()) if depth.kernels else None
        models = Models(float_model, quantized, device, without, together, folder)
        rows = _levels(models, data or (), limit, depth) if depth.levels else ()
        outputs: list[tuple[OutputDifference, ...]] = []
        took, done = Latency(), [0]
        if data is not None:
            sets = [data] if seen is None else [data, seen]
            outputs, done = (_together if together else _apart)(models, [_first(one, limit) for one in sets])
            if not done[0]:
                raise DataError("there is nothing to compare on: the data holds no feeds")
            if depth.latency and together:
                feed = next(iter(data)) if timed is None else timed
                took = side_by_side(models.open_float(), models.open_quantized(), feed)
        return Comparison(
            outputs=outputs[0] if outputs else (),
            calibration=outputs[1] if len(outputs) > 1 else (),
            feeds=done[0],
            bytes_float=sizes[0],
            bytes_quantized=sizes[1],
            ms_float=took.best[0],
            ms_quantized=took.best[1],
            median_ms_float=took.middle[0],
            median_ms_quantized=took.middle[1],
            latency_runs=took.runs,
            levels=rows,
            kernels=models.kernels(read) if depth.kernels else None,
            dot_product=has_dot_product(),
        )


def check(
    float_model: Path | bytes,
    quantized: Path,
    data: Iterable[Feeds] | None,
    *,
    seen: Iterable[Feeds] | None = None,
    timed: Feeds | None = None,
    device: str = "cpu",
    limit: int | None = None,
    latency: bool = True,
    without: Sequence[str] = (),
    keep_io: bool = True,
    opens: bool = True,
) -> Comparison:
    """Validate the file with onnx.checker (full check) and compare interface and outputs with all of `Depth`.

    The arguments are those of `compare` and `Depth`, and:

    Args:
        opens: also open the file in onnxruntime with all graph transformers, as users do.

    Raises:
        ModelError: the file is not valid, does not load at some level, or its interface changed.
    """
    check_file(quantized)
    if without and opens:  # users open it with all graph transformers
        session(quantized, device=device)
    depth = Depth(latency=latency, levels=True, kernels=True, strict=True, keep_io=keep_io)
    return compare(
        float_model, quantized, data, seen=seen, timed=timed, device=device, limit=limit, without=without, depth=depth
    )


def _levels(models: Models, data: Iterable[Feeds], limit: int | None, depth: Depth) -> tuple[LevelDifference, ...]:
    with TensorStore(WAITING_BYTES) as store:
        try:
            return by_level.differences(
                models, data, limit=limit, store=store, strict=depth.strict, keep_io=depth.keep_io
            )
        except by_level.Interface as error:
            text = f"inputs or outputs of {models.quantized} are not those of the float model"
            raise ModelError(f"{text} (at optimisation level '{error}')") from error


def _first(data: Iterable[Feeds], limit: int | None) -> Callable[[], Iterator[Feeds]]:
    """Return a function that iterates over the first feeds."""
    return lambda: islice(iter(data), limit)


def _together(
    models: Models, sets: Sequence[Callable[[], Iterator[Feeds]]]
) -> tuple[list[tuple[OutputDifference, ...]], list[int]]:
    """Run both models on each feed of each set. Return the differences, and the number of feeds per set."""
    one, other = models.open_float(), models.open_quantized()
    names = _same_outputs(output_names(one), output_names(other))
    found, done = [], []
    for walk in sets:
        errors, count = OutputDifferences(names), 0
        for feeds in walk():
            errors.add(run(one, feeds, count), run(other, feeds, count))
            count += 1
        found.append(errors.result())
        done.append(count)
    return found, done


def _apart(
    models: Models, sets: Sequence[Callable[[], Iterator[Feeds]]]
) -> tuple[list[tuple[OutputDifference, ...]], list[int]]:
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
        model = models.open_quantized()
        _same_outputs(names, output_names(model))
        found = []
        for which, walk in enumerate(sets):
            errors = OutputDifferences(names)
            for number, feeds in enumerate(walk()):
                keys = [(which, number, place) for place in range(len(names))]
                waiting = [store.take(key) if key in store else None for key in keys]
                errors.add(waiting, run(model, feeds, number))
            found.append(errors.result())
    return found, done


def _same_outputs(names: list[str], others: list[str]) -> list[str]:
    """Return `names` if they are also the outputs of the quantized model."""
    if names != others:
        raise ModelError(
            f"the outputs of the quantized model ({', '.join(others)}) are not those of the float one "
            f"({', '.join(names)})"
        )
    return names
