"""Passes over the calibration data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import sbonnx
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.samples import Samples
from tests.heads.test_protect import images, two_branches


@pytest.mark.parametrize("settings", [{}, {"high_precision": "fp16"}, {"heads": "none"}])
def test_a_detector_is_quantized_in_two_passes(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges and magnitudes, then rounding of weights and choice of heads; the split reads all samples before."""
    units, reads = Samples.units, Counter[int]()

    def counted(samples: Samples, first: int = 0) -> Iterator[Sample]:
        reads[id(samples.data)] += 1
        return units(samples, first)

    monkeypatch.setattr(Samples, "units", counted)
    sbonnx.quantize(two_branches(spread=1000.0), images(40), backend="tensorrt", **settings)
    assert sorted(reads.values()) == [1, 2]
