"""What happens inside a step: the files are those of `sbonnx quantize`, and what is shared is done once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import quantize
from sbonnx.assets import digits
from sbonnx.batch.accept import unchanged
from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import Acceptance, Job, Outcome, Places, Step
from sbonnx.batch.jobs.jobfile import read_jobs
from sbonnx.batch.jobs.outputs import Inputs, publish
from sbonnx.batch.jobs.steps import steps_of
from sbonnx.batch.outcomes import from_json, read_made
from sbonnx.batch.preview import faults_of
from sbonnx.batch.work import run_step
from sbonnx.errors import OutputError
from sbonnx.recipe.keywords import BackendForm
from sbonnx.system.runtime import LIBRARIES
from sbonnx.values import plain
from tests.support.models import model

pytestmark = pytest.mark.skipif(not digits().model.is_file(), reason="the bundled model is not there")

SAMPLES = 24
QUICK = (("samples", str(SAMPLES)), ("verify.feeds", "4"), ("verify.latency", "false"))
TARGETS: dict[str, tuple[BackendForm, str]] = {
    "ort-w8a8": ("onnxruntime", "w8a8"),
    "ort-w4a8": ("onnxruntime", "w4a8"),
    "trt-w8a8": ("tensorrt", "w8a8"),
    "trt-w4a8": ("tensorrt", "w4a8"),
}


def quiet(stage: str, done: int = 0, total: int | None = None) -> None:
    """Nobody listens."""


def job(folder: Path, name: str, **changes: Any) -> Job:
    """A job of the bundled model in `folder`."""
    backend, bits = TARGETS[name]
    found = Job(
        name,
        str(digits().model),
        str(digits().calib),
        backend,
        str(folder / f"{name}.onnx"),
        split=1,
        overrides=(*QUICK, ("bits", bits)),
    )
    return replace(found, **changes)


def run_all(jobs: list[Job], places: Places) -> dict[str, Outcome]:
    """All steps of some jobs, here; outcomes by title."""
    return {step.title: run_step(step, places, quiet, 1) for step in steps_of(jobs, places.state)}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> tuple[Places, list[Job], dict[str, Outcome]]:
    """One model for four targets, one of which cannot be."""
    places = Places(tmp_path_factory.mktemp("night"))
    jobs = [job(places.output, name) for name in TARGETS]
    return places, jobs, run_all(jobs, places)


Night = tuple[Places, list[Job], dict[str, Outcome]]


def test_one_float_walk_for_all_targets(night: Night) -> None:
    """The data went through the float model once, though two targets lift it to another opset."""
    _, _, outcomes = night
    assert outcomes["calibrate digits.onnx"].counters == {"runs": SAMPLES, "graphs": 2}
    runs = {title: one.counters.get("runs") for title, one in outcomes.items() if one.status == "done"}
    assert runs == {
        "calibrate digits.onnx": SAMPLES,
        "quantize ort-w8a8": 0,
        "quantize ort-w4a8": 0,
        "quantize trt-w8a8": 0,
    }


def test_who_is_refused_says_why(night: Night) -> None:
    """The reason is its own, with the kind of the error; it leaves nothing."""
    places, jobs, outcomes = night
    found = outcomes["quantize trt-w4a8"]
    assert (found.status, found.error) == ("refused", "RecipeError")
    assert "weights only on tensorrt" in found.reason
    assert not Path(jobs[-1].output).exists()
    assert not places.made(found.key).exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "trt-w4a8"])
def test_the_file_is_that_of_a_single_run(night: Night, name: str, tmp_path: Path) -> None:
    """In all integers, and but for their last bits in floats: a batch observes the tensors of all targets at once."""
    places, _, _ = night
    backend, bits = TARGETS[name]
    keys: dict[str, Any] = {"samples": SAMPLES, "verify.feeds": 4, "verify.latency": False, "bits": bits}
    single = tmp_path / f"{name}.onnx"
    report = quantize(digits().model, digits().calib, backend=backend, split=1, output=single, **keys)
    batch, alone = (onnx.load(path) for path in (places.output / f"{name}.onnx", single))
    assert batch.graph.node == alone.graph.node
    for one, other in zip(batch.graph.initializer, alone.graph.initializer, strict=True):
        values = numpy_helper.to_array(one), numpy_helper.to_array(other)
        np.testing.assert_allclose(*values, rtol=1e-5 if values[0].dtype.kind == "f" else 0, err_msg=one.name)
    theirs = json.loads(json.dumps(report.to_dict()["settings"]))
    ours = next(one for one in night[2].values() if one.report and one.report["output"].endswith(f"{name}.onnx"))
    assert ours.report is not None
    assert ours.report["settings"] == theirs
    assert ours.report["counts"] == plain(report.counts)


def test_nothing_else_is_left(night: Night) -> None:
    """Outputs, and what the state keeps; no folder of a step that is not done."""
    places, _, outcomes = night
    assert sorted(path.name for path in places.output.iterdir()) == [
        ".sbonnx",
        "ort-w4a8.onnx",
        "ort-w8a8.onnx",
        "trt-w8a8.onnx",
    ]
    done = {one.key for one in outcomes.values() if one.status == "done"}
    assert {path.name for path in places.made("x").parent.iterdir()} == done
    for key in done:
        assert from_json((places.made(key) / "outcome.json").read_bytes()).status == "done"


def test_what_is_made_is_not_made_again(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run does no work, and puts back what somebody removed or wrote over."""
    places, jobs, outcomes = night
    first, second = (Path(one.output) for one in jobs[:2])
    wanted = first.read_bytes(), second.read_bytes()
    first.unlink()
    second.unlink()
    second.write_bytes(b"something else")
    monkeypatch.setattr("sbonnx.batch.work.quantize", None)
    again = run_all(jobs, places)
    assert {title: one.finished for title, one in again.items() if one.status == "done"} == {
        title: one.finished for title, one in outcomes.items() if one.status == "done"
    }
    assert (first.read_bytes(), second.read_bytes()) == wanted


@pytest.mark.slow
def test_a_new_target_needs_no_inference(night: Night) -> None:
    """Another observer is solved from the statistics that are there."""
    places, jobs, _ = night
    more = replace(
        job(places.output, "ort-w8a8"),
        name="minmax",
        output=str(places.output / "sub" / "minmax.onnx"),
        overrides=(*QUICK, ("A.OBSERVER.TYPE", "minmax")),
    )
    found = run_all([*jobs, more], places)
    assert found["quantize minmax"].status == "done"
    assert {title: one.counters.get("runs", 0) for title, one in found.items() if one.key not in _keys(night)} == {
        "calibrate digits.onnx": 0,
        "quantize minmax": 0,
    }
    shutil.rmtree(places.output / "sub")
    shutil.rmtree(places.made(found["quantize minmax"].key))
    shutil.rmtree(places.made(found["calibrate digits.onnx"].key))


def _keys(night: Night) -> set[str]:
    return {one.key for one in night[2].values()}


def test_outputs_are_copies(night: Night, tmp_path: Path) -> None:
    """Publishing twice is once; no temporary name stays; what is kept is out of reach of those who open an output."""
    places, jobs, _ = night
    (step,) = [one for one in steps_of(jobs[:1], places.state) if one.kind == "quantize"]
    output = tmp_path / "new" / "ort-w8a8.onnx"
    elsewhere = replace(step, jobs=(replace(jobs[0], output=str(output), outside_output=True),))
    assert publish(elsewhere, places) is True
    assert publish(elsewhere, places) is False
    assert [path.name for path in output.parent.iterdir()] == ["ort-w8a8.onnx"]
    assert output.read_bytes() == Path(jobs[0].output).read_bytes()
    assert not output.samefile(places.made(step.work) / "files" / output.name)
    output.unlink()
    os.link(places.made(step.work) / "files" / output.name, output)
    assert publish(elsewhere, places) is True
    assert output.stat().st_nlink == 1


def test_no_output_through_a_link(night: Night, tmp_path: Path) -> None:
    """Also where the link appears after the job file was read."""
    places, jobs, _ = night
    (step,) = [one for one in steps_of(jobs[:1], places.state) if one.kind == "quantize"]
    (tmp_path / "elsewhere").mkdir()
    link = places.output / "link"
    link.symlink_to(tmp_path / "elsewhere")
    try:
        with pytest.raises(OutputError, match="outside the output folder"):
            publish(replace(step, jobs=(replace(jobs[0], output=str(link / "ort-w8a8.onnx")),)), places)
    finally:
        link.unlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_it_tells_where_it_is(tmp_path: Path) -> None:
    """Stages, with samples done."""
    places = Places(tmp_path / "out")
    told: list[tuple[str, int, int | None]] = []
    step = steps_of([job(places.output, "ort-w8a8")], places.state)[0]
    run_step(step, places, lambda stage, done=0, total=None: told.append((stage, done, total)), 1)
    assert ("calibrate", SAMPLES, SAMPLES) in told
    assert told[0][0] == "prepare"


# --- what goes wrong ----------------------------------------------------------------------------------


def tiny(path: Path, *, op: str = "Relu") -> None:
    """A model with two convolutions behind an operator."""
    rng = np.random.default_rng(0)
    weights = {"w": (4, 1, 3, 3), "v": (2, 4, 3, 3)}
    graph = helper.make_graph(
        [
            helper.make_node(op, ["x"], ["a"], "first"),
            helper.make_node("Conv", ["a", "w"], ["b"], "conv"),
            helper.make_node("Relu", ["b"], ["c"], "relu"),
            helper.make_node("Conv", ["c", "v"], ["d"], "conv2"),
            helper.make_node("Relu", ["d"], ["y"], "last"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            onnx.numpy_helper.from_array(rng.normal(size=size).astype(np.float32), name)
            for name, size in weights.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a tiny model and its data."""
    tiny(tmp_path / "m.onnx")
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(8, 1, 8, 8)).astype(np.float32))
    return tmp_path


TINY = (("verify.latency", "false"), ("kernel_costs", "none"))
"""However small the convolution is, its inputs are quantized."""


def own(folder: Path, name: str = "a", **changes: Any) -> Job:
    """A job of the tiny model."""
    found = Job(
        name,
        str(folder / "m.onnx"),
        str(folder / "d.npz"),
        "onnxruntime",
        str(folder / "out" / f"{name}.onnx"),
        split=1,
        overrides=TINY,
    )
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda place: (place / "d.npz").write_bytes(b"PK\x03\x04 cut short"), "d.npz"),
        (lambda place: np.savez(place / "d.npz", x=np.zeros((8, 3, 8, 8), np.float32)), "'x'"),
        (lambda place: (place / "d.npz").unlink(), "d.npz"),
        (lambda place: (place / "m.onnx").write_bytes(b"\x08\x08" * 50), "m.onnx"),
        (lambda place: (place / "m.onnx").unlink(), "m.onnx"),
        (lambda place: tiny(place / "m.onnx", op="Log"), "NaN"),
    ],
    ids=["corrupt data", "data that do not fit", "no data", "a corrupt model", "no model", "NaN"],
)
def test_every_job_says_itself_what_is_wrong(place: Path, spoil: Any, said: str) -> None:
    """A shared step that cannot measure is no failure: each of its jobs is refused with the true reason."""
    spoil(place)
    places = Places(place / "out")
    found = run_all([own(place, "a"), own(place, "b", backend="virtual")], places)
    quantized = [one for title, one in found.items() if title.startswith("quantize")]
    assert [one.status for one in quantized] == ["refused", "refused"]
    assert all(said in one.reason and "\n" not in one.reason for one in quantized)
    assert {one.status for title, one in found.items() if title.startswith("calibrate")} <= {"done"}


def test_the_reason_names_the_output_and_not_where_it_is_made(place: Path) -> None:
    """Nor does the report."""
    places = Places(place / "out")
    found = run_all([own(place)], places)["quantize a"]
    assert found.status == "done"
    assert "steps" not in json.dumps(found.report)
    assert found.report is not None
    assert found.report["output"] == str(place / "out" / "a.onnx")
    assert json.loads((places.made(found.key) / "outcome.json").read_text())["report"] == found.report


def test_not_accepted(place: Path) -> None:
    """The file is there, and the verdict with it; a second run finds both."""
    places = Places(place / "out")
    jobs = [own(place, accept=Acceptance(min_sqnr=300.0, max_size_ratio=100.0))]
    found = run_all(jobs, places)["quantize a"]
    assert found.status == "unaccepted"
    assert [row[0::3] for row in found.accepted] == [("min_sqnr", False), ("max_size_ratio", True)]
    assert found.reason.startswith("min_sqnr: ")
    assert (place / "out" / "a.onnx").is_file()
    assert run_all(jobs, places)["quantize a"] == found


def test_a_metric_of_the_job(place: Path) -> None:
    """It runs in the step, and stands in the report for both models."""
    (place / "metric.py").write_text("import os\ndef score(path): return {'bytes': os.path.getsize(path)}\n")
    accept = Acceptance(metric=f"{place / 'metric.py'}:score", min_metric=(("bytes", 1.0),))
    found = run_all([own(place, accept=accept)], Places(place / "out"))["quantize a"]
    assert found.status == "done"
    size = (place / "out" / "a.onnx").stat().st_size
    assert found.accepted == (("min_metric.bytes", float(size), 1.0, True),)
    assert found.report is not None
    float_size = (place / "m.onnx").stat().st_size
    assert found.report["metrics"]["own"] == [{"name": "bytes", "float": float(float_size), "quantized": float(size)}]


SECRET = "hunter2-hunter2"


def test_an_exception_of_somebody_elses(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Failed, with its traceback on stderr; what the environment hides is nowhere."""
    monkeypatch.setenv("VAULT", SECRET)
    (place / SECRET).mkdir()
    shutil.copy(place / "d.npz", place / SECRET / "d.npz")
    (place / "metric.py").write_text(
        "import os\ndef score(path): raise ZeroDivisionError('the key ' + os.environ['VAULT'] + ' is wrong')\n"
    )
    places = Places(place / "out")
    data = str(place / "${VAULT}" / "d.npz")
    found = run_all([own(place, data=data, accept=Acceptance(metric=f"{place / 'metric.py'}:score"))], places)
    outcome = found["quantize a"]
    assert (outcome.status, outcome.error) == ("failed", "ZeroDivisionError")
    assert outcome.reason == "ZeroDivisionError: the key ${VAULT} is wrong"
    said = capfd.readouterr().err
    assert "Traceback" in said and "in score" in said
    assert SECRET not in said + str(found)
    assert read_made(places, outcome.key) is None
    assert not (place / "out" / "a.onnx").exists()


def test_no_secret_stays_in_the_state(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that is done, of one that is refused, and in the log that libraries wrote to."""
    monkeypatch.setenv("VAULT", SECRET)
    (place / SECRET).mkdir()
    shutil.copy(place / "d.npz", place / SECRET / "d.npz")
    (place / SECRET / "metric.py").write_text(
        "def score(path): return {'x': len(open(__file__).read() + open(__file__[:-9] + 'd.txt').read())}\n"
    )
    (place / SECRET / "d.txt").touch()
    monkeypatch.setattr("sbonnx.batch.file_digests.SETTLED_NS", 0)
    places = Places(place / "out")
    metric = Acceptance(metric=str(place / "${VAULT}" / "metric.py:score"))
    jobs = [
        own(place, "a", data=str(place / "${VAULT}" / "d.npz"), accept=metric),
        own(place, "b", data=str(place / "${VAULT}" / "none.npz")),
        own(
            place,
            "c",
            overrides=(
                *TINY,
                ("EXCLUDE", '["${VAULT}"]'),
            ),
        ),
    ]
    steps = steps_of(jobs, places.state)
    for step in steps:
        places.log(step.key).parent.mkdir(parents=True, exist_ok=True)
        places.log(step.key).write_text(f"a library says {SECRET}\n")
    outcomes = {step.jobs[0].name: run_step(step, places, quiet) for step in steps if step.kind == "quantize"}
    assert {name: one.status for name, one in outcomes.items()} == {"a": "done", "b": "refused", "c": "refused"}
    (reads,) = outcomes["a"].reads
    assert "${VAULT}/d.txt" in (places.metrics / f"reads-{reads}.json").read_text()
    assert unchanged(reads, places, Digests())
    assert "${VAULT}" in outcomes["b"].reason and "${VAULT}" in outcomes["c"].reason
    assert SECRET not in str(outcomes)
    files = [path for path in (place / "out").rglob("*") if path.is_file()]
    for step in steps:
        if step.kind == "quantize":
            assert places.log(step.key).read_text() == "a library says ${VAULT}\n"
    kept = [path for path in files if SECRET.encode() in path.read_bytes() and path.parent != places.log("x").parent]
    assert kept == []


def test_a_file_that_changes_meanwhile(place: Path) -> None:
    """What was made of it would lie under the key of what it was."""
    places = Places(place / "out")
    steps: tuple[Step, ...] = steps_of([own(place)], places.state)
    np.savez(place / "d.npz", x=np.ones((8, 1, 8, 8), np.float32))
    found = [run_step(step, places, quiet) for step in steps]
    assert [one.status for one in found] == ["refused", "refused"]
    assert all("was changed while the batch ran" in one.reason for one in found)
    assert list(places.state.rglob("steps/*")) == []


def test_a_network_that_smooth_quant_changes(place: Path) -> None:
    """Its statistics are those of the equalized graph, which no other job has: the file is that of a single run."""
    text = """
    g (float[N,8,16] x) => (float[N,8,16] y) {
        a = LayerNormalization <axis: int = -1> (x, scale, shift)
        b = MatMul (a, w)
        c = Relu (b)
        y = MatMul (c, v)
    }"""
    scale = np.linspace(0.1, 8, 16).astype(np.float32)
    onnx.save(model(text, scale=scale, shift=16, w=(16, 16), v=(16, 16)), str(place / "m.onnx"))
    data = np.random.default_rng(1).normal(size=(8, 8, 16)).astype(np.float32)
    np.savez(place / "d.npz", x=data)
    settings: dict[str, Any] = {"verify.latency": False, "kernel_costs": "none"}
    report = quantize(place / "m.onnx", place / "d.npz", split=1, output=place / "single.onnx", **settings)
    assert "smooth_quant" in {fired.pattern for fired in report.applied}
    outcomes = run_all([own(place)], Places(place / "out"))
    assert {title: (one.status, one.reason) for title, one in outcomes.items()} == {
        "calibrate m.onnx": ("done", ""),
        "quantize a": ("done", ""),
    }
    assert (place / "out" / "a.onnx").read_bytes() == (place / "single.onnx").read_bytes()


@pytest.mark.skipif(shutil.which("cc") is None, reason="the test compiles a library")
def test_libraries_of_custom_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ort_libraries` of a job file: loaded for the sessions of that job alone, and part of its digests."""
    monkeypatch.setenv(LIBRARIES, "")
    log, library = tmp_path / "log", tmp_path / "ops.so"
    code = (
        "#include <stdio.h>\nvoid *RegisterCustomOps(void *options, const void *api) {\n"
        f'  FILE *f = fopen("{log}", "a"); fputc(49, f); fclose(f); return 0; }}\n'
    )
    (tmp_path / "ops.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "ops.c"], check=True)
    entry = f"{{model: '{digits().model}', data: '{digits().calib}', split: 64, set: {{VERIFY.LATENCY: false}}"
    (tmp_path / "jobs.yaml").write_text(
        f"output: out\njobs:\n- {entry}, ort_libraries: ops.so, name: with}}\n- {entry}, name: without}}\n"
        f"- {entry}, ort_libraries: [absent.so], name: absent}}\n"
    )
    _, output, jobs = read_jobs(tmp_path / "jobs.yaml")
    assert [job.ort_libraries for job in jobs] == [(str(library),), (), (str(tmp_path / "absent.so"),)]
    places = Places(output)
    found = steps_of(jobs, places.state)
    assert len({step.key for step in found}) == 6, "a library changes the digests of both steps"
    steps = {step.title: step for step in found}
    assert run_step(steps["quantize without"], places, quiet, 1).status == "done"
    assert not log.exists()
    assert run_step(steps["quantize with"], places, quiet, 1).status == "done"
    assert log.read_text().count("1") > 1 and os.environ[LIBRARIES] == ""
    outcome = run_step(steps["quantize absent"], places, quiet, 1)
    assert outcome.status == "refused" and "absent.so' does not exist" in outcome.reason
    assert set(faults_of(jobs, places.state)) == {"absent"}
    assert "the library of 'with'" in str(Inputs(jobs).over(str(library)))
