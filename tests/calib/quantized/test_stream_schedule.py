"""How the quantized stream runs: stages, memory, order of rounding; and whether it helps."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.quantized import stream as module
from sbonnx.calib.quantized.forward import Forward
from sbonnx.calib.quantized.stream import QuantizedInputs, staged
from sbonnx.calib.storage.tensor_store import StoreCounters, TensorStore
from sbonnx.errors import NumericError
from sbonnx.graph import load
from sbonnx.pipeline import prepare
from sbonnx.planning.types import Site
from sbonnx.progress import Progress
from sbonnx.spec import Array, QParams
from sbonnx.stages.state import read_recipe
from tests.calib.quantized.quantized_loop import A4, FEEDS, IMAGES, MATRIX, residual_plan, site_at
from tests.support.calibration import calibrate
from tests.support.models import model, residual
from tests.support.naive import plan_linear


def test_batches_threads_and_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and what waits stays within the budget."""
    seen: list[StoreCounters] = []

    class Watched(TensorStore):
        def close(self) -> None:
            seen.append(self.counters)
            super().close()

    monkeypatch.setattr(module, "TensorStore", Watched)
    graph = load(residual())
    plan = residual_plan(graph, "mse", bias=True)
    alone = calibrate(graph, plan, FEEDS, asym=QuantizedInputs(), threads=1)
    for size, threads, memory in ((1, 3, "1 GiB"), (4, 2, 9000), (6, 1, 0)):
        batches = [{"x": IMAGES[i : i + size]} for i in range(0, 6, size)]
        other = calibrate(graph, plan, batches, asym=QuantizedInputs(), threads=threads, memory=memory)
        for key, bounds in alone.bounds.items():
            np.testing.assert_array_equal(other.bounds[key].lo, bounds.lo)
            np.testing.assert_array_equal(other.bounds[key].hi, bounds.hi)
        for key, codes in alone.codes.items():
            np.testing.assert_array_equal(other.codes[key], codes)
    budgets = (1 << 31, 1 << 30, 9000, 0)
    assert all(counters.peak_resident <= budget for counters, budget in zip(seen, budgets, strict=True))
    outside = [counters.spills + counters.recomputed for counters in seen]
    assert outside[0] == outside[1] == 0 < min(outside[2:])
    assert all(counters.resident == counters.spilled == 0 for counters in seen), "everything was read to the end"


def test_stages_are_as_few_as_the_longest_chain() -> None:
    """Three branches of one, two and three layers take three stages; nothing that leads nowhere is run."""
    text = """
    agraph (float[N,4] x) => (float[N,4] y, float[N,4] aside) {
        a = MatMul (x, w)
        b = MatMul (x, w)
        b1 = MatMul (b, w)
        c = MatMul (x, w)
        c1 = MatMul (c, w)
        c2 = MatMul (c1, w)
        s = Sum (a, b1, c2)
        y = MatMul (s, w)
        aside = Neg (s)
    }"""
    graph = load(model(text, w=(4, 4)))
    plan = plan_linear(graph)
    tensors = [site.tensor for site in plan.of_role("activation") if site.tensor != "x"]
    reads = [reader for site in plan.of_role("activation") for reader in site.readers]
    stages = staged(graph, tensors, reads)
    assert [len(stage.nodes) for stage in stages] == [3, 2, 2]
    assert [stage.inputs for stage in stages] == [("x",), ("b", "c"), ("c1", "a", "b1")]
    assert [stage.observed for stage in stages] == [("b", "c"), ("c1",), ("s",)]


class Log(Progress):
    """A progress that notes what is begun."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, what: str, total: int | None) -> None:
        self.events.append(what)

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        if segment is not None:
            self.events.append(f"stage {segment[0]} of {segment[1]}")


@pytest.mark.parametrize("rounding", [True, False])
def test_each_weight_is_rounded_once_when_its_layer_is_reached(rounding: bool) -> None:
    """Between the runs of the stages, unless rounding is not to see the stream; what comes last is not run."""
    graph = load(residual())
    log = Log()

    def solve(site: Site, weight: Array, qparams: QParams) -> Array:
        log.events.append(site.tensor)
        return qparams.quantize(weight)

    calibrate(graph, residual_plan(graph), FEEDS, asym=QuantizedInputs(rounding=rounding), solve=solve, progress=log)
    stages = ["stage 1 of 3", "stage 2 of 3", "stage 3 of 3"]
    if rounding:
        meanwhile = [stages[0], "ws", stages[1], "w1", stages[2], "w2", "wf"]
        assert log.events == ["calibrate", "quantized stream", *meanwhile]
    else:
        assert log.events == ["calibrate", "ws", "w1", "w2", "wf", "quantized stream", *stages]


def test_no_second_walk_where_nothing_can_move() -> None:
    graph = load(residual())
    plan = residual_plan(graph)
    plain = calibrate(graph, plan, FEEDS)
    for asym, again in (
        (QuantizedInputs(ranges=False), False),
        (QuantizedInputs(weights=False, activations=False), False),
        (QuantizedInputs(), True),
    ):
        log = Log()
        found = calibrate(graph, plan, FEEDS, asym=asym, progress=log)
        assert ("quantized stream" in log.events) == again
        same = all(np.array_equal(found.bounds[key].hi, bounds.hi) for key, bounds in plain.bounds.items())
        assert same == (not again)


def test_nan_that_quantization_brings_about_is_named() -> None:
    """In float the divisor is small, quantized it is 0."""
    text = """
    agraph (float[N,4] x) => (float[N,4] y) {
        a = MatMul (x, w)
        r = Relu (a)
        d = Div (one, r)
        y = MatMul (d, w)
    }"""
    graph = load(model(text, w=np.eye(4, dtype=np.float32), one=np.ones(4, np.float32)))
    plan = plan_linear(graph, activation=A4, weight=MATRIX)
    div = next(node.name for node in graph.nodes if node.op == "Div")
    plan = replace(plan, sites=(site_at("r", "r", [(div, 1)]), *plan.sites))
    feeds = [{"x": np.array([[1, 2, 3, value]], np.float32)} for value in (4, 1e-3)]
    with pytest.raises(NumericError, match=r"with everything before it quantized, activation 'd' .* without asym"):
        calibrate(graph, plan, feeds, asym=QuantizedInputs())


@pytest.mark.slow
def test_it_helps_a_real_model_at_4_bits(pack: Path) -> None:
    """SqueezeNet, ranges of least error: outputs on images held out come closer to float."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    tools = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)
    feeds = tools.load_calib("squeezenet11", limit=36)
    wishes = read_recipe(None, "virtual", {"bits": "w4a4", "observer": "mse"})
    prepared = prepare(tools.model_path("squeezenet11"), *wishes)
    with LayerRunner(prepared.graph) as run:
        reference = np.stack([next(iter(run(feed).values())) for feed in feeds[24:]])
    errors = []
    for asym in (None, QuantizedInputs()):
        solution = calibrate(prepared.graph, prepared.plan, feeds[:24], asym=asym)
        with Forward(prepared.graph, prepared.plan, solution) as quantized:
            outputs = np.stack([next(iter(quantized(feed).values())) for feed in feeds[24:]])
        errors.append(float(((outputs - reference) ** 2).mean()))
    assert errors[1] < errors[0]
