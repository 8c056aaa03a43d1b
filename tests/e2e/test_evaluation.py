"""A metric on labelled data beside quantization: results of both models, limits, and searches that meet them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import sbonnx
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.errors import DataError, RecipeError
from tests.support.values import some

DATA = digits()
COMMAND = ["quantize", str(DATA.model), "--data", str(DATA.calib), "--split", "32", "-o", "q.onnx"]
LABELLED = ["--eval", str(DATA.eval), "--metric", "top1"]


def top1(model: Path) -> float:
    stored, session = np.load(DATA.eval), ort.InferenceSession(str(model))
    scores = session.run(None, {"image": stored["image"]})[0]
    return float((scores.argmax(1) == stored["label"]).mean())


@pytest.mark.slow
def test_quantize_and_compare_show_the_metric_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, *LABELLED, "--bits", "w4a4", "--effort", "fast", "--report", "r.html", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["metrics"]["evaluation"]
    values = [row["metric"]["value"] for row in found["rows"]]
    assert values == [top1(DATA.model), top1(tmp_path / "q.onnx")]
    assert [row["model"] for row in found["rows"]] == ["float", "quantized"] and found["samples"] == 450
    assert found["rows"][1]["difference"]["value"] == pytest.approx(values[1] - values[0])
    compare = ["compare", str(DATA.model), "q.onnx", "--data", str(DATA.calib), "--split", "50"]
    assert main([*compare, *LABELLED, "--max-loss", "50%"]) == 0
    assert f"accuracy kept: top1 {values[1]:.4f}, float {values[0]:.4f}" in capfd.readouterr().out
    assert main([*compare, *LABELLED, "--max-loss", "0"]) == (1 if values[1] < values[0] else 0)
    assert main([*compare, "--max-loss", "1%"]) == 2
    assert "--max-loss limits the loss in a metric: give --eval" in capfd.readouterr().err


@pytest.mark.slow
def test_searches_judge_by_the_metric(tmp_path: Path) -> None:
    """2-bit weights lose accuracy; the fewest bits within the labelled loss are chosen."""
    evaluation = sbonnx.EvaluationData(DATA.eval, "top1", split=90)
    keys: dict[str, Any] = {"MIXED.WEIGHTS": [2, 8], "effort": "fast", "evaluation": evaluation, "backend": "virtual"}
    keys["minimize"] = "bits"
    report = sbonnx.quantize(DATA.model, DATA.calib, output=tmp_path / "q.onnx", split=32, max_loss="1%", **keys)
    assert report.ok, report.problems
    float_row, row = some(some(report.metrics).evaluation).rows
    assert row.loss <= 0.01 and row.metric.value == top1(tmp_path / "q.onnx")
    assert float_row.metric.value == top1(DATA.model)
    bits = {site.bits for site in report.sites if site.role == "weight"}
    assert 2 in bits, "some layers keep 2 bits"


@pytest.mark.slow
def test_the_verdict_is_by_the_limit(tmp_path: Path) -> None:
    """A loss within the limit is none, although it is larger than the one of a verdict without a limit."""
    evaluation = sbonnx.EvaluationData(DATA.eval, "top1", split=90)
    keys: dict[str, Any] = {"effort": "fast", "rounding": "nearest", "evaluation": evaluation, "backend": "virtual"}
    report = sbonnx.quantize(DATA.model, DATA.calib, split=32, bits="w2a4", max_loss="8%", details=False, **keys)
    found = some(some(report.metrics).evaluation)
    loss = found.rows[1].loss
    assert found.max_loss == 0.08 and 0.01 < loss <= 0.08
    assert report.verdict.accuracy == "kept"
    assert not any("max_loss allows" in problem for problem in report.problems)


@pytest.mark.slow
def test_pruning_and_training_show_the_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images, labels = (np.load(DATA.eval)[name] for name in ("image", "label"))
    evaluation = sbonnx.EvaluationData([({"pixels": images}, labels)], "top1", split=90)
    output = tmp_path / "p.onnx"
    report = sbonnx.prune(
        DATA.model, DATA.calib, output=output, split=32, max_loss="3%", evaluation=evaluation, samples=2
    )
    row = some(some(report.metrics).evaluation).rows[1]
    assert row.metric.value == top1(output) and row.model == "pruned"
    assert report.ok and report.macs < 0.9 and row.loss <= 0.03
    assert row.loss == pytest.approx(report.reached["max_loss"])
    assert "array 'pixels' of the data is taken as input 'image'" in report.notes
    pytest.importorskip("torch", reason="torch is not installed")
    qat = ["qat", str(DATA.model), "--data", str(DATA.calib), "--split", "32", "-o", "t.onnx", "--epochs", "1"]
    assert main([*qat, *LABELLED, "--samples", "2"]) == 0
    out = capfd.readouterr().out
    assert f"top1 {top1(tmp_path / 't.onnx'):.4f}, float 0." in out and "450 labelled samples" in out


def test_labels_are_checked_before_the_work() -> None:
    with pytest.raises(DataError, match="top1 needs labels"):
        sbonnx.quantize(DATA.model, DATA.calib, evaluation=sbonnx.EvaluationData(DATA.calib, "top1"))
    with pytest.raises(RecipeError, match="give metric, or evaluation"):
        evaluation = sbonnx.EvaluationData(DATA.eval, "top1")
        sbonnx.quantize(DATA.model, DATA.calib, evaluation=evaluation, metric=lambda x, y: 0.0, max_loss=0.01)
    wrong_forms: tuple[tuple[dict[str, Any], str], ...] = (
        ({"evaluation": "val/"}, "evaluation is no EvaluationData but str: write evaluation=sbonnx.EvaluationData"),
        ({"metric": "top1", "max_loss": "1%"}, "metric is no function of outputs but 'top1': for a metric on labelled"),
        ({"eval": "val/", "metric": "top1"}, "metric is no function"),
        ({"eval": "val/"}, r"evaluation.*sbonnx\.EvaluationData\(DATA, METRIC\)"),
    )
    for wrong, message in wrong_forms:
        with pytest.raises(RecipeError, match=message):
            sbonnx.quantize(DATA.model, DATA.calib, **wrong)
    with pytest.raises(RecipeError, match="evaluation is no EvaluationData"):
        sbonnx.compare(DATA.model, DATA.model, DATA.calib, evaluation=("val/", "top1"))  # type: ignore[arg-type]
    found = sbonnx.evaluate({"digits": DATA.model}, sbonnx.EvaluationData(DATA.eval, "top5"))
    assert found.rows[0].metric.value > 0.99


WRONG = {
    "no metric": (["--eval", str(DATA.eval)], "name it with --metric"),
    "no data": (["--metric", "top1"], "--metric is for labelled data: give it with --eval DATA"),
    "not verified": ([*LABELLED, "--no-verify"], "drop --no-verify"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_need_each_other(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags, message = WRONG[case]
    assert main([*COMMAND, *flags]) == 2
    err = capfd.readouterr().err
    assert message in err and len(err.splitlines()) == 1
