"""Quality by nature: figures against plain formulas, and the line with the interval."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sbonnx.spec import Array
from sbonnx.verify import Comparison, Limits
from sbonnx.verify.quality import OutputQuality, QualityFigure, QualitySamples

RNG = np.random.default_rng(5)


def quality(reference: Array, value: Array) -> OutputQuality:
    """Of one output whose feeds are single samples; the input has another shape."""
    samples = QualitySamples(["y"], None)
    for ref, val in zip(reference, value, strict=True):
        samples.add([ref[None]], [val[None]], {"x": np.zeros((1, 7), np.float32)})
    (found,) = samples.result()
    return found


def value_of(found: OutputQuality, name: str) -> float:
    return next(figure.value for figure in found.figures if figure.name == name)


def test_classes_by_hand() -> None:
    logits = (6 * RNG.standard_normal((40, 5))).astype(np.float32)
    other = logits + (2 * RNG.standard_normal(logits.shape)).astype(np.float32)
    found = quality(logits, other)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (logits, other))
    assert found.nature == "classes" and found.samples == 40
    assert value_of(found, "agreement") == pytest.approx((logits.argmax(1) == other.argmax(1)).mean())
    assert value_of(found, "KL") == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-3)
    assert [figure.name for figure in found.figures] == ["SQNR", "agreement", "KL"]


def test_probabilities_are_no_logits() -> None:
    """Their divergence is that of the values, not of their softmax."""
    p = RNG.dirichlet(np.ones(4), 20)
    q = RNG.dirichlet(np.ones(4), 20)
    assert value_of(quality(p, q), "KL") == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-3)


def test_what_all_samples_share_does_not_hide_an_error() -> None:
    """Anchors of a detector: 40 dB against the output, and yet nothing of what differs between samples is left."""
    anchors = 100 * RNG.standard_normal((30, 4))
    reference = anchors + RNG.standard_normal((16, 30, 4))
    found = quality(reference, np.broadcast_to(anchors, reference.shape))
    assert found.nature == "regression"
    assert value_of(found, "SQNR") > 35
    spread = reference.var(0, ddof=1).sum() * 16
    assert value_of(found, "relative error") == pytest.approx(math.sqrt(((reference - anchors) ** 2).sum() / spread))
    assert "relative error" in found.problem


def test_without_variation_the_error_is_relative_to_the_output() -> None:
    reference = np.broadcast_to(RNG.standard_normal((6, 3, 2)), (4, 6, 3, 2))
    assert value_of(quality(reference, 0.9 * reference), "relative error") == pytest.approx(0.1)


def test_more_samples_give_a_narrower_interval() -> None:
    reference = RNG.standard_normal((64, 100))
    value = reference + 0.1 * RNG.standard_normal(reference.shape)
    few, many = (quality(reference[:count], value[:count]) for count in (8, 64))
    assert few.nature == "embedding"
    assert [figure.name for figure in few.figures] == ["SQNR", "cosine"]
    for one, other in zip(few.figures, many.figures, strict=True):
        assert one.low < one.value < one.high
        assert other.high - other.low < one.high - one.low
    assert quality(reference, value) == quality(reference, value), "nothing is drawn by chance"


LOW = QualityFigure("agreement", 0.7, 0.5, 0.85, line=0.75)


@pytest.mark.parametrize(
    ("figure", "below"),
    [
        (LOW, False),
        (replace(LOW, high=0.74), True),
        (replace(LOW, low=-math.inf, high=math.inf), True),
        (replace(LOW, line=None), False),
        (QualityFigure("KL", 0.2, 0.05, 0.4, "nats", 0.1), False),
        (QualityFigure("KL", 0.2, 0.11, 0.4, "nats", 0.1), True),
        (QualityFigure("KL", 0.05, -math.inf, math.inf, "nats", 0.1), False),
    ],
)
def test_only_a_whole_interval_is_below_the_line(figure: QualityFigure, below: bool) -> None:
    assert figure.below is below


def test_a_limit_of_the_user_replaces_the_line() -> None:
    bad = OutputQuality("y", "classes", "10 logits", 32, (QualityFigure("agreement", 0.4, 0.3, 0.5, line=0.75),))
    comparison = Comparison((), 4, 1000, 300, quality=(bad,))
    (problem,) = Limits().problems(comparison)
    assert problem == (
        "output 'y' (classes, 32 samples) is below the quality line: agreement 40 % (30 to 50), line 75 %"
    )
    assert Limits(min_sqnr_db={"z": 5.0}).below(comparison) == (problem,)
    assert Limits(min_sqnr_db=5.0).below(comparison) == ()
    assert Limits(min_cosine={"y": 0.5}).below(comparison) == ()
