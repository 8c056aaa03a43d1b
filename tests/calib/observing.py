"""Observations to compare: models, data and wishes, without a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from sbonnx.calib.data.dataset import read
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.observation import Observation
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.engine.samples import SampleSplitter
from sbonnx.calib.engine.schedule import schedule_of
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.spec import Array

RNG = np.random.default_rng(7)
IMAGES = RNG.standard_normal((13, 3, 8, 8)).astype(np.float32) * np.arange(1, 14, dtype=np.float32)[:, None, None, None]
EVERYTHING = StatsRequest("histogram", track=True)
PLAIN: dict[Key, StatsRequest] = {(name, None): EVERYTHING for name in ("x", "r", "r1", "f")}


POISON = """
agraph (float[N,4] x) => (float[N,4] y) {
    r = Sqrt (x)
    y = MatMul (r, w)
}"""
ROOTS: dict[Key, StatsRequest] = {("x", None): EVERYTHING, ("r", None): StatsRequest("histogram")}


def batches(size: int, images: Array = IMAGES) -> list[dict[str, Array]]:
    return [{"x": images[i : i + size]} for i in range(0, len(images), size)]


def squares(*bad: int) -> list[dict[str, Array]]:
    """Feeds, some of which hold values without a root."""
    feeds = [{"x": RNG.random((1, 4), np.float32)} for _ in range(12)]
    for number in bad:
        feeds[number]["x"][0, number % 3] = -1
    return feeds


def observation_of(
    graph: Graph, wishes: Mapping[Key, StatsRequest], data: Any, *, threads: int = 2, **more: Any
) -> tuple[Observation, Iterator[Sample]]:
    """What is to run, and the samples."""
    scopes: dict[str, list[str]] = more.pop("scopes", {"": list(dict.fromkeys(name for name, _ in wishes))})
    device, on_device = more.pop("device", "cpu"), more.pop("on_device", None)
    units = SampleSplitter(graph).units(read(data, graph).items())
    first = next(units)
    kept = more.pop("kept", ())
    settings: dict[str, Any] = {"granularity": "whole", "memory": 1 << 30, **more}
    course = schedule_of(graph, scopes, wishes, first, kept=kept, options=RunOptions(**settings), count=None)
    made = Observation(
        graph,
        course.segments,
        wishes,
        device=device,
        threads=threads,
        any_layout=course.any_layout,
        on_device=on_device,
    )
    return made, chain([first], units)


def alone(graph: Graph, wishes: Mapping[Key, StatsRequest], data: Any, **more: Any) -> dict[Key, Sketch]:
    """What one process sees."""
    observation, units = observation_of(graph, wishes, data, **more)
    for _ in observation.stream(units):
        pass
    found = observation.found()
    observation.close()
    return found


def assert_same(one: Mapping[Key, Sketch], other: Mapping[Key, Sketch]) -> None:
    assert one.keys() == other.keys()
    for key, sketch in one.items():
        mine, theirs = sketch.to_arrays(), other[key].to_arrays()
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            np.testing.assert_array_equal(values, theirs[name], err_msg=f"{name} of {key}")
