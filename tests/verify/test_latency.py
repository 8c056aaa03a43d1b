"""The measured latency decides one line of the report and the advice, and never the bytes of the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.detectors import ssd
from benchmarks.results import ROOT
from sbonnx import pipeline
from sbonnx.report.comparison import SLOWER, Comparison
from sbonnx.search.advice import with_advice
from sbonnx.stages.state import PipelineState, Request, read_recipe
from sbonnx.verify import sessions
from sbonnx.verify.intervals import UNKNOWN, of_median
from sbonnx.verify.sessions import Latency
from tests.plan.test_cost_partition import pooled
from tests.support.values import some

FEEDS = [{"x": np.random.default_rng(seed).standard_normal((1, 64, 56, 56)).astype(np.float32)} for seed in range(4)]


def measured(ratio: float, spread: float) -> Latency:
    return Latency((9.0, 9.0 * ratio), (10.0, 10.0 * ratio), 40, (ratio - spread, ratio + spread), ratio)


IMAGES = [
    {"image": np.random.default_rng(seed).standard_normal((1, 3, 320, 320)).astype(np.float32)} for seed in (0, 1)
]


PRICES = {"KERNEL_COSTS": str(ROOT / "sbonnx" / "backends" / "onnxruntime" / "kernel_costs.json")}
"""Of CPUs with VNNI: they decide what is in integers, on every machine."""


def finished(
    monkeypatch: pytest.MonkeyPatch, latencies: list[Latency], output: Path | None = None, *, detector: bool = False
) -> PipelineState:
    """A run whose pairs of files take these times, one after the other; the last one stays."""

    def next_one(*_: Any) -> Latency:
        return latencies.pop(0) if len(latencies) > 1 else latencies[0]

    monkeypatch.setattr("sbonnx.verify.file_check.side_by_side", next_one)
    recipe, backend = read_recipe(None, "onnxruntime", PRICES)
    proto, feeds = (ssd(), IMAGES) if detector else (pooled(), FEEDS)
    return pipeline.quantize(Request(proto, recipe, backend, data=feeds, output=output, force=True))


def lines(state: PipelineState) -> list[str]:
    return [note for note in state.report.notes if note.startswith(SLOWER)]


def test_a_file_slower_than_float_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    state = finished(monkeypatch, [measured(1.3, 0.1)])
    assert lines(state) == [f"{SLOWER}: a run takes 1.30 (1.20 to 1.40) of its time, 40 runs each"]
    assert state.report.ok, "a measured time is no reason for another exit code, unless VERIFY.MAX_LATENCY_RATIO is set"
    assert some(some(state.report.metrics).latency_interval) == pytest.approx((1.2, 1.4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "latency", [measured(0.5, 0.1), measured(1.3, 0.4), measured(1.035, 0.01), measured(1.01, 0.001), Latency()]
)
def test_others_do_not(latency: Latency, monkeypatch: pytest.MonkeyPatch) -> None:
    state = finished(monkeypatch, [latency])
    assert lines(state) == []
    assert with_advice(state, 600.0).report.advice is None


@pytest.mark.slow
def test_the_measured_time_does_not_change_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "slow.onnx", tmp_path / "fast.onnx"]
    for file, ratio in zip(files, (1.5, 0.5), strict=True):
        finished(monkeypatch, [measured(ratio, 0.01)], file)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_the_advice_names_the_layers_to_leave_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first change is measured to be slow still; the second is not."""
    slow, fast = measured(1.02, 0.0), measured(0.9, 0.05)
    slow = replace(slow, interval=(1.03, 1.2))
    state = finished(monkeypatch, [slow, slow, fast], detector=True)
    monkeypatch.setattr("sbonnx.search.advice.problems_of", lambda *_: ())  # of random weights
    advice = with_advice(state, 600.0).report.advice
    assert advice is not None and advice.repaired and advice.figure == "time relative to float"
    assert (advice.before, advice.after) == ("1.02 (1.03 to 1.20)", "0.90 (0.85 to 0.95)")
    (override,) = advice.overrides
    assert override.startswith("EXCLUDE=") and len(advice.tried) == 2
    recipe, backend = read_recipe(None, "onnxruntime", [override, f"KERNEL_COSTS={PRICES['KERNEL_COSTS']}"])
    changed = pipeline.prepare(ssd(), recipe, backend)
    layers = {reader.node for site in changed.plan.of_role("weight") for reader in site.readers}
    before = {reader.node for site in state.prepared.plan.of_role("weight") for reader in site.readers}
    assert layers and layers < before


def test_the_interval_contains_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes busy halfway moves the medians of the times apart, and not the ratio of pairs."""
    floats = [1.0] * 10 + [10.0] * 11
    quantized = [0.9] * 11 + [9.0] * 10
    monkeypatch.setattr(sessions, "alternately", lambda *_, **__: [floats, quantized])
    found = sessions.side_by_side(None, None, {})
    assert found.middle == (10.0, 0.9)
    assert found.ratio == pytest.approx(0.9)
    assert found.interval[0] <= found.ratio <= found.interval[1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=0, max_size=60))
def test_the_interval_of_a_median_holds_it(values: list[float]) -> None:
    low, high = of_median(np.array(values))
    if len(values) < 6:
        assert (low, high) == UNKNOWN
        return
    assert low <= float(np.median(values)) <= high
    assert {low, high} <= set(values)


def test_the_interval_of_a_median_covers_it_in_95_percent() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = of_median(rng.exponential(size=25))
        hits += low <= np.log(2) <= high
    assert 0.94 < hits / 2000 < 0.985


def test_ranks_of_the_interval_of_a_median() -> None:
    """Table of order statistics for the median at 95 % (Conover 1999, table A3), and many values at once."""
    ranks = {6: 1, 8: 1, 9: 2, 10: 2, 15: 4, 20: 6, 25: 8}
    assert {n: of_median(np.arange(1.0, n + 1))[0] for n in ranks} == ranks
    low, high = of_median(np.arange(100_000.0))  # 1.96 standard deviations of a binomial number from the middle
    assert abs(49_999.5 - 1.96 * np.sqrt(25_000) - low) < 2 and abs(low + high - 99_999) < 1


def test_an_interval_narrower_than_its_digits_is_left_out() -> None:
    narrow = Comparison((), 1, 1, 1, latency_ratio=0.844, latency_interval=(0.842, 0.8442))
    assert narrow.latency_figure() == "0.84"
    assert replace(narrow, latency_interval=(0.8, 0.9)).latency_figure() == "0.84 (0.80 to 0.90)"
