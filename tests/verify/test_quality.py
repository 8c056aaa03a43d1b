"""Quality by nature: figures against plain formulas, and the line with the interval."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest

from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import FigureName, OutputQuality, QualityFigure
from sbonnx.spec import Array
from sbonnx.verify import Limits
from sbonnx.verify.quality import LIMITS, QualitySamples, judge
from tests.support.models import model

RNG = np.random.default_rng(5)


def quality(reference: Array, value: Array, name: str = "y", inputs: Array | None = None) -> OutputQuality:
    """Of one output whose feeds are single samples; the input has another shape, and differs between samples."""
    proto = model(
        f"agraph (float[N,7] x) => (float[N,{reference.shape[1]}] {name}) {{ {name} = MatMul (x, w) }}", w=(7, 3)
    )
    samples = QualitySamples([name], proto if reference.ndim == 2 else None)
    given = RNG.standard_normal((len(reference), 7)) if inputs is None else inputs
    for ref, val, x in zip(reference, value, given, strict=True):
        samples.add([ref[None]], [val[None]], {"x": x[None].astype(np.float32)})
    (found,) = samples.result()
    return found


def value_of(found: OutputQuality, name: str) -> float:
    return next(figure.value for figure in found.figures if figure.name == name)


def test_classes_by_hand() -> None:
    logits = (6 * RNG.standard_normal((40, 5))).astype(np.float32)
    other = logits + (2 * RNG.standard_normal(logits.shape)).astype(np.float32)
    found = quality(logits, other, "logits")
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (logits, other))
    assert found.nature == "classes" and found.samples == 40
    assert value_of(found, "agreement") == pytest.approx((logits.argmax(1) == other.argmax(1)).mean())
    assert value_of(found, "KL") == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-3)
    assert [figure.name for figure in found.figures] == ["SQNR", "agreement", "KL", "relative error"]


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
    assert found.nature == "values"
    assert value_of(found, "SQNR") > 35
    spread = reference.var(0, ddof=1).sum() * 16
    assert value_of(found, "relative error") == pytest.approx(math.sqrt(((reference - anchors) ** 2).sum() / spread))
    assert found.problem is not None and "relative error" in found.problem


def test_without_variation_the_error_is_relative_to_the_output() -> None:
    reference = np.broadcast_to(RNG.standard_normal((6, 3, 2)), (4, 6, 3, 2))
    assert value_of(quality(reference, 0.9 * reference), "relative error") == pytest.approx(0.1)


def test_more_samples_give_a_narrower_interval() -> None:
    reference = RNG.standard_normal((64, 100))
    value = reference + 0.1 * RNG.standard_normal(reference.shape)
    few, many = (quality(reference[:count], value[:count]) for count in (8, 64))
    assert few.nature == "values"
    assert [figure.name for figure in few.figures] == ["SQNR", "relative error"]
    for one, other in zip(few.figures, many.figures, strict=True):
        assert one.low < one.value < one.high
        assert other.high - other.low < one.high - one.low
    inputs = RNG.standard_normal((64, 7))
    once, again = (quality(reference, value, inputs=inputs) for _ in range(2))
    assert once == again, "nothing is drawn by chance"


def test_no_variation_is_no_proof_of_a_loss() -> None:
    """A cache of a common prefix, 39 dB from float: its error is many times what differs between samples."""
    common = RNG.standard_normal((1, 64))
    reference = common + 1e-4 * RNG.standard_normal((12, 64))
    found = quality(reference, reference + 10 ** (-39 / 20) * RNG.standard_normal(reference.shape))
    assert value_of(found, "relative error") > 50 and value_of(found, "SQNR") == pytest.approx(39, abs=1)
    assert found.state == "uncertain"


def test_samples_that_are_alike_prove_no_loss() -> None:
    """Frames of one recording: what differs between them is little, and of the rest nothing is lost."""
    reference = 10 * RNG.standard_normal((1, 64)) + 0.3 * RNG.standard_normal((12, 64))
    value = reference + 0.3 * RNG.standard_normal(reference.shape)
    inputs = RNG.standard_normal((1, 7)) + 0.01 * RNG.standard_normal((12, 7))
    assert quality(reference, value).state == "lost"
    assert quality(reference, value, inputs=inputs).state == "uncertain"


def figure(name: FigureName, value: float, low: float, high: float) -> QualityFigure:
    return QualityFigure(name, value, low, high, "", LIMITS[name].kept, LIMITS[name].lost)


EXACT = figure("SQNR", 40.0, 39.0, 41.0)


@pytest.mark.parametrize(
    ("figures", "samples", "state"),
    [
        ([EXACT, figure("relative error", 0.05, 0.04, 0.06)], 6, "kept"),
        ([EXACT, figure("relative error", 0.05, 0.04, 0.06)], 4, "uncertain"),
        ([EXACT, figure("relative error", 0.09, 0.07, 0.12)], 64, "uncertain"),
        ([EXACT, figure("relative error", 0.3, 0.2, 0.4)], 64, "uncertain"),
        ([EXACT, figure("relative error", 0.9, 0.4, 1.4)], 64, "uncertain"),
        ([EXACT, figure("relative error", 0.9, 0.6, 1.4)], 64, "lost"),
        ([figure("SQNR", 4.0, -math.inf, math.inf)], 1, "lost"),
        ([figure("SQNR", 8.0, -math.inf, math.inf)], 1, "uncertain"),
        ([figure("SQNR", math.inf, -math.inf, math.inf)], 1, "kept"),
    ],
)
def test_what_figures_prove(figures: list[QualityFigure], samples: int, state: str) -> None:
    by = "SQNR" if figures[0].value in (4.0, math.inf) else figures[-1].name if len(figures) > 1 else None
    assert judge("values", figures, samples) == (state, by)
    assert judge("state", figures, samples) == ("unjudged", None)


@pytest.mark.parametrize(
    ("agreement", "divergence", "error", "samples", "state", "by"),
    [
        ((1.0, 0.94, 1.0), (0.01, 0.005, 0.015), (0.2, 0.15, 0.25), 64, "kept", "KL"),
        ((1.0, 0.61, 1.0), (0.001, 0.0, 0.002), (0.2, 0.15, 0.25), 6, "uncertain", "agreement"),
        ((1.0, 0.61, 1.0), (0.001, 0.0, 0.002), (0.03, 0.02, 0.04), 6, "kept", "relative error"),
        ((1.0, 0.51, 1.0), (0.001, 0.0, 0.002), (0.03, 0.02, 0.04), 4, "uncertain", "agreement"),
        ((0.5, 0.4, 0.6), (0.3, 0.2, 0.4), (0.6, 0.5, 0.7), 64, "lost", "KL"),
        ((0.5, 0.4, 0.6), (0.001, 0.0, 0.002), (0.1, 0.05, 0.2), 64, "uncertain", "agreement"),
        ((0.9, 0.8, 0.95), (0.05, 0.04, 0.06), (0.05, 0.04, 0.06), 64, "uncertain", "KL"),
    ],
)
def test_what_classes_prove(
    agreement: tuple[float, float, float],
    divergence: tuple[float, float, float],
    error: tuple[float, float, float],
    samples: int,
    state: str,
    by: str,
) -> None:
    """Few equal decisions prove nothing, but a small error does; decisions between equal probabilities are no loss."""
    last = replace(figure("relative error", *error), line=None)
    figures = [EXACT, figure("agreement", *agreement), figure("KL", *divergence), last]
    assert judge("classes", figures, samples) == (state, by)


LABELS = "agraph (float[N,7] x) => (float[N,3] y, int64[N,1] best) { y = MatMul (x, w) best = ArgMax <axis=1> (y) }"


@pytest.mark.parametrize(("count", "state"), [(1, "uncertain"), (16, "uncertain"), (100, "kept")])
def test_few_equal_labels_prove_nothing(count: int, state: str) -> None:
    """Beside the scores that they come from, they need no proof of their own."""
    proto = model(LABELS, w=(7, 3))
    alone = onnx.ModelProto()
    alone.CopyFrom(proto)
    del alone.graph.output[0]
    one, both = QualitySamples(["best"], alone), QualitySamples(["y", "best"], proto)
    for scores in RNG.standard_normal((count, 1, 3)).astype(np.float32):
        best, feed = scores.argmax(1, keepdims=True), {"x": RNG.standard_normal((1, 7)).astype(np.float32)}
        one.add([best], [best], feed)
        both.add([scores, best], [1.01 * scores, best], feed)
    assert one.result()[0].nature == "labels" and one.result()[0].state == state
    assert [output.state for output in both.result()][1] == ("unjudged" if state == "uncertain" else "kept")


def test_detections_of_another_number_are_not_kept() -> None:
    """Rows that are equal on the other samples prove nothing."""
    samples = QualitySamples(["y"], None)
    for number in range(12):
        rows = RNG.standard_normal((3 + number % 2, 4))
        samples.add([rows], [rows if number else rows[:2]], {"x": RNG.standard_normal((1, 7))})
    (found,) = samples.result()
    assert found.nature == "detections" and found.state == "uncertain"


def test_bytes_of_an_image_are_values_and_other_integers_are_not() -> None:
    reference = RNG.integers(0, 256, (12, 48)).astype(np.uint8)
    value = np.clip(reference.astype(np.int64) + RNG.integers(-2, 3, reference.shape), 0, 255).astype(np.uint8)
    found = quality(reference, value)
    assert found.nature == "values" and found.state == "kept"
    found = quality(reference.astype(np.int64), value.astype(np.int64))
    assert found.nature == "labels" and found.state == "uncertain", "they may be numbers of something"


LOW = QualityFigure("agreement", 0.7, 0.5, 0.85, line=0.75)


@pytest.mark.parametrize(
    ("figure", "below"),
    [
        (LOW, False),
        (replace(LOW, high=0.74), True),
        (replace(LOW, low=-math.inf, high=math.inf), False),
        (QualityFigure("SQNR", 5.0, -math.inf, math.inf, line=6.0), True),
        (replace(LOW, line=None), False),
        (QualityFigure("KL", 0.2, 0.05, 0.4, line=0.1), False),
        (QualityFigure("KL", 0.2, 0.11, 0.4, line=0.1), True),
        (QualityFigure("KL", 0.05, -math.inf, math.inf, line=0.1), False),
    ],
)
def test_only_a_whole_interval_is_below_the_line(figure: QualityFigure, below: bool) -> None:
    assert figure.below is below


def test_a_limit_of_the_user_replaces_the_line() -> None:
    bad = OutputQuality(
        "y", "classes", "10 logits", 32, (QualityFigure("agreement", 0.4, 0.3, 0.5, line=0.75),), "lost"
    )
    comparison = Comparison((), 4, 1000, 300, quality=(bad,))
    (problem,) = Limits().problems(comparison)
    assert problem == ("output 'y' is far from float on 32 samples: agreement 40 % (30 to 50), lost up to 75 %")
    assert Limits(min_sqnr_db={"z": 5.0}).below(comparison) == (problem,)
    assert Limits(min_sqnr_db=5.0).below(comparison) == ()
    assert Limits(min_cosine={"y": 0.5}).below(comparison) == ()
