"""Samples side by side give what they give apart, and lie side by side only where they may."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine import samples as groups
from sbonnx.calib.engine.samples import grouped, width_for
from sbonnx.errors import NumericError
from sbonnx.options import RunOptions
from sbonnx.reconstruct import layerwise_rounding as reconstruct
from sbonnx.spec import Array
from tests.reconstruct.test_layerwise import images, prepared, solved
from tests.support.models import model


def units(*arrays: Array) -> list[Sample]:
    return [Sample(index, f"sample {index}", {"x": array}) for index, array in enumerate(arrays)]


def test_groups_keep_the_order_and_break_where_sizes_change() -> None:
    wide, long = np.zeros((1, 3, 4), np.float32), np.zeros((1, 3, 5), np.float32)
    found = list(grouped(iter(units(wide, wide, wide, long, wide, wide)), 2))
    assert [[part.index for part in unit.members] for unit in found] == [[0, 1], [2], [3], [4, 5]]
    assert [unit.feed["x"].shape for unit in found] == [(2, 3, 4), (1, 3, 4), (1, 3, 5), (2, 3, 4)]
    assert [unit.index for unit in found] == [0, 2, 3, 4]
    assert sum(part.closes for unit in found for part in unit.members) == 6


@pytest.mark.parametrize("arrays", [[np.zeros((2, 3), np.float32)] * 3, [np.array(1.0, np.float32)] * 3])
def test_what_is_no_single_sample_stays_alone(arrays: list[Array]) -> None:
    found = list(grouped(iter(units(*arrays)), 4))
    assert len(found) == 3 and not any(unit.parts for unit in found)


def width(text: str, shape: tuple[int, ...], names: list[str], memory: int = 1 << 30, **constants: Any) -> int:
    proto: onnx.ModelProto = model(text, **constants)
    rng = np.random.default_rng(0)
    samples = units(*(rng.standard_normal(shape).astype(np.float32) for _ in range(3)))
    return width_for(graphs.load(proto), names, samples, RunOptions(memory=memory))


def test_as_many_as_the_cache_holds() -> None:
    text = "agraph (float[N,8,H] x) => (float[N,8,H] y) { a = Relu (x) y = Neg (a) }"
    assert width(text, (1, 8, 4), ["a"]) == groups.MOST
    assert width(text, (1, 8, groups.CACHE // (4 * 8 * 3)), ["a"]) == 3
    assert width(text, (1, 8, groups.CACHE // (4 * 8)), ["a"]) == 1


def test_little_memory_makes_small_groups() -> None:
    text = "agraph (float[N,8,H] x) => (float[N,8,H] y) { a = Relu (x) y = Neg (a) }"
    found = [width(text, (1, 8, 512), ["a"], memory=mebibytes << 20) for mebibytes in (64, 8, 4, 1)]
    assert found == [16, 8, 4, 1]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("agraph (float[1,8] x) => (float[1,8] y) { a = Relu (x) y = Neg (a) }", ["a"]),
        ("agraph (float[N,8] x) => (float[N,8] y) { a = ReduceMax <keepdims = 1> (x) y = Sub (x, a) }", ["a"]),
        ("agraph (float[N,8] x) => (float[8,N] y) { a = Transpose (x) y = Neg (a) }", ["a"]),
        ("agraph (float[N,8] x) => (float[N,8] y) { a = Mul (x, one) y = Neg (a) }", []),
    ],
    ids=["fixed batch", "one mean of all", "batch moved", "nothing to look at"],
)
def test_what_does_not_treat_samples_apart_runs_alone(text: str, names: list[str]) -> None:
    constants: dict[str, Any] = {"one": np.ones(8, np.float32)} if "one" in text else {}
    assert width(text, (1, 8), names, **constants) == 1


def test_a_model_for_one_sample_alone() -> None:
    text = "agraph (float[N,8] x) => (float[1,8] y) { a = Reshape (x, s) y = Neg (a) }"
    assert width(text, (1, 8), ["a"], s=np.array([1, 8], np.int64)) == 1


def test_the_same_codes_in_groups_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared(4, **{"w.rounding.gptq.steps": 2})
    together = solved(ready, images(23))
    monkeypatch.setattr(groups, "MOST", 1)
    alone = solved(ready, images(23))
    assert set(together.gains) == set(alone.gains) and len(alone.gains) == 4
    for key, codes in alone.codes.items():
        np.testing.assert_array_equal(together.codes[key], codes)
    for key, gain in alone.gains.items():
        np.testing.assert_allclose(together.gains[key].loss, gain.loss, rtol=1e-3)
    for key, qparams in alone.qparams.items():
        np.testing.assert_allclose(together.qparams[key].scale, qparams.scale, rtol=1e-5)


def test_what_breaks_in_a_group_is_named_by_its_sample() -> None:
    some = [np.zeros((1, 4), np.float32) for _ in range(3)]
    (unit,) = grouped(iter(units(*some)), 4)
    values = np.zeros((3, 4), np.float32)
    reconstruct._check_finite({"a": values}, ["a", "b"], unit)
    values[1, 2] = np.nan
    with pytest.raises(NumericError, match="'a' holds NaN or Inf on sample 1:"):
        reconstruct._check_finite({"a": values}, ["a", "b"], unit)
