"""Which samples are held out of calibration, and what verification makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.assets import digits
from sbonnx.calib import held_out
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import FEWEST, FEWEST_SEQUENCES, LEAST, MOST, HeldOutSplit, divide, divide_sequences
from sbonnx.calib.recurrent import unroll
from sbonnx.present.text.tables import comparison_facts
from tests.calib.recurrent import BACK, step
from tests.support.models import model
from tests.support.values import some

IMAGES = np.load(digits().calib)["image"]
GRAPH = graphs.load(digits().model)


def division(feeds: Any, share: float = 0.125) -> HeldOutSplit:
    return divide(Samples.of(feeds, GRAPH), share)


def rows(data: datasets.Dataset | Samples | None) -> list[bytes]:
    assert data is not None
    return sorted(row.tobytes() for feed in feeds_of(data) for row in feed["image"])


def feeds_of(data: datasets.Dataset | Samples) -> datasets.Dataset:
    return data.data if isinstance(data, Samples) else data


def batches(images: Any, size: int) -> list[dict[str, Any]]:
    return [{"image": images[start : start + size]} for start in range(0, len(images), size)]


@pytest.mark.parametrize(("size", "large"), [(1, False), (7, False), (32, False), (256, False), (256, True)])
@pytest.mark.parametrize("seed", [None, 1])
def test_the_choice_depends_on_contents_alone(
    size: int, large: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # rows are given as views
        monkeypatch.setattr(held_out, "LARGE", 0)
    images = IMAGES if seed is None else np.random.default_rng(seed).permutation(IMAGES)
    expected, found = division(batches(IMAGES, 32)), division(batches(images, size))
    assert found.count == expected.count == 32
    for part in ("fit", "held", "seen"):
        assert rows(getattr(found, part)) == rows(getattr(expected, part))
        data = feeds_of(getattr(found, part))
        assert data.count in (len(list(data)), None)
    assert sorted(rows(found.fit) + rows(found.held)) == sorted(row[None].tobytes() for row in IMAGES)
    assert set(rows(found.seen)) <= set(rows(found.fit))


@pytest.mark.parametrize("split", [None, 4])
def test_samples_picked_by_chance_are_divided(split: int | None) -> None:
    data = datasets.read(batches(IMAGES, 4), GRAPH, limit=16, pick="random", seed=3, split=split)
    found = divide(Samples.of(data, GRAPH), 0.125)
    assert found.count == 8 and sorted(rows(found.fit) + rows(found.held)) == rows(data)


def test_equal_samples_are_on_one_side() -> None:
    found = division(batches(np.concatenate([IMAGES, IMAGES]), 32))
    assert found.count == 64
    assert not set(rows(found.held)) & set(rows(found.fit))


def test_few_samples_are_all_calibrated_on_and_many_held_out_are_enough() -> None:
    assert division(batches(IMAGES[: FEWEST - 1], 1)).held is None
    assert division(batches(IMAGES[:FEWEST], 1)).count == LEAST
    assert division(batches(IMAGES, 8), share=0).held is None
    assert division(batches(IMAGES, 32), share=0.5).count == MOST
    assert division(batches(IMAGES[:FEWEST], 1), share=0.99).fit.data.count == 1


def test_feeds_that_are_no_rows_are_held_out_as_a_whole() -> None:
    """The leading axis is time: the model adds a step to the one before it."""
    proto = model("agraph (float[T,4] x) => (float[T,4] y) { i = Constant <value_int = 0> ()\n y = CumSum (x, i) }")
    graph = graphs.load(proto)
    feeds = [{"x": np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32)} for seed in range(72)]
    found = divide(Samples.of(feeds, graph), 0.125)
    assert found.count == 9 and found.held is not None
    assert {feed["x"].shape for feed in (*found.held, *found.fit.data)} == {(5, 4)}


@pytest.mark.parametrize(("loudness", "fair"), [(1.0, True), (3.0, False)])
def test_a_file_that_does_not_generalize_is_a_problem(loudness: float, fair: bool) -> None:
    """The samples with the smallest digests are louder than all others: min-max ranges were not made for them."""
    proto = model("agraph (float[N,16] x) => (float[N,8] y) { y = MatMul (x, w) }", w=(16, 8))
    rng = np.random.default_rng(0)
    quiet, loud = (rng.normal(size=(rows, 16)).astype(np.float32) for rows in (56, 2000))
    loud *= np.float32(loudness)
    held = divide(Samples.of({"x": loud}, graphs.load(proto)), 0.125).held
    assert held is not None
    data = np.concatenate([quiet, next(iter(held))["x"][:8]])
    report = sbonnx.quantize(proto, {"x": data}, backend="virtual", a_observer="minmax", held_out=0.125)
    calibrated, found = some(report.metrics).calibration[0].sqnr_db, some(report.metrics).outputs[0].sqnr_db
    assert some(report.metrics).held_out == 8 and report.counts.samples == 56
    assert calibrated > 30 and (found > 30) == fair
    shown = f"8 samples held out of calibration, in 1 feed (on as many calibration samples: {calibrated:.1f} dB)"
    assert comparison_facts(report.metrics, calibrated=True)["compared on"] == shown
    assert report.ok == fair
    if not fair:
        assert f"{found:.1f} dB on samples held out, {calibrated:.1f} dB on those calibrated on" in report.problems[0]
    assert sbonnx.quantize(proto, {"x": data}, backend="virtual", a_observer="minmax", held_out=0).ok


def sequence(seed: int, length: int = 12, loudness: float = 1.0) -> list[dict[str, Any]]:
    """Steps of which the first brings the state."""
    rng = np.random.default_rng(seed)
    feeds = [{"x": (rng.normal(size=(1, 4)) * loudness).astype(np.float32)} for _ in range(length)]
    return [{**feeds[0], "h": np.zeros((1, 8), np.float32)}, *feeds[1:]]


def steps_of(order: Any, **wishes: Any) -> list[dict[str, Any]]:
    return [feed for seed in order for feed in sequence(seed, **wishes)]


def test_whole_sequences_are_held_out() -> None:
    proto = step()
    graph = graphs.load(proto)

    def parts(order: Any, share: float = 1 / 16) -> list[set[bytes]]:
        data = datasets.read(steps_of(order), graph, optional=["h"])
        found = divide_sequences(Samples.of(data, graph), ["h"], share, lambda some, _: unroll(some, graph, BACK))
        assert len(found.every) == len(found.fit.data) + found.count
        assert found.held is not None and found.seen is not None
        return [
            {feed["x"].tobytes() + feed["h"].tobytes() for feed in part}
            for part in (found.fit.data, found.held, found.seen)
        ]

    fit, held, seen = parts(range(20))
    assert (len(fit), len(held), len(seen)) == (19 * 12, 12, 12)
    assert parts(reversed(range(20))) == [fit, held, seen]  # states included
    assert not fit & held and seen < fit
    assert any(
        held == {feed["x"].tobytes() + feed["h"].tobytes() for feed in unroll(sequence(seed), graph, BACK)}
        for seed in range(20)
    )
    assert len(parts([*range(20), *range(20)])[1]) == 12  # a sequence and its copy are on one side
    assert len(parts(range(40), 0.2)[1]) == 8 * 12


def test_few_sequences_are_all_calibrated_on() -> None:
    proto = step()
    for count, length, held in ((FEWEST_SEQUENCES - 1, 12, 0), (FEWEST_SEQUENCES, 12, 12), (FEWEST_SEQUENCES, 7, 0)):
        data = steps_of(range(count), length=length)
        report = sbonnx.quantize(proto, data, backend="virtual", feedback=BACK)
        assert (0 if report.metrics is None else report.metrics.held_out) == held
        assert report.counts.samples == count * length - held
    picked = sbonnx.quantize(proto, steps_of(range(16)), backend="virtual", feedback=BACK, samples=64, pick="random")
    assert (some(picked.metrics).held_out, picked.counts.samples) == (4, 60)


@pytest.mark.slow
def test_a_recurrent_file_that_does_not_generalize_is_a_problem() -> None:
    """The only loud sequence is the one held out."""
    proto = step()
    graph = graphs.load(proto)
    quiet = steps_of(range(15), loudness=0.02)
    for seed in range(1000, 2000):
        data = [*quiet, *sequence(seed, loudness=8.0)]
        found = divide_sequences(
            Samples.of(datasets.read(data, graph, optional=["h"]), graph),
            ["h"],
            1 / 16,
            lambda some, _: datasets.read(some, graph, optional=["h"]),
        )
        if found.held is not None and np.abs(np.concatenate([feed["x"] for feed in found.held])).max() > 1:
            break
    report = sbonnx.quantize(proto, data, backend="virtual", a_observer="minmax", feedback=BACK)
    assert "output 'y' is lost in error" in report.problems[0]
    assert some(report.metrics).calibration[0].sqnr_db > 30
    assert sbonnx.quantize(proto, data, backend="virtual", a_observer="minmax", feedback=BACK, held_out=0).ok
