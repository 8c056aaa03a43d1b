"""``sbonnx batch``: tables, JSON, exit codes, messages on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from tests.support.models import residual

JOBS = """
title: nightly
output: out
defaults:
  data: d.npz
  split: 2
  set: {rounding: nearest, bias_correction: none, kernel_costs: none}
matrix:
  backend: [onnxruntime, tensorrt]
jobs:
  - model: m.onnx
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data and a job file."""
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    (tmp_path / "jobs.yaml").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_tables(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a dry run, of a run, and of a second run in which all is up to date."""
    assert main(["batch", "jobs.yaml", "--dry-run"]) == 0
    seen = capfd.readouterr()
    assert "nightly: 2 jobs" in seen.out
    assert "calibrate m.onnx" in seen.out
    assert seen.out.count("to be run") >= 4
    assert not (place / "out" / "report.json").exists()
    assert list((place / "out").glob("*.onnx")) == []

    assert main(["batch", "jobs.yaml", "--workers", "2"]) == 0
    seen = capfd.readouterr()
    rows = [line.split() for line in seen.out.splitlines() if line.startswith("m-")]
    assert [(row[0], row[1]) for row in rows] == [("m-onnxruntime", "done"), ("m-tensorrt", "done")]
    assert all(float(row[2]) > 10 for row in rows), "signal to noise"
    assert "2 jobs: 2 done; 2 of them run now" in seen.out
    assert "report: out/report.html" in seen.out
    lines = seen.err.splitlines()
    assert lines[0] == "3 steps, 0 up to date"
    assert lines[1].startswith("[1/3] calibrate m.onnx: done (")
    assert lines[-1].startswith("3 of 3 steps, in ")
    assert sorted(path.name for path in (place / "out").iterdir()) == [
        ".sbonnx",
        *("m-onnxruntime.onnx", "m-tensorrt.onnx", "report.html", "report.json", "report.xml"),
    ]

    assert main(["batch", "jobs.yaml"]) == 0
    seen = capfd.readouterr()
    assert "2 jobs: 2 done; 0 of them run now" in seen.out
    assert seen.err.splitlines()[0] == "3 steps, 3 up to date"
    assert main(["batch", "jobs.yaml", "--dry-run", "--force"]) == 0
    assert "3 steps to be run, about " in capfd.readouterr().out


@pytest.mark.slow
def test_json(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "jobs.yaml", "--json", "--json-progress", "--only", "*-tensorrt"]) == 0
    seen = capfd.readouterr()
    report = json.loads(seen.out)
    assert (report["ok"], report["exit_code"], report["title"]) == (True, 0, "nightly")
    assert [row["job"]["name"] for row in report["rows"]] == ["m-tensorrt"]
    assert json.loads((place / "out" / "report.json").read_text()) == report
    events = [json.loads(line) for line in seen.err.splitlines()]
    assert events[0]["event"] == "begin"
    assert events[-1]["event"] == "end"
    assert [one["status"] for one in events if one["event"] == "ended"] == ["done", "done"]
    assert {one["stage"] for one in events if one["event"] == "told"} - {"starting"}

    assert main(["batch", "jobs.yaml", "--json", "--dry-run"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert [(one["jobs"], one["to_be_run"]) for one in plan["steps"]] == [
        (["m-onnxruntime"], True),
        (["m-tensorrt"], False),
    ]
    assert [one["name"] for one in plan["jobs"]] == ["m-onnxruntime", "m-tensorrt"]


@pytest.mark.slow
def test_refused_job(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the reason printed once; the other job is done."""
    (place / "bad.onnx").write_bytes(b"no model")
    (place / "jobs.yaml").write_text(JOBS.replace("[onnxruntime, tensorrt]", "onnxruntime") + "  - model: bad.onnx\n")
    for flags in ([], ["--quiet"], []):
        assert main(["batch", "jobs.yaml", *flags]) == 1
        seen = capfd.readouterr()
        assert sum("bad-onnxruntime: refused" in line or "bad: refused" in line for line in seen.err.splitlines()) == 1
        assert seen.err.count("'bad.onnx' cannot be read") == 1 and "cannot be read" not in seen.out
        assert bool(seen.out) is not bool(flags)
    assert len(list((place / "out").glob("m*.onnx"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: out\njobs: []\n", "jobs"),
        ("output: out\njob: [{model: m.onnx}]\n", "Did you mean jobs?"),
        ("output: out\njobs: [{model: 'none*.onnx', data: d.npz}]\n", "none*.onnx"),
        ("output: [\n", "jobs.yaml"),
    ],
)
def test_invalid_job_files(text: str, message: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "jobs.yaml").write_text(text)
    assert main(["batch", "jobs.yaml"]) == 2
    seen = capfd.readouterr()
    assert seen.out == ""
    assert len(seen.err.splitlines()) == 1
    assert message in seen.err
    assert not (place / "out" / "report.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "nothing*"], "no job's name matches 'nothing*'"),
        (["--workers", "0"], "at least one worker"),
    ],
)
def test_invalid_flags(flags: list[str], message: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "jobs.yaml", *flags]) == 2
    assert message in capfd.readouterr().err


def test_missing_job_file(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "none.yaml"]) == 2
    assert "none.yaml" in capfd.readouterr().err


def test_a_dry_run_opens_models_and_data(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is found before the night; nothing is run or written."""
    (place / "cut.onnx").write_bytes((place / "m.onnx").read_bytes()[:-40])
    np.savez(place / "wide.npz", x=np.zeros((8, 3, 8, 9, 1), np.float32))
    jobs = JOBS + "  - {model: cut.onnx}\n  - {model: m.onnx, name: lost, data: gone}\n"
    jobs += "  - {model: m.onnx, name: wide, data: wide.npz}\n"
    jobs += "  - {model: m.onnx, name: other, eval: {data: wide.npz, metric: 'top1:none'}}\n"
    (place / "jobs.yaml").write_text(jobs.replace("[onnxruntime, tensorrt]", "[onnxruntime]"))
    assert main(["batch", "jobs.yaml", "--dry-run"]) == 1
    seen = capfd.readouterr()
    assert "4 jobs cannot run" in seen.out
    assert [line.split()[0] for line in seen.out.splitlines() if "cannot run  " in line] == [
        "cut-onnxruntime",
        "lost",
        "wide",
        "other",
    ]
    lines = seen.err.splitlines()
    assert "cut-onnxruntime: cannot run: 'cut.onnx'" in lines[0]
    assert "top1: the model has no output 'none'" in lines[3]
    assert "'gone'" in lines[1] and str(place) not in seen.err
    assert list((place / "out").glob("*.onnx")) == []
    assert main(["batch", "jobs.yaml", "--dry-run", "--json", "--only", "m-*"]) == 0
    assert json.loads(capfd.readouterr().out)["faults"] == {}


def test_a_dry_run_preprocesses_images(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of two jobs with the same images, the one without a preprocessing cannot run."""
    image = pytest.importorskip("PIL.Image")
    (place / "photos").mkdir()
    image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(place / "photos" / "a.png")
    job = "  - {model: m.onnx, data: photos, backend: ort"
    jobs = f"output: out\njobs:\n{job}, name: good, preprocess: unit}}\n{job}, name: bad}}\n"
    (place / "jobs.yaml").write_text(jobs)
    assert main(["batch", "jobs.yaml", "--dry-run"]) == 1
    seen = capfd.readouterr()
    assert "1 jobs cannot run" in seen.out
    assert seen.err.startswith("bad: cannot run: folder 'photos' holds images, which need --preprocess")
