"""The command of a job that misses its quality: it runs in a shell as it is, and its advice repairs the result."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import recipe as recipes
from sbonnx.assets import digits
from sbonnx.batch.api import batch
from sbonnx.batch.jobs.job import Job, Outcome
from sbonnx.batch.repair_command import advice_of, with_commands
from sbonnx.report import Report
from sbonnx.values import json_values, plain
from tests.support.values import built, some

SECRET = "it's a $HOME folder"


@pytest.mark.slow
def test_the_command_runs_and_leads_to_a_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder that is a secret and needs quoting."""
    monkeypatch.setenv("VAULT", SECRET)
    folder = tmp_path / SECRET
    folder.mkdir()
    onnx.save(onnx.load(digits().model), str(folder / "m.onnx"))
    np.savez(folder / "d.npz", image=np.load(digits().calib)["image"][:96])
    (tmp_path / "jobs.yaml").write_text(
        """output: out
jobs:
  - {model: '${VAULT}/m.onnx', data: '${VAULT}/d.npz', split: 1, bits: w2a2, set: {W.ROUNDING.TYPE: nearest}}"""
    )
    report = batch(tmp_path / "jobs.yaml")
    (row,) = report.rows
    assert row.outcome.status == "unaccepted"
    command = some(row.advice).command
    assert SECRET not in command and "${VAULT}" in command
    values = json.loads((tmp_path / "out" / "report.json").read_text())
    assert values["rows"][0]["advice"] == plain(row.advice)
    for name in ("report.html", "report.xml"):
        assert "repeat the job alone" in (tmp_path / "out" / name).read_text()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tree = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command,
        check=False,
        shell=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": tree},
    )
    assert done.returncode == 1, done.stderr
    assert "advice: " in done.stderr and "(measured: " in done.stderr
    assert Path(row.job.output.replace(".onnx", ".tried.onnx")).is_file()


def missed(*what: str, **report: Any) -> Outcome:
    """An outcome that misses thresholds."""
    rows = tuple((name, 0.0, 21.5, False) for name in what)
    return Outcome("k", "unaccepted", accepted=rows, report=json_values(built(Report, report)))


JOB = Job("j", "/m.onnx", "/d.npz", "onnxruntime", "/o/j.onnx", overrides=(("bits", "w7a8"), ("min_sqnr", "3")))


@pytest.mark.parametrize(
    ("outcome", "key", "value"),
    [
        (missed("min_sqnr"), "verify.min_sqnr_db", 21.5),
        (missed("min_agreement"), "auto.enable", True),
        (missed("max_size_ratio", "min_metric.top1"), "auto.enable", True),
        (missed(problems=["output 'y' is lost"]), "verify.min_sqnr_db", 3),
    ],
)
def test_a_threshold_becomes_a_key(outcome: Outcome, key: str, value: object) -> None:
    words = shlex.split(some(advice_of(JOB, outcome)).command)
    assert words[:5] == ["sbonnx", "quantize", "/m.onnx", "--data", "/d.npz"]
    assert words[words.index("-o") + 1] == "/o/j.tried.onnx"
    given = [word for before, word in pairwise(words) if before == "--set"]
    found: Any = recipes.load(None, backend=words[words.index("--backend") + 1], overrides=given)
    assert (found.w.quantizer.bit, found.backend) == (7, "onnxruntime")
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_no_command_where_none_helps() -> None:
    """Sizes, results that a search found, other failures, and files that the command cannot read."""
    assert advice_of(JOB, missed("max_size_ratio", "max_latency_ratio")) is None
    assert advice_of(JOB, missed("min_agreement", search={"trials": 3, "loss": "top1"})) is None
    assert advice_of(JOB, replace(missed("min_sqnr"), status="refused")) is None
    assert advice_of(replace(JOB, data="s3://lake/d.npz"), missed("min_sqnr")) is None
    assert advice_of(replace(JOB, model="${NO_SUCH_NAME}/m.onnx"), missed("min_sqnr")) is None
    assert advice_of(replace(JOB, recipe="s3://lake/r.yaml"), missed("min_sqnr")) is None
    found = advice_of(replace(JOB, output="s3://lake/j.onnx?v=1"), missed("min_sqnr"))
    assert " -o j.tried.onnx " in some(found).command


def test_remedies_get_the_command_of_the_job() -> None:
    cause = {"node": "c", "op": "Conv", "sqnr_db": 9.0, "tensor": "a", "role": "weight", "why": "", "remedy": "8 bits"}
    outcome = missed("min_sqnr", causes=[{**cause, "overrides": ["w_bit=8"]}, {**cause, "remedy": "more samples"}])
    first, second = some(with_commands(JOB, outcome).result).causes
    words = shlex.split(some(first.command))
    assert words[:3] == ["sbonnx", "quantize", "/m.onnx"] and words[words.index("-o") - 1] == "w_bit=8"
    assert second.command is None, "no change of the recipe"
    assert with_commands(replace(JOB, data="s3://lake/d.npz"), outcome) is outcome
