"""Never stale, never damaged: what a second batch does again after something has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.batch.api import batch
from sbonnx.batch.database import past
from sbonnx.batch.jobs.job import Acceptance, BatchReport, Job, Places
from sbonnx.values import plain
from tests.batch.test_work import own, place
from tests.batch.works import statuses
from tests.support.values import some

__all__ = ["place"]

SLOW = pytest.mark.slow


def run(folder: Path, *jobs: Job) -> BatchReport:
    return batch(jobs, output=folder / "out", workers=1)


def fresh(report: BatchReport) -> dict[str, bool]:
    """Names of jobs: whether they were run now."""
    return {row.job.name: not row.up_to_date for row in report.rows}


def runs(report: BatchReport) -> list[Any]:
    """Samples that went through the float model, of each job."""
    return [row.outcome.counters.get("runs") for row in report.rows]


def overwrite(path: Path) -> None:
    """Change a byte in place, and set the mtime back."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte[0] ^ 255]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "damage", ["output", "kept", *(pytest.param(one, marks=SLOW) for one in ("output deleted", "both", "kept deleted"))]
)
def test_damaged_files_are_not_up_to_date(damage: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output comes from the kept copy where that is intact; else the step runs again."""
    monkeypatch.setattr("sbonnx.batch.file_digests.SETTLED_NS", 0)
    report = run(place, own(place))
    output = place / "out" / "a.onnx"
    kept = place / "out" / ".sbonnx" / "steps" / report.rows[0].outcome.key / "files" / "a.onnx"
    wanted = output.read_bytes()
    assert fresh(run(place, own(place))) == {"a": False}
    for path in {"kept": [kept], "both": [kept, output], "kept deleted": [kept]}.get(damage, [output]):
        path.unlink() if "deleted" in damage else overwrite(path)
    again = run(place, own(place))
    assert again.ok and fresh(again) == {"a": not damage.startswith("output")}
    assert output.read_bytes() == kept.read_bytes() == wanted
    assert fresh(run(place, own(place))) == {"a": False}


@pytest.mark.slow
def test_a_model_rewritten_in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights, with the old size and mtime; a file that was only touched runs nothing."""
    monkeypatch.setattr("sbonnx.batch.file_digests.SETTLED_NS", 0)
    run(place, own(place))
    before, path = (place / "out" / "a.onnx").read_bytes(), place / "m.onnx"
    status, model = path.stat(), onnx.load(str(path))
    path.touch()
    assert fresh(run(place, own(place))) == {"a": False}
    weights = model.graph.initializer[0]
    weights.raw_data = (np.frombuffer(weights.raw_data, np.float32) * np.float32(1.5)).tobytes()
    onnx.save(model, str(path))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert fresh(run(place, own(place))) == {"a": True}
    assert (place / "out" / "a.onnx").read_bytes() != before


METRIC = """
import json, os
import helper

def score(path):
    import later
    rows = json.load(open(os.path.join(os.path.dirname(__file__), "labels.json")))
    names = os.listdir(os.path.join(os.path.dirname(__file__), "images"))
    with open(CALLS, "a") as log:
        log.write(f"{path}\\n")
    module = __import__("by_name")
    return {"score": helper.VALUE + later.VALUE + rows["value"] + len(names) + module.VALUE}
"""


@pytest.fixture
def metric(place: Path) -> Path:
    """Metric code, with modules and data beside it; it is given in `metric.py`."""
    folder = place / "code"
    (folder / "images").mkdir(parents=True)
    (folder / "metric.py").write_text(METRIC.replace("CALLS", repr(str(place / "calls"))))
    for name in ("helper", "later", "by_name"):
        (folder / f"{name}.py").write_text("VALUE = 1\n")
    (folder / "labels.json").write_text('{"value": 1}')
    (folder / "images" / "0.png").touch()
    return folder


def accepting(folder: Path, least: float, name: str = "a") -> Job:
    """A job with the metric."""
    accept = Acceptance(metric=f"{folder / 'code' / 'metric.py'}:score", min_metric=(("score", least),))
    return own(folder, name, accept=accept)


def calls(folder: Path) -> int:
    """Number of runs of the metric since the last call."""
    count = len((folder / "calls").read_text().splitlines()) if (folder / "calls").exists() else 0
    (folder / "calls").unlink(missing_ok=True)
    return count


QUICK = ("a module", "data that it opens")

CHANGES: dict[str, Callable[[Path], object]] = {
    "the metric": lambda folder: (folder / "metric.py").write_text((folder / "metric.py").read_text() + "# new\n"),
    "a module": lambda folder: (folder / "helper.py").write_text("VALUE = 2\n"),
    "a module imported within the function": lambda folder: (folder / "later.py").write_text("VALUE = 2\n"),
    "a module imported by a computed name": lambda folder: (folder / "by_name.py").write_text("VALUE = 2\n"),
    "data that it opens": lambda folder: (folder / "labels.json").write_text('{"value": 2}'),
    "a folder that it lists": lambda folder: (folder / "images" / "1.png").touch(),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", [one if one in QUICK else pytest.param(one, marks=SLOW) for one in CHANGES])
def test_a_changed_metric_is_run_again_alone(what: str, metric: Path, place: Path) -> None:
    """Modules and data count; nothing is quantized again, and no bytecode hides an edit of equal size."""
    first = run(place, accepting(place, 5.0))
    assert statuses(first) == {"a": "done"} and calls(place) == 2
    assert fresh(run(place, accepting(place, 5.0))) == {"a": False} and calls(place) == 0
    CHANGES[what](metric)
    again = run(place, accepting(place, 5.0))
    assert fresh(again) == {"a": True} and runs(again) == [0] and calls(place) == 2
    (row,) = again.rows
    value = 5.0 if what == "the metric" else 6.0
    assert row.outcome.accepted == (("min_metric.score", value, 5.0, True),)
    assert fresh(run(place, accepting(place, 5.0))) == {"a": False}


@pytest.mark.slow
def test_another_acceptance_quantizes_nothing(metric: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds, a metric that comes or goes; also in a batch of jobs that differ in nothing else."""
    first = run(place, own(place))
    seconds = past(Places(place / "out"))
    wanted = (place / "out" / "a.onnx").read_bytes()
    asked = [
        (accepting(place, 5.0), "done"),
        (accepting(place, 7.0), "unaccepted"),
        (own(place, accept=Acceptance(min_sqnr=300.0)), "unaccepted"),
        (own(place, accept=Acceptance(max_size_ratio=100.0)), "done"),
    ]
    for job, status in asked:
        report = run(place, job)
        assert statuses(report) == {"a": status} and fresh(report) == {"a": True} and runs(report) == [0]
        assert report.rows[0].outcome.report is not None
        ours, theirs = report.rows[0].outcome.report, first.rows[0].outcome.report or {}
        assert {**ours, "metrics": {**ours["metrics"], "own": []}} == theirs
    assert past(Places(place / "out")) == seconds, "what takes no time is no estimate"
    outputs = [str(place / "out" / str(at) / "a.onnx") for at in range(len(asked))]
    names = [replace(job, name=str(at), output=outputs[at]) for at, (job, _) in enumerate(asked)]
    report = batch(names, output=place / "out", workers=2)
    assert statuses(report) == {str(at): status for at, (_, status) in enumerate(asked)}
    assert {(place / "out" / str(at) / "a.onnx").read_bytes() for at in range(4)} == {wanted}
    shutil.rmtree(place / "out" / ".sbonnx")
    report = batch(names, output=place / "out", workers=2)
    assert sorted(runs(report)) == [0, 0, 0, max(runs(report))]


def test_thresholds_are_checked_without_a_process(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the calibration that the files were made with runs again, if its statistics were removed."""
    first = run(place, own(place, accept=Acceptance(min_sqnr=1.0)))
    state = place / "out" / ".sbonnx"
    shutil.rmtree(state / "sketches")
    (calibration,) = (key for key, title in first.titles.items() if title.startswith("calibrate"))
    shutil.rmtree(state / "steps" / calibration)

    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("sbonnx.batch.engine.LocalEngine.run", start)
    report = run(place, own(place, accept=Acceptance(min_sqnr=300.0)))
    assert statuses(report) == {"a": "unaccepted"} and runs(report) == [0]
    assert len(report.steps) == 1, "no calibration"
    assert fresh(run(place, own(place, accept=Acceptance(min_sqnr=300.0)))) == {"a": False}


def test_history_of_the_last_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run adds the figures of its jobs, also of those that are up to date; the oldest are removed."""
    monkeypatch.setattr("sbonnx.batch.database.HISTORY", 3)
    found = [run(place, own(place)) for _ in range(4)]
    assert [len(report.history["a"]) for report in found] == [1, 2, 3, 3]
    newest = found[-1].history["a"][-1]
    metrics = some(some(found[-1].rows[0].outcome.result).metrics)
    assert newest.sqnr_db == pytest.approx(metrics.outputs[0].sqnr_db)
    assert (newest.status, newest.finished) == ("done", found[-1].finished)
    assert [row.finished for row in found[-1].history["a"]] == [report.finished for report in found[1:]]
    written = json.loads((place / "out" / "report.json").read_text())
    assert written["history"]["a"][-1] == plain(newest)


@pytest.mark.slow
def test_force_runs_metrics_of_both_models_again(metric: Path, place: Path) -> None:
    """The metric may depend on files that cannot be found statically."""
    run(place, accepting(place, 5.0))
    assert calls(place) == 2
    report = batch([accepting(place, 5.0)], output=place / "out", only="a", force=True)
    assert statuses(report) == {"a": "done"} and calls(place) == 2


def test_a_metric_that_fails_keeps_the_work(metric: Path, place: Path) -> None:
    """Once it is repaired, only it runs."""
    (metric / "helper.py").write_text("raise ValueError('half a pair: \\ud800')\n")
    report = run(place, accepting(place, 5.0))
    assert statuses(report) == {"a": "failed"}
    assert report.rows[0].outcome.reason == "ValueError: half a pair: \\ud800"
    (metric / "helper.py").write_text("VALUE = 1\n")
    again = run(place, accepting(place, 5.0))
    assert statuses(again) == {"a": "done"} and runs(again) == [0]


@pytest.mark.slow
def test_metrics_that_do_harm_cost_their_own_job(place: Path) -> None:
    """The batch goes on, and the report is written."""
    scribble = (
        "for n in range(3, 256):\n        try: os.write(n, b'x')\n        except OSError: pass\n    return {'x': 1}"
    )
    harm = {
        "surrogate": ("raise ValueError('\\ud800')", "failed"),
        "name": ("return {'\\ud800': 1.0}", "done"),
        "text": ("raise type('Odd', (Exception,), {'__str__': lambda self: '\\ud800'})()", "failed"),
        "scribble": (scribble, "done"),
    }
    jobs = [own(place, "plain")]
    for name, (body, _) in harm.items():
        (place / f"{name}.py").write_text(f"import os\ndef score(path):\n    {body}\n")
        jobs.append(own(place, name, accept=Acceptance(metric=f"{place / name}.py:score")))
    report = batch(jobs, output=place / "out", workers=2)
    assert statuses(report) == {"plain": "done", **{name: status for name, (_, status) in harm.items()}}
    assert "\\ud800" in (place / "out" / "report.json").read_text()
