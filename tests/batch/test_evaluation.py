"""Labelled data in job files: read with the defaults, part of the key, evaluated for both models, and a threshold."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sbonnx.assets import digits
from sbonnx.batch.api import batch
from sbonnx.batch.jobs.job import HistoryRow, Job, JobEvaluation
from sbonnx.batch.jobs.jobfile import read_jobs
from sbonnx.batch.jobs.steps import steps_of
from sbonnx.batch.repair_command import advice_of
from sbonnx.cli.create.batch import _row
from sbonnx.errors import RecipeError
from sbonnx.present.html.overview import overview_of
from tests.support.values import some

JOBS = """
output: out
defaults:
  data: calib.npz
  split: 32
  set: {samples: 4, rounding: nearest, bits: w4a8}
  eval: {data: "{model}_eval.npz", metric: top1}
jobs:
  - model: digits.onnx
    name: strict
    accept: {max_loss: 0%}
    eval: {metric: f1, split: 450}
  - model: digits.onnx
    name: loose
    accept: {max_loss: 90%}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    shutil.copy(digits().model, tmp_path / "digits.onnx")
    shutil.copy(digits().calib, tmp_path / "calib.npz")
    shutil.copy(digits().eval, tmp_path / "digits_eval.npz")
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path / "jobs.yaml"


def keys(job: Job) -> tuple[str, str]:
    (step,) = (step for step in steps_of([job]) if step.kind == "quantize")
    return step.key, step.work


def test_keys_of_eval_are_read_and_part_of_the_key(file: Path) -> None:
    _, _, (strict, loose) = read_jobs(file)
    data = str(file.parent / "digits_eval.npz")
    assert strict.evaluation == JobEvaluation(data, "f1", split=450)
    assert loose.evaluation == JobEvaluation(data, "top1") and strict.accept.max_loss == 0.0
    assert keys(strict)[1] != keys(replace(strict, evaluation=None))[1]
    before = keys(loose)
    (file.parent / "own.py").write_text("def score(outputs, labels):\n    return [1.0]\n")
    own = replace(loose, evaluation=JobEvaluation(data, f"{file.parent / 'own.py'}:score"))
    old = keys(own)
    (file.parent / "own.py").write_text("def score(outputs, labels):\n    return [0.0]\n")
    assert keys(own)[1] != old[1]
    shutil.copy(digits().calib, data)
    assert keys(loose) != before


WRONG = {
    "eval: {data: e.npz}": "needs metric",
    "eval: {data: e.npz, metric: top2}": "names no metric: there is no metric 'top2'",
    "eval: {data: e.npz, metric: top1, label: x}": "Did you mean labels",
    "accept: {max_loss: 1%}": "needs eval",
    "accept: {max_loss: 2}": "must be a share, 0 to 1",
}


@pytest.mark.parametrize("keys", WRONG)
def test_what_is_wrong_is_said(file: Path, keys: str) -> None:
    file.write_text(f"output: out\njobs:\n  - model: digits.onnx\n    {keys}\n")
    with pytest.raises(RecipeError, match=WRONG[keys]):
        read_jobs(file)


@pytest.mark.slow
def test_both_models_are_evaluated_and_judged(file: Path) -> None:
    _, _, jobs = read_jobs(file)
    report = batch(file, workers=2)
    strict, loose = (row.outcome for row in report.rows)
    assert loose.status == "done" and loose.report is not None and strict.report is not None
    found = loose.report["metrics"]["evaluation"]
    assert found["samples"] == 450 and [row["model"] for row in found["rows"]] == ["float", "quantized"]
    assert ("max_loss", found["rows"][1]["loss"], 0.9, True) in loose.accepted
    loss = strict.report["metrics"]["evaluation"]["rows"][1]["loss"]
    assert strict.accepted == (("max_loss", loss, 0.0, loss <= 0),)
    assert strict.status == ("unaccepted" if loss > 0 else "done")
    if loss > 0:
        assert "max_loss: " in strict.reason
        command = some(advice_of(jobs[0], strict)).command
        assert "--eval" in command and "--metric f1" in command and "AUTO.ENABLE=true" in command
    shown = overview_of(report)
    cell, row = shown.jobs[1].cells[2], found["rows"][1]
    assert cell.value == row["metric"]["value"] and cell.met
    assert cell.threshold.startswith("top1, ") and cell.threshold.endswith(" points lost, limit 90")
    figures = f"top1 {row['metric']['value']:.4f} ({row['difference']['value']:+.4f})"
    assert _row(report.rows[1], ())[2] == figures, "in the table of the terminal as well"
    before = HistoryRow("", "done", None, None, None, "top1", 0.5)
    assert _row(report.rows[1], (before, before))[2] == f"{figures}; before 0.5000"
