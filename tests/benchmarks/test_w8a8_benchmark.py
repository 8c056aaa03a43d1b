"""The benchmarks at 8 bits: scores with intervals, records, whole processes, tables and gains of techniques."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scores, techniques
from benchmarks.accuracy import load_pack
from benchmarks.scores import Estimate, estimate

MODEL = "cifar_resnet20"


def test_an_interval_is_that_of_the_mean() -> None:
    """Of 400 normal values: 1.96 standard errors on both sides."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = estimate(lambda rows: float(values[rows].mean()), len(values))
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / 20
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)
    assert found.low < found.value < found.high


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", scores.METRICS)
def test_figures_of_the_float_file_are_those_of_the_pack(pack: Path, name: str) -> None:
    """The metric is the one that the pack's evaluation gives, on the same samples."""
    module, limit = load_pack(pack), 4
    found = scores.outputs(module, name, limit=limit)
    made = scores.evaluate(module, name, found, found, limit)
    assert made.sqnr.value == math.inf and made.agreement.value == pytest.approx(1.0)
    metrics = module.evaluate(name, limit=limit)
    keys = {"jpeg:top1", "val:top1", "sample:top1", "spearman", "map50"} & metrics.keys()
    for key in keys:
        assert made.metric.value == pytest.approx(metrics[key], nan_ok=True)
    assert keys or name in ("ultraface_rfb320", "silero_vad")


def test_a_gain_is_the_mean_over_draws_with_the_interval_of_students_t() -> None:
    signal, noise = np.full(200, 100.0), np.ones(200)
    gains = np.array([-2.0, -0.5, 0.1])
    on = [np.stack([signal, noise * 10 ** (-each / 10)]) for each in gains]
    found = techniques.gain(on, 3 * [np.stack([signal, noise])])
    half = 4.3027 * gains.std(ddof=1) / math.sqrt(3)  # equal samples: only the draws differ
    assert found.value == pytest.approx(-0.8, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((-0.8 - half, -0.8 + half), abs=1e-3)
    assert techniques.is_open(found) and not techniques.harms(found)
    said = techniques.verdict({(4, MODEL): {"gptq": found, "heads": None, "share": Estimate(-1.0, -1.2, -0.8)}})
    assert "lower it by more: share on cifar_resnet20 at 4 bits." in said and "not the interval: gptq on" in said
    feeds = list(range(10))
    assert techniques.drawn(feeds, 1, 99) != techniques.drawn(feeds, 2, 99) and len(techniques.drawn(feeds, 1, 99)) == 8
    assert techniques.drawn(feeds, 1, 3) == sorted(techniques.drawn(feeds, 1, 3))
