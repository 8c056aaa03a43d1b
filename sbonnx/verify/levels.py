"""Check that a quantized file gives the same outputs at every optimization level of onnxruntime."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np

from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.metrics import OutputDifference, OutputDifferences
from sbonnx.verify.comparison import LevelDifference
from sbonnx.verify.models import Models
from sbonnx.verify.sessions import LEVEL_NAMES, Feeds, interface, output_names, run, same_interface

FEEDS: Final = 4
"""Maximum number of feeds run at every level."""

SECONDS: Final = 0.05
"""Time in seconds after which level "off", the slowest, starts no further feed; the others run the same number."""

OFF: Final = LEVEL_NAMES[0]
FLOAT: Final = "float"


class Interface(Exception):
    """Raised for a level at which the quantized model's inputs or outputs differ from those of the float model."""


def differences(
    models: Models,
    data: Iterable[Feeds],
    *,
    limit: int | None,
    store: TensorStore,
    strict: bool = True,
    keep_io: bool = True,
) -> tuple[LevelDifference, ...]:
    """Compare the outputs at each level with the float model and with level "off".

    Args:
        data: feeds; the first `FEEDS` are run, or `limit` if that is less.
        store: storage for outputs.
        strict: the interface must be that of the float model, at every level.
        keep_io: with `strict`: the float types of inputs and outputs must also be equal.

    Raises:
        Interface: an interface differs, with `strict`.
        ModelError: the quantized model does not load at some level.
        DataError: a model cannot run on a feed.
    """
    most = FEEDS if limit is None else min(FEEDS, limit)
    rows: list[LevelDifference] = []
    opened = models.open_quantized(OFF)
    offered = interface(opened, keep_io=keep_io)
    done = _run(store, OFF, opened, islice(iter(data), most), SECONDS)
    opened = None  # release a session before the next is opened
    opened = models.open_float()
    wanted, names = interface(opened, keep_io=keep_io), output_names(opened)
    _run(store, FLOAT, opened, islice(iter(data), done))
    for level in LEVEL_NAMES:
        if level != OFF:
            opened = None
            opened = models.open_quantized(level)
            offered = interface(opened, keep_io=keep_io)
            _run(store, level, opened, islice(iter(data), done))
        if strict and not same_interface(offered, wanted):
            raise Interface(level)
        if len(offered[1]) == len(names):
            rows.extend(_rows(level, names, done, store))
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


def _rows(level: str, names: list[str], done: int, store: TensorStore) -> Iterator[LevelDifference]:
    """Compare one level's outputs, if they have the same shape as in float."""
    found = {}
    for reference in (FLOAT, OFF):
        errors = OutputDifferences(names)
        for index in range(done):
            errors.add(_kept(store, reference, index, names), _kept(store, level, index, names))
        found[reference] = {error.name: error for error in errors.result() if error.compared}
    for name, error in found[FLOAT].items():
        other = found[OFF].get(name)
        if other is not None:
            yield LevelDifference(level, name, _db(error), _db(other), other.max_abs, done)
    if level != OFF:
        for index in range(done):
            for place in range(len(names)):
                store.drop((level, index, place))


def _db(error: OutputDifference) -> float:
    """Return the signal-to-noise ratio; -inf for values that are not finite."""
    return -math.inf if error.not_finite else error.sqnr_db


def _kept(store: TensorStore, who: str, index: int, names: list[str]) -> list[Any]:
    keys = [(who, index, place) for place in range(len(names))]
    return [store.get(key) if key in store else None for key in keys]
