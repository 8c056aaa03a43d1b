"""Layer by layer under a budget: kept, spilled or made again, the ranges are those of one plain run."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.engine import layerwise
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.graph import load
from sbonnx.options import RunOptions
from sbonnx.planning.types import ObserverChoice
from sbonnx.reconstruct.solution import WeightRounding, reconstruct
from tests.calib.test_calibrate import same
from tests.support.calibration import calibrate
from tests.support.models import model, residual
from tests.support.naive import plan_linear

STEPS = "\n".join(f"r{i} = Conv<pads=[1,1,1,1]>(r{i - 1}, w{i})" for i in range(1, 6))
CHAIN = model(
    f"chain (float[N, 3, 8, 8] r0) => (float[N, 4, 8, 8] y) {{ {STEPS} y = Relu(r5) }}",
    w1=(4, 3, 3, 3), w2=(4, 4, 3, 3), w3=(4, 4, 3, 3), w4=(4, 4, 3, 3), w5=(4, 4, 3, 3),
)  # fmt: skip

FEEDS = [{"x": np.random.default_rng(seed).standard_normal((3, 3, 8, 8)).astype(np.float32)} for seed in range(5)]


@pytest.mark.parametrize(("cheap", "memory"), [(False, 1), (True, 1), (True, 20_000), (False, 1 << 30)])
def test_results_do_not_depend_on_the_activation_cache(
    cheap: bool, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[TensorStore] = []
    close = TensorStore.close

    def closing(self: TensorStore) -> None:
        if self not in stores:
            assert len(self) == 0, "something was never released"
            stores.append(self)
        close(self)

    monkeypatch.setattr(TensorStore, "close", closing)
    monkeypatch.setattr(TensorStore, "cheaper_to_recompute", lambda *_: cheap)
    graph = load(residual(channels=6))  # not a multiple of 8: onnxruntime sums in one layout wherever a layer ends
    plan = plan_linear(graph)
    found = calibrate(graph, plan, FEEDS, granularity="layer", memory=memory)
    assert same(found, calibrate(graph, plan, FEEDS))
    (store,) = stores
    counters = store.counters
    assert counters.peak_resident <= memory
    assert (counters.recomputed > 0) == (cheap and memory < 1 << 30)
    assert (counters.spills > 0) == (memory < 1 << 30)  # what the first layer read can only be spilled


def test_what_is_made_again_is_made_from_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs add up along a chain, so that no chain grows without end."""
    asked: list[float] = []

    def cheaper(self: TensorStore, seconds: float, nbytes: int, readers: int = 1) -> bool:
        asked.append(seconds)
        return True

    monkeypatch.setattr(TensorStore, "cheaper_to_recompute", cheaper)
    monkeypatch.setattr(layerwise.ActivationCache, "keep", _with_a_second(layerwise.ActivationCache.keep))
    graph = load(CHAIN)
    plan = plan_linear(graph)
    feeds = [{"r0": feed["x"]} for feed in FEEDS]
    with Calibrator(graph, plan, RunOptions(granularity="layer", memory=1, threads=1)) as calibrator:
        calibrator.observe_all(Samples.of(feeds, graph))
        found = reconstruct(graph, plan, Samples.of(feeds, graph), calibrator.ranges(), WeightRounding())
    assert sorted(set(asked)) == [2.0, 4.0]  # r2 from r1 (of the first segment: on disk), r3 from r2
    assert same(found, calibrate(graph, plan, feeds))


def _with_a_second(keep: Any) -> Any:
    def timed(self: Any, number: int, unit: Any, run: Any, known: Any, seconds: float, **copied: Any) -> None:
        keep(self, number, unit, run, known, 1.0, **copied)

    return timed


def test_buffers_of_a_thread_are_not_written_before_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs lie in buffers that the next sample overwrites, here with a pause before they are copied."""
    keep = layerwise.ActivationCache.keep

    def slowly(self: layerwise.ActivationCache, *arguments: Any, **copied: Any) -> None:
        time.sleep(0.002)
        keep(self, *arguments, **copied)

    graph = load(residual())
    plan = plan_linear(graph, observer=ObserverChoice("moving_average"))
    alone = calibrate(graph, plan, FEEDS * 4, granularity="layer", threads=1)
    monkeypatch.setattr(layerwise.ActivationCache, "keep", slowly)
    assert same(alone, calibrate(graph, plan, FEEDS * 4, granularity="layer", threads=3))
