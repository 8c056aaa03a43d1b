"""`QuantModel.calc_qparams(asym=True)`, and asym by the recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx import quantize
from sbonnx.calib.data.dataset import FeedBuffer
from sbonnx.calib.quantized.stream import QuantizedInputs
from sbonnx.errors import DataError
from sbonnx.planning import Solution
from sbonnx.quant_model import LifeCycleError, QuantModel
from tests.support.calibration import calibrate
from tests.support.models import residual

IMAGES = np.random.default_rng(4).standard_normal((6, 3, 8, 8)).astype(np.float32)
PLAIN: dict[str, Any] = {"rounding": "nearest", "bias_correction": "none", "device": "cpu"}
FOUR: dict[str, Any] = {"bits": "w4a4", "backend": "virtual", **PLAIN}


def fed(asym: bool, *, config: Any = None, size: int = 1, **flags: bool) -> Solution:
    """The solution of a model that was fed batch by batch."""
    with QuantModel(residual(opset=21), config, **FOUR) as one:
        one.prepare_calibration()
        for start in range(0, len(IMAGES), size):
            one({"x": IMAGES[start : start + size]})
        return one.calc_qparams(asym, **flags)


def scales(solution: Solution) -> dict[str, float]:
    return {key: float(solution.qparams[key].scale) for key in solution.bounds}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("flags", [{"w_quant": True}, {"a_quant": True}, {"w_quant": True, "a_quant": True}])
def test_asym_is_that_of_calibrate(flags: dict[str, bool], size: int) -> None:
    """The feeds of the calls, walked again."""
    with QuantModel(residual(opset=21), **FOUR) as one:
        asym = QuantizedInputs(weights=flags.get("w_quant", False), activations=flags.get("a_quant", False))
        expected = calibrate(one.prepared.graph, one.prepared.plan, [{"x": IMAGES}], asym=asym)
    found = fed(True, size=size, **flags)
    assert scales(found) == scales(expected)
    assert scales(found) != scales(fed(False))
    assert found.samples == len(IMAGES)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"asym": True}, id="nothing is quantized upstream"),
        pytest.param({"asym": False, "w_quant": True, "a_quant": True}, id="off"),
        pytest.param(
            {"asym": True, "w_quant": True, "config": {"CALIBRATION": {"ASYM": {"RANGES": False}}}},
            id="as the ancestor",
        ),
    ],
)
def test_where_the_ranges_stay(options: dict[str, Any]) -> None:
    assert scales(fed(**options)) == scales(fed(False))


def test_what_was_fed_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calc_qparams, by a new start, by close; not by a calc_qparams that fails."""
    closed: list[int] = []

    class Watched(FeedBuffer):
        def close(self) -> None:
            closed.append(self.count)
            super().close()

    monkeypatch.setattr("sbonnx.quant_model.pipeline_steps.FeedBuffer", Watched)
    with QuantModel(residual(opset=21), **FOUR) as one:
        one.prepare_calibration()
        with pytest.raises(DataError):
            one.calc_qparams(asym=True, a_quant=True)
        assert closed == []
        one(IMAGES[:1])
        one.prepare_calibration()
        assert closed == [1]
        for image in IMAGES:
            one(image[None])
        one.calc_qparams(asym=True, a_quant=True)
        assert closed == [1, 6]
        with pytest.raises(LifeCycleError):
            one.calc_qparams(asym=True)
        one.prepare_calibration()
        one(IMAGES)
    assert closed == [1, 6, 1]


def test_asym_by_the_recipe() -> None:
    """`asym: true` in the recipe of `quantize` quantizes both upstream."""
    with QuantModel(residual(opset=21), **FOUR) as one:
        graph, plan = one.prepared.graph, one.prepared.plan
        plain, expected = (calibrate(graph, plan, [{"x": IMAGES}], asym=asym) for asym in (None, QuantizedInputs()))
    report = quantize(residual(opset=21), [{"x": IMAGES}], backend="virtual", bits="w4a4", asym=True, **PLAIN)
    assert report.quantized is not None
    written = {x.name: x for x in report.quantized.graph.initializer}
    key = max(scales(plain), key=lambda name: abs(scales(plain)[name] - scales(expected)[name]))
    stored = float(np.frombuffer(written[f"{key}_scale"].raw_data, np.float32)[0])
    assert stored == scales(expected)[key] != scales(plain)[key]
