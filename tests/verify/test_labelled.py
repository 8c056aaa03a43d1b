"""Metrics of models on labelled data: values of a plain onnxruntime loop, intervals, and errors that name the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from sbonnx.assets import digits
from sbonnx.errors import DataError
from sbonnx.verify import intervals
from sbonnx.verify.labelled import EvaluationData, evaluate

NETWORK, EVAL = digits().model, digits().eval


def test_equals_a_plain_loop_and_compares_side_by_side() -> None:
    data = np.load(EVAL)
    (name,) = (key for key in data.files if key != "label")
    session = ort.InferenceSession(str(NETWORK))
    scores = session.run(None, {session.get_inputs()[0].name: data[name]})[0]
    expected = float((scores.argmax(1) == data["label"]).mean())
    found = evaluate({"a": NETWORK, "b": NETWORK}, EvaluationData(EVAL, "top1", split=50))
    first, second = found.rows
    assert first.metric.value == expected == second.metric.value
    assert found.samples == len(data["label"])
    assert (first.metric.low, first.metric.high) == intervals.wilson(round(expected * found.samples), found.samples)
    assert first.difference is None and second.difference is not None
    assert (second.difference.low, second.difference.high) == intervals.paired(0, 0, found.samples), "paired"
    assert found.chance == 0.1
    assert replace(found, max_loss=0.0).problems() == ()


@pytest.mark.slow
def test_the_interval_of_the_bootstrap_covers_the_mean() -> None:
    """About 57 of 60 intervals of 95 % contain the mean of a normal distribution."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        values = rng.standard_normal(50)
        draws = intervals.resampled([lambda counts, values=values: float(np.average(values, weights=counts))], 50)  # type: ignore[misc]
        low, high = intervals.percentile(draws[0])
        hits += low <= 0 <= high
    assert 51 <= hits <= 60
    assert intervals.percentile(np.full(10, np.nan)) == intervals.UNKNOWN


def test_errors_name_model_and_feed(tmp_path: Path) -> None:
    data = np.load(EVAL)
    (name,) = (key for key in data.files if key != "label")
    np.savez(tmp_path / "no.npz", **{name: data[name]})
    with pytest.raises(DataError, match=r"digits: top1 needs labels .*no\.npz"):
        evaluate({"digits": NETWORK}, EvaluationData(tmp_path / "no.npz", "top1"))
    np.savez(tmp_path / "far.npz", **{name: data[name], "Y": data["label"] + 1})
    with pytest.raises(DataError, match="label 10 and the output has the classes 0 to 9: are the classes counted"):
        evaluate({"digits": NETWORK}, EvaluationData(tmp_path / "far.npz", "top1"))


def test_decoders(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def first(outputs):\n    return next(iter(outputs.values()))\ndef broken(outputs):\n    return outputs['no']\n"
    )
    plain = EvaluationData(EVAL, "f1")
    decoded = EvaluationData(EVAL, "f1", decode=f"{tmp_path / 'own.py'}:first")
    models = {"m": NETWORK}
    assert evaluate(models, decoded) == evaluate(models, plain)
    with pytest.raises(DataError, match=r"--decode failed on .*KeyError: 'no'"):
        evaluate(models, EvaluationData(EVAL, "f1", decode=f"{tmp_path / 'own.py'}:broken"))
