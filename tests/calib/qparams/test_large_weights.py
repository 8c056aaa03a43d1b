"""Large weights are searched, quantized and packed in slices: equal results, and temporary arrays that do not grow."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - registers its types with numpy
import numpy as np
import pytest

from sbonnx import spec as arithmetic
from sbonnx.calib.observers import OBSERVERS
from sbonnx.calib.qparams import solve
from sbonnx.export import nbits
from sbonnx.planning.types import ObserverChoice, Reader, Site
from sbonnx.spec import Array, QuantSpec, bounds_of, params_from_bounds

FEW = 1 << 10


def at_once(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    for module in (arithmetic, solve, nbits):
        monkeypatch.setattr(module, "AT_ONCE", values)


def site_of(spec: QuantSpec, observer: str) -> Site:
    return Site("w", "w", "weight", spec, (Reader("n", 1),), "", "w", ObserverChoice(observer))


def results(weight: Array, site: Site) -> list[Array]:
    bounds = solve.weight_bounds(site, weight)
    params = params_from_bounds(bounds, site.spec)
    codes = params.quantize(weight)
    return [bounds.lo, bounds.hi, codes, params.dequantize(codes)]


@pytest.mark.parametrize("observer", [name for name, kind in OBSERVERS.items() if kind.for_weights])
def test_slices_of_blocks_are_the_whole(observer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for shape, axis in (((72, 40), 0), ((70, 40), 0), ((40, 72), 1), ((6, 5, 33), 1), ((33,), 0)):
        weight = random.standard_normal(shape).astype(np.float32)
        site = site_of(QuantSpec(bits=4, symmetric=False, signed=False, axis=axis, block_size=16), observer)
        at_once(monkeypatch, 1 << 22)
        whole = results(weight, site)
        at_once(monkeypatch, FEW)
        for one, other in zip(results(weight, site), whole, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_slices_of_channels_are_the_whole(axis: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((90, 30)).astype(np.float32)
    params = params_from_bounds(bounds_of(weight, axis), QuantSpec(axis=axis))
    whole = params.quantize(weight)
    values = params.dequantize(whole)
    at_once(monkeypatch, FEW)
    np.testing.assert_array_equal(params.quantize(weight), whole)
    np.testing.assert_array_equal(params.dequantize(whole), values)


def test_memory_of_temporary_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the float32 weight: ranges take 1/4 of it, codes 1/4, dequantized values 1, packed codes none."""
    at_once(monkeypatch, 1 << 16)
    weight = np.random.default_rng(0).standard_normal((512, 4096)).astype(np.float32)
    site = site_of(QuantSpec(bits=4, symmetric=False, signed=False, axis=0, block_size=32), "minmax")
    params = params_from_bounds(solve.weight_bounds(site, weight), site.spec)
    codes = params.quantize(weight)
    packed = codes.astype(np.uint8), params.scale, params.zero_point.astype(np.uint8)

    def peak(run: Callable[[], Any]) -> float:
        tracemalloc.start()
        run()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found / weight.nbytes

    assert peak(lambda: solve.weight_bounds(site, weight)) < 0.8
    assert peak(lambda: params.quantize(weight)) < 0.6
    assert peak(lambda: params.dequantize(codes)) < 1.5
    assert peak(lambda: nbits.blocked(*packed, block=32, bits=4)) < 0.12
    assert peak(lambda: nbits.packed_rows(packed[0], 4)) < 0.12


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_slices_of_packed_codes_are_the_whole(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below and above the size from which packed codes are written to a scratch file."""
    random = np.random.default_rng(0)
    for count, length in ((96, 50), (1300, 1000)):
        codes = random.integers(0, 1 << bits, (length, count), np.uint8)
        zero = random.integers(0, 1 << bits, (-(-length // 16), count), np.uint8)
        kind = {2: "uint4", 4: "uint4", 8: "uint8"}[bits]
        data = codes.astype(kind), np.ones(zero.shape, np.float32), zero.astype(kind)
        at_once(monkeypatch, 1 << 22)
        whole = [*nbits.blocked(*data, block=16, bits=bits), nbits.packed_rows(codes.T, bits)]
        at_once(monkeypatch, FEW)
        slices = [*nbits.blocked(*data, block=16, bits=bits), nbits.packed_rows(codes.T, bits)]
        for one, other in zip(slices, whole, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(whole[3], nbits.pack(codes.T, bits))
