"""A technique that is added to all others does not lower held-out SQNR; `benchmarks.techniques` has all models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import pytest

from benchmarks.accuracy import load_pack
from benchmarks.techniques import ON, TECHNIQUES, gain, noise
from sbonnx.spec import Array

SAMPLES: Final = 16
LIMIT: Final = 64
"""Calibration and evaluation samples of a model: few, so that all cases together take less than a minute."""
QUICK: Final = {"W.ROUNDING.GPTQ.BEAMS": 1, "W.ROUNDING.GPTQ.STEPS": 0}

ALLOWED: Final = 1.0
"""Loss in dB beyond the interval of the evaluation samples: with so few calibration samples, their choice moves results
by about as much. Techniques that fight each other cost 3 to 15 dB."""


@cache
def energies(pack: Path, name: str, bits: int, technique: str | None) -> Array:
    """Energies of outputs and errors with all techniques, or all but one."""
    off = {} if technique is None else TECHNIQUES[technique]
    held = load_pack(pack)
    feeds = held.load_calib(name, limit=SAMPLES)
    return noise(held, name, {**ON, **QUICK, "w_bit": bits, **off}, feeds, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_technique_added_to_the_others_does_no_harm(pack: Path, technique: str) -> None:
    """On a residual network at 4 bits; heads on a detector."""
    name, bits = ("ultraface_rfb320", 8) if technique == "heads" else ("cifar_resnet20", 4)
    found = gain([energies(pack, name, bits, None)], [energies(pack, name, bits, technique)])
    assert found.high >= -ALLOWED, f"{found.value:+.2f} dB ({found.low:+.2f} to {found.high:+.2f})"
