"""The batch as a whole: what is done once, what is not done again, what is reported, what is left when it is ended."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.batch import api
from sbonnx.batch.api import batch, look
from sbonnx.batch.database import State
from sbonnx.batch.jobs.batch_plan import request_of
from sbonnx.batch.jobs.job import BatchReport, Job, Places
from sbonnx.errors import OutputError, RecipeError
from tests.batch import works
from tests.batch.works import Begun, statuses
from tests.support.models import residual

ROOT = Path(__file__).resolve().parents[2]
FAST = (
    ("ROUNDING", "nearest"),
    ("BIAS_CORRECTION", "none"),
    ("KERNEL_COSTS", "none"),
)  # nothing pays in so small a model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and data."""
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(place: Path, name: str, backend: str = "onnxruntime", **more: Any) -> Job:
    """A job on that model."""
    fields: dict[str, Any] = {
        "name": name,
        "model": str(place / "m.onnx"),
        "data": str(place / "d.npz"),
        "split": 2,
        "backend": backend,
        "output": str(place / "out" / f"{name}.onnx"),
        "overrides": FAST,
    }
    return Job(**{**fields, **more})


def runs(report: BatchReport) -> dict[str, int]:
    """Samples that each step took through the float model for statistics, by its title."""
    return {report.titles[key]: one.counters.get("runs", 0) for key, one in report.steps.items()}


@pytest.mark.slow
def test_the_whole_of_it(place: Path) -> None:
    """The files are those of `sbonnx.quantize`, byte for byte; measured once; nothing the second time; one recipe
    changed: its job only, and without the float model.
    """
    jobs = [
        job(place, "ort"),
        job(place, "trt", "tensorrt"),
        job(place, "w4", "virtual", overrides=(*FAST, ("BITS", "w4a8"))),
    ]
    first = Begun()
    report = batch(jobs, workers=2, output=place / "out", watch=first)
    assert statuses(report) == {"ort": "done", "trt": "done", "w4": "done"}
    assert (report.ok, report.exit_code, first.closed) == (True, 0, 1)
    assert [row.up_to_date for row in report.rows] == [False] * 3
    counted = runs(report)
    assert sum(counted[title] for title in counted if title.startswith("calibrate")) > 0
    assert [counted[title] for title in counted if title.startswith("quantize")] == [0, 0, 0]
    for one in jobs:
        alone = place / f"alone-{one.name}.onnx"
        sets: dict[str, Any] = {key.lower(): value for key, value in one.overrides}
        sbonnx.quantize(one.model, one.data, recipe={"BACKEND": one.backend}, output=alone, split=2, **sets)
        assert Path(one.output).read_bytes() == alone.read_bytes(), one.name

    stamps = {path: path.stat().st_mtime_ns for path in (place / "out").glob("*.onnx")}
    second = Begun()
    again = batch(jobs, workers=2, output=place / "out", watch=second)
    assert second.titles == []
    assert second.settled == len(report.steps)
    assert [row.up_to_date for row in again.rows] == [True] * 3
    assert [row.outcome for row in again.rows] == [row.outcome for row in report.rows]
    assert stamps == {path: path.stat().st_mtime_ns for path in (place / "out").glob("*.onnx")}

    other = dataclasses.replace(jobs[0], overrides=(*FAST, ("OBSERVER", "percentile")))
    third = Begun()
    sketches = list((place / "out" / ".sbonnx" / "sketches").iterdir())
    for path in sketches:
        os.utime(path, (time.time() - 60 * 86400,) * 2)
    changed = batch([other, *jobs[1:]], workers=2, output=place / "out", watch=third)
    assert [title for title in third.titles if title.startswith("quantize")] == ["quantize ort"]
    assert [row.up_to_date for row in changed.rows] == [False, True, True]
    new = [one for key, one in changed.steps.items() if key not in report.steps]
    assert len(new) == 2
    assert [one.counters.get("runs") for one in new] == [0, 0], "the sketches suffice"
    assert sketches and all(path.stat().st_mtime > time.time() - 86400 for path in sketches), "used, and kept"


@pytest.mark.slow
def test_only_some_and_the_rest_later(place: Path) -> None:
    """What is shared is measured as for all of them, so that the rest finds it."""
    jobs = [job(place, "a-ort"), job(place, "b-trt", "tensorrt")]
    report = batch(jobs, only="a-*", output=place / "out")
    assert statuses(report) == {"a-ort": "done"}
    assert not (place / "out" / "b-trt.onnx").exists()
    rest = Begun()
    whole = batch(jobs, output=place / "out", watch=rest)
    assert rest.titles == ["quantize b-trt"]
    assert statuses(whole) == {"a-ort": "done", "b-trt": "done"}
    told = (place / "out" / "report.json").read_text()
    assert f"--saveEngine={place / 'out' / 'b-trt.engine'}" in told
    assert ".sbonnx/steps" not in told, "a folder that is gone"
    with pytest.raises(RecipeError, match="no job's name matches 'c-\\*'"):
        batch(jobs, only="c-*", output=place / "out")


@pytest.mark.slow
def test_a_refusal_is_remembered_and_force_tries_again(place: Path) -> None:
    (place / "bad.onnx").write_bytes(b"no model")
    jobs = [job(place, "good"), job(place, "bad", model=str(place / "bad.onnx"))]
    report = batch(jobs, output=place / "out")
    assert statuses(report) == {"good": "done", "bad": "refused"}
    assert (report.ok, report.exit_code) == (False, 1)
    assert "bad.onnx" in report.rows[1].outcome.reason
    seen = Begun()
    assert statuses(batch(jobs, output=place / "out", watch=seen)) == statuses(report)
    assert seen.titles == []
    before = (place / "out" / "good.onnx").read_bytes()
    forced = Begun()
    assert statuses(batch(jobs, output=place / "out", watch=forced, force=True)) == statuses(report)
    assert {"quantize good", "quantize bad", "calibrate m.onnx"} <= set(forced.titles)
    assert (place / "out" / "good.onnx").read_bytes() == before
    (place / "bad.onnx").write_bytes((place / "m.onnx").read_bytes())
    assert statuses(batch(jobs, output=place / "out"))["bad"] == "done"


@pytest.mark.slow
def test_corrupt_data_costs_its_own_job(place: Path) -> None:
    (place / "corrupt.npz").write_bytes((place / "d.npz").read_bytes()[:500])
    jobs = [job(place, "good"), job(place, "bad", data=str(place / "corrupt.npz"))]
    report = batch(jobs, output=place / "out")
    assert statuses(report) == {"good": "done", "bad": "refused"}
    assert "corrupt.npz" in report.rows[1].outcome.reason


@pytest.mark.slow
def test_an_output_that_was_removed_or_changed_comes_back(place: Path) -> None:
    jobs = [job(place, "a")]
    batch(jobs, output=place / "out")
    target = place / "out" / "a.onnx"
    before = target.read_bytes()
    for other in (None, b"other"):
        target.unlink()
        if other is not None:
            target.write_bytes(other)
        seen = Begun()
        assert batch(jobs, output=place / "out", watch=seen).ok
        assert target.read_bytes() == before
        assert seen.titles == []


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_said_and_tried_again(place: Path) -> None:
    jobs = [job(place, "a")]
    (place / "out" / "a.onnx").mkdir(parents=True)
    report = batch(jobs, output=place / "out")
    assert statuses(report) == {"a": "refused"}
    assert "is a folder" in report.rows[0].outcome.reason
    (place / "out" / "a.onnx").rmdir()
    assert statuses(batch(jobs, output=place / "out")) == {"a": "done"}


@pytest.mark.slow
def test_the_reports(place: Path) -> None:
    """All three say the same of each job, and nothing in JSON is beyond JSON."""
    (place / "bad.onnx").write_bytes(b"no model")
    good = job(place, "good", "virtual", overrides=(*FAST, ("bits", "w4a8")))
    batch([good, job(place, "bad", model=str(place / "bad.onnx"))], output=place / "out")

    def refuse(text: str) -> float:
        raise AssertionError(text)

    values = json.loads((place / "out" / "report.json").read_text(), parse_constant=refuse)
    assert (values["ok"], values["exit_code"], values["title"]) == (False, 1, "batch")
    assert [(row["job"]["name"], row["outcome"]["status"]) for row in values["rows"]] == [
        ("good", "done"),
        ("bad", "refused"),
    ]
    page = (place / "out" / "report.html").read_text()
    assert "good" in page
    assert "refused" in page
    suite = ET.parse(place / "out" / "report.xml").getroot()
    assert len(list(suite.iter("testcase"))) >= 2
    assert len(list(suite.iter("failure"))) + len(list(suite.iter("error"))) >= 1
    assert "isolated SQNR, worst layers first" in page, "the worst layers are named with the cause of their loss"
    assert "its weights" in page or "its inputs" in page
    assert not values["rows"][0]["outcome"]["report"]["details"]["nodes"], "graphs would make the page large"


@pytest.mark.parametrize("here", [True, False])
def test_paths_in_page_and_xml_are_relative(here: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the working folder or, as in a nightly run from elsewhere, to that of the job file."""
    (place / "bad.onnx").write_bytes(b"no model")
    (place / "jobs.yaml").write_text("{output: out, jobs: [{model: bad.onnx, data: calib}]}")
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place if here else place / "elsewhere")
    (row,) = batch(place / "jobs.yaml").rows
    assert str(place / "bad.onnx") in row.outcome.reason
    for name in ("report.html", "report.xml"):
        text = (place / "out" / name).read_text()
        assert "bad.onnx" in text
        assert str(place) not in text


@pytest.mark.slow
def test_a_dry_run_does_nothing(place: Path) -> None:
    jobs = [job(place, "a"), job(place, "b", "tensorrt")]
    batch(jobs, only="a", output=place / "out")
    files = {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*") if path.is_file()}
    report = batch(jobs, dry_run=True, output=place / "out")
    assert statuses(report) == {"a": "done", "b": "skipped"}
    assert report.rows[1].outcome.reason == api.WOULD
    changed = {
        path.name
        for path in (place / "out").rglob("*")
        if path.is_file() and files.get(path) != path.stat().st_mtime_ns
    }
    assert changed <= {"state.sqlite-shm", "state.sqlite-wal", "digests.json"}
    left = look(request_of(jobs, output=place / "out"))
    assert [step.title for step in left.steps] == ["quantize b"]
    forced = look(request_of(jobs, output=place / "out"), force=True)
    assert {step.title for step in forced.steps} == {"calibrate m.onnx", "quantize a", "quantize b"}


def test_jobs_that_cannot_be_a_batch(place: Path) -> None:
    with pytest.raises(RecipeError, match="has no folder: pass output="):
        batch([job(place, "a")])
    with pytest.raises(RecipeError, match="has no jobs"):
        batch([], output=place / "out")
    with pytest.raises(RecipeError, match="two jobs have the name 'a'"):
        batch([job(place, "a"), job(place, "a", output="x.onnx")], output=place / "out")
    with pytest.raises(RecipeError, match="two jobs have the output"):
        batch([job(place, "a"), job(place, "b", output=job(place, "a").output)], output=place / "out")
    with pytest.raises(RecipeError, match="give scheduler or cluster, not both"):
        batch([job(place, "a")], output=place / "out", scheduler="tcp://localhost:1", cluster=object())


def test_a_batch_beside_another(place: Path) -> None:
    with State(Places(place / "out")):
        with pytest.raises(OutputError, match="a batch is running in"):
            batch([job(place, "a")], output=place / "out")
        assert batch([job(place, "a")], output=place / "out", dry_run=True).rows[0].outcome.status == "skipped"


def test_large_models_begin_first(place: Path) -> None:
    (place / "large.onnx").write_bytes(bytes(3_000_000))
    small, large = works.step_of("small", place), works.step_of("large", place)
    step = dataclasses.replace(large, jobs=(dataclasses.replace(large.jobs[0], model=str(place / "large.onnx")),))
    near = dataclasses.replace(small, jobs=(dataclasses.replace(small.jobs[0], model=str(place / "m.onnx")),))
    assert (api.guess(step) or 0) > 3.9 > (api.guess(near) or 9)
    assert api.guess(dataclasses.replace(small, jobs=(job(place, "x", model="s3://bucket/m.onnx"),))) is None
    assert api.guess(dataclasses.replace(small, jobs=(job(place, "x", model="nowhere.onnx"),))) is None


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("../x.onnx", "is outside the output folder"),
        (".sbonnx/x.onnx", "is a file that the batch itself writes"),
        ("../m.onnx", "would overwrite .* the model of 'one'"),
        (f"{'n' * 300}.onnx", "has a name of 305 bytes"),
    ],
)
def test_jobs_made_by_hand_write_no_other_places(output: str, said: str, tmp_path: Path) -> None:
    """As those of a job file; before anything runs."""
    (tmp_path / "m.onnx").touch()
    job = Job("one", str(tmp_path / "m.onnx"), None, "onnxruntime", str(tmp_path / "out" / output))
    with pytest.raises(RecipeError, match=said):
        batch([job], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
