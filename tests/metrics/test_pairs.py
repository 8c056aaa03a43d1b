"""Outputs of networks on the same samples, by one rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sbonnx.errors import DataError
from sbonnx.metrics.pairs import run_pairs
from sbonnx.spec import Array

SAMPLES = [(f"sample {number}", {"x": np.full((1, 4), number, np.float32)}) for number in (1, 2)]


def reference(feeds: Mapping[str, Array], /, *, where: str = "") -> dict[str, Any]:
    return {"y": feeds["x"], "label": ["a"], "z": 2 * feeds["x"]}


def test_outputs_are_paired_by_name() -> None:
    def swapped(feeds: Mapping[str, Array], /, *, where: str = "") -> dict[str, Any]:
        return dict(reversed(reference(feeds).items()))

    (compared,) = run_pairs(reference, (swapped,), SAMPLES, ["y", "label", "z"])
    assert [(output.name, output.relative) for output in compared.result()] == [("y", 0.0), ("z", 0.0)]


@pytest.mark.parametrize("value", [None, np.ones((2, 4), np.float32), np.array([[1, np.nan, 3, 4]], np.float32)])
def test_a_missing_or_broken_output_is_a_total_loss(value: Any) -> None:
    def broken(feeds: Mapping[str, Array], /, *, where: str = "") -> dict[str, Any]:
        return {"y": feeds["x"] + 1 if feeds["x"][0, 0] == 1 else value}

    (compared,) = run_pairs(reference, (broken,), SAMPLES, ["y"])
    (output,) = compared.result()
    assert output.lost and output.relative == math.inf and output.max_abs >= 1
    assert compared.by_feed()[1] == math.inf and math.isfinite(compared.by_feed()[0])


def test_the_metric_takes_the_outputs_of_a_feed() -> None:
    (compared,) = run_pairs(
        reference,
        (lambda feeds, /, *, where="": {"y": feeds["x"] + 3},),
        SAMPLES,
        ["y"],
        lambda changed, floats: float((changed["y"] - floats["y"]).max()),
    )
    assert compared.losses == [3.0, 3.0]


def test_an_error_names_the_sample() -> None:
    def failing(feeds: Mapping[str, Array], /, *, where: str = "") -> dict[str, Any]:
        raise DataError(f"cannot run on {where}")

    with pytest.raises(DataError, match="sample 1"):
        run_pairs(reference, (failing,), SAMPLES, ["y"])
