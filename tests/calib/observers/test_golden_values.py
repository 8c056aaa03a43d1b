"""The ancestor's numbers under the rule "sparsebit", to the six decimals that were printed.

`tests/ancestor/test_golden.py` has those of the default arguments, through the whole pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx.calib.observers import make_observer
from sbonnx.spec import Array, QuantSpec, params_from_bounds
from tests.calib.observers.reference import sketch_of

Cell = tuple[float, int]

COLUMNS = ((True, 8, False), (True, 4, False), (False, 8, False), (False, 4, False), (False, 8, True), (False, 4, True))
"""Symmetric (signed) or affine (unsigned), bits, and whether negatives are set to 0."""

GOLDEN: tuple[tuple[str, dict[str, Any], tuple[Cell | None, ...]], ...] = (
    ("percentile", {"alpha": 1e-2}, (None, None, (0.054538, 60), None, (0.039660, 0), None)),
    (
        "aciq",
        {"distribution": "laplace"},
        ((0.154690, 0), (1.337470, 0), (0.154690, 128), (1.337470, 7), (0.080082, 0), (0.756328, 0)),
    ),
)
"""Observer, its parameters, and scale and zero point by column (None: not measured)."""

ANCESTORS_KL: tuple[Cell, ...] = (
    (0.070893, 0), (1.581313, 0), (0.070893, 128), (1.581313, 8), (0.035447, 0), (0.790657, 0),
)  # fmt: skip
"""What its entropy search gives, which is a constant: see `test_the_ancestors_entropy_search_is_a_constant`."""

CASES = [
    pytest.param(name, arguments, column, cell, id="-".join(map(str, (name, *arguments.values(), *column))))
    for name, arguments, cells in GOLDEN
    for column, cell in zip(COLUMNS, cells, strict=True)
    if cell is not None
]

PRINTED = 0.5e-6 + 1e-9
"""Half of the last printed decimal, and the width of a float32 of this size."""


def golden_tensor() -> Array:
    """The ancestor's activation tensor, (4, 8, 8, 8), range -3.584 .. 12.036158."""
    index = np.arange(4 * 8 * 8 * 8)
    t = ((37 * index) % 1009) / 504.5 - 0.8
    x = (4 * t**3).reshape(4, 8, 8, 8)
    return np.asarray(x * (1 + 0.25 * np.arange(4))[:, None, None, None], np.float32)


def measured(name: str, arguments: dict[str, Any], column: tuple[bool, int, bool]) -> Cell:
    """Scale and zero point, the four samples seen one by one as calibration does."""
    symmetric, bits, relu = column
    x = np.maximum(golden_tensor(), 0) if relu else golden_tensor()
    spec = QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric)
    bounds = make_observer(name, arguments).bounds(sketch_of(*x[:, None], name=name), spec, "sparsebit")
    params = params_from_bounds(bounds, spec, rule="sparsebit")
    return float(params.scale), int(params.zero_point)


def test_the_golden_tensor_is_the_ancestors() -> None:
    x = golden_tensor()
    assert (float(x.min()), float(x.max())) == pytest.approx((-3.584, 12.036158), abs=1e-6)


@pytest.mark.parametrize(("name", "arguments", "column", "cell"), CASES)
def test_the_ancestors_numbers(
    name: str, arguments: dict[str, Any], column: tuple[bool, int, bool], cell: Cell
) -> None:
    scale, zero = measured(name, arguments, column)
    assert scale == pytest.approx(cell[0], abs=PRINTED, rel=0)
    assert zero == cell[1]


@pytest.mark.parametrize(("column", "cell"), list(zip(COLUMNS, ANCESTORS_KL, strict=True)))
def test_the_ancestors_entropy_search_is_a_constant(column: tuple[bool, int, bool], cell: Cell) -> None:
    """Its numbers are 0.75098 (8 bits) and 0.98535 (4 bits) of the largest value, whatever the data; ours follow them.

    It clips three times as hard at 8 bits as what loses the least information, with -t and t as the range even where
    the data end before.
    """
    symmetric, bits, relu = column
    largest = float(np.abs(golden_tensor()).max())
    constant = {8: 0.75098, 4: 0.98535}[bits] * largest
    width = 1 if relu and not symmetric else 2
    assert cell[0] == pytest.approx(constant * width / (2**bits - 1), rel=2e-5)
    scale, _ = measured("kl_histogram", {}, column)
    spec = QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric)
    ends = (-largest if symmetric else -3.584 * (not relu), largest)
    whole = (ends[1] - ends[0]) / (spec.qmax - spec.qmin)
    assert abs(scale / cell[0] - 1) > 0.04
    assert scale / whole > (0.97 if bits == 8 else 0.8)
