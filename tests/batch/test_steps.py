"""Jobs to steps: what is shared, and what a key depends on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbonnx.assets import digits
from sbonnx.batch.file_digests import MISSING, Digests
from sbonnx.batch.jobs.job import Acceptance, Job, Step, StepLimits
from sbonnx.batch.jobs.steps import steps_of

pytestmark = pytest.mark.skipif(not digits().model.is_file(), reason="the bundled model is not there")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model and its data, older than the digests doubt."""
    shutil.copy(digits().model, tmp_path / "m.onnx")
    shutil.copy(digits().calib, tmp_path / "d.npz")
    (tmp_path / "r.yaml").write_text("SAMPLES: 32\n")
    for path in tmp_path.iterdir():
        age(path)
    return tmp_path


def age(path: Path) -> None:
    """Set the time of a file back by an hour."""
    os.utime(path, (time.time() - 3600, time.time() - 3600))


def job(folder: Path, name: str = "m", **changes: object) -> Job:
    """A job in `folder`."""
    plain = Job(
        name, str(folder / "m.onnx"), str(folder / "d.npz"), "onnxruntime", str(folder / "out" / f"{name}.onnx")
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def by_kind(steps: tuple[Step, ...], kind: str) -> list[Step]:
    """Steps of one kind."""
    return [step for step in steps if step.kind == kind]


def test_one_calibration_for_all_targets(place: Path) -> None:
    """Whatever the backends, widths and recipes; each file is a step behind it."""
    jobs = [
        job(place, "a"),
        job(place, "b", backend="tensorrt"),
        job(place, "c", overrides=(("bits", "w4a8"),)),
        job(place, "d", overrides=(("A.OBSERVER.TYPE", "mse"),)),
    ]
    steps = steps_of(jobs)
    (calibrate,) = by_kind(steps, "calibrate")
    assert calibrate.jobs == tuple(jobs)
    assert steps[0] == calibrate
    quantize = by_kind(steps, "quantize")
    assert [step.jobs for step in quantize] == [(one,) for one in jobs]
    assert {step.after for step in quantize} == {(calibrate.key,)}
    assert len({step.key for step in steps}) == 5


APART = {
    "split": {"split": 4},
    "samples": {"overrides": (("samples", "8"),)},
    "a random pick": {"overrides": (("CALIBRATION.PICK", "random"), ("samples", "8"))},
    "seed": {"overrides": (("CALIBRATION.SEED", "7"),)},
    "preprocessing": {"preprocess": "raw"},
    "samples held out": {"overrides": (("held_out", "0"),)},
    "device": {"overrides": (("device", "cpu"),)},
}


@pytest.mark.parametrize("changes", APART.values(), ids=APART)
def test_what_statistics_depend_on_is_not_shared(place: Path, changes: Any) -> None:
    """Other samples, other statistics."""
    assert len(by_kind(steps_of([job(place, "a"), job(place, "b", **changes)]), "calibrate")) == 2


ALONE = {
    "auto": {"recipe": "auto"},
    "mixed": {"overrides": (("max_loss", "1%"),)},
    "smooth": {"overrides": (("smooth_quant", "true"),)},
    "awq": {"overrides": (("EQUALIZE.AWQ", "true"),)},
    "a cache of its own": {"overrides": (("cache", "kept"),)},
    "no activations": {"overrides": (("mode", "weight_only"),)},
    "no data": {"data": None},
    "no such model": {"model": "no/such.onnx"},
    "a URL that nobody serves": {"model": "nosuch://host/m.onnx"},
    "data that nobody serves": {"data": "nosuch://host/d.npz"},
    "a recipe that cannot be": {"backend": "tensorrt", "overrides": (("bits", "w4a8"),)},
}


@pytest.mark.parametrize("changes", ALONE.values(), ids=ALONE)
def test_who_measures_alone(place: Path, changes: Any) -> None:
    """No statistics of others would be looked up; the step is there and says what is wrong, if something is."""
    steps = steps_of([job(place, "a", **changes), job(place, "b")])
    own = next(step for step in steps if step.jobs[0].name == "a" and step.kind == "quantize")
    assert own.after == ()
    assert len(by_kind(steps, "calibrate")) == 1


CHANGES: dict[str, Callable[[Path], object]] = {
    "the model": lambda place: (place / "m.onnx").write_bytes((place / "m.onnx").read_bytes() + b"\x72\x00"),
    "the data": lambda place: shutil.copy(digits().eval, place / "d.npz"),
    "the recipe": lambda place: (place / "r.yaml").write_text("SAMPLES: 31\n"),
    "the preprocessing": lambda place: (place / "p.yaml").write_text("scale: 1/255\n"),
    "the metric": lambda place: (place / "metric.py").write_text("# another\n"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_file_changes_the_key(place: Path, what: str) -> None:
    """Its content does; a copy with other times does not."""
    (place / "metric.py").write_text("def score(path): return {'a': 1}\n")
    (place / "p.yaml").write_text("scale: 1\n")
    files = {"recipe": str(place / "r.yaml"), "preprocess": str(place / "p.yaml")}
    jobs = [job(place, **files, accept=Acceptance(metric=f"{place / 'metric.py'}:score"))]
    before = [step.key for step in steps_of(jobs)]
    for path in place.iterdir():
        age(path)
    assert [step.key for step in steps_of(jobs)] == before
    CHANGES[what](place)
    after = [step.key for step in steps_of(jobs)]
    assert before[-1] != after[-1]


SAME = {
    "name": {"name": "other"},
    "limits": {"limits": StepLimits(memory=1 << 30)},
    "threads": {"overrides": (("CALIBRATION.THREADS", "2"),)},
    "memory": {"overrides": (("memory", "1 GiB"),)},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_how_it_is_done_does_not_count(place: Path, changes: Any) -> None:
    """Limits, threads and names change nothing about the file."""
    first = steps_of([job(place)])[-1]
    assert steps_of([replace(job(place), **changes)])[-1].key == first.key


OTHER = {
    "backend": {"backend": "tensorrt"},
    "bits": {"overrides": (("bits", "w4a8"),)},
    "accept": {"accept": Acceptance(min_sqnr=3.0)},
    "name of the file": {"output": "other.onnx"},
    "data": {"data": None, "overrides": (("mode", "weight_only"),)},
}


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_what_is_asked_for_counts(place: Path, changes: Any) -> None:
    """Another wish, another key."""
    first = steps_of([job(place)])[-1]
    assert steps_of([job(place, **changes)])[-1].key != first.key


def test_another_target_leaves_the_others_alone(place: Path) -> None:
    """Their quantize steps keep their keys; what is measured is asked for anew, since more may be wanted."""
    one = steps_of([job(place, "a")])
    two = steps_of([job(place, "a"), job(place, "b", backend="tensorrt")])
    assert one[1].key == two[1].key
    assert one[0].key != two[0].key


def test_equal_jobs_are_one_step(place: Path) -> None:
    """One file, at two places."""
    jobs = [job(place, "a"), job(place, "b", output=str(place / "elsewhere" / "a.onnx"))]
    (step,) = by_kind(steps_of(jobs), "quantize")
    assert step.jobs == tuple(jobs)


def test_the_widest_limits(place: Path) -> None:
    """None is wider than any."""
    limited = [
        job(place, "a", limits=StepLimits(1 << 30, 5.0, 2)),
        job(place, "b", limits=StepLimits(2 << 30, None, 0)),
    ]
    shared = steps_of(
        [replace(one, backend=backend) for one, backend in zip(limited, ("virtual", "tensorrt"), strict=True)]
    )[0]
    assert shared.limits == StepLimits(2 << 30, None, 2)


def test_files_are_read_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run reads none; one that was changed is read, whatever its size."""
    monkeypatch.setattr("sbonnx.batch.file_digests.SETTLED_NS", 0)
    state = place / "state"
    first = Digests(state)
    found = [first.of_model(place / "m.onnx"), first.of(place / "d.npz"), first.of(place)]
    first.save()
    again = Digests(state)
    assert [again.of_model(place / "m.onnx"), again.of(place / "d.npz")] == found[:2]
    assert again.read == 0
    data = bytearray((place / "d.npz").read_bytes())
    data[-1] ^= 1
    (place / "d.npz").write_bytes(data)
    assert again.of(place / "d.npz") != found[1]
    assert again.read == 1
    (place / "loop").symlink_to(place / "loop")
    nowhere = Digests(place / "loop")
    assert nowhere.of_model(place / "m.onnx") == found[0]
    nowhere.save()


def test_a_file_rewritten_in_place_is_digested_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an equal size nor an mtime that is set back hides new content; equal content gives an equal digest."""
    monkeypatch.setattr("sbonnx.batch.file_digests.SETTLED_NS", 0)
    model, times = place / "m.onnx", os.stat(place / "m.onnx")

    def rewrite(content: bytes) -> str:
        model.write_bytes(content)
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
        digests = Digests(place / "state")
        found = digests.of_model(model)
        digests.save()
        return found

    content = model.read_bytes()
    before = rewrite(content)
    assert rewrite(content[:-1] + bytes([content[-1] ^ 1])) != before
    assert rewrite(content) == before


def test_a_file_that_was_just_written_is_not_trusted(place: Path) -> None:
    """It may change once more within the time stamp's grain."""
    (place / "new").write_bytes(b"1")
    digests = Digests(place / "state")
    digests.of(place / "new")
    digests.save()
    later = Digests(place / "state")
    later.of(place / "new")
    assert later.read == 1


def test_folders_and_what_is_not_there(place: Path) -> None:
    """Names count, hidden files do not; a state that is damaged is no reason to fail."""
    folder = place / "folder"
    folder.mkdir()
    (folder / "0.npz").write_bytes(b"1")
    digests = Digests()
    before = digests.of(folder)
    (folder / ".hidden").write_bytes(b"2")
    assert digests.of(folder) == before
    (folder / "0.npz").rename(folder / "1.npz")
    assert digests.of(folder) != before
    assert digests.of(place / "nothing") == MISSING
    (place / "state").mkdir()
    (place / "state" / "digests.json").write_text("{ cut sho")
    assert Digests(place / "state").of(folder) == digests.of(folder)


def test_the_data_file_of_a_model_counts(tmp_path: Path) -> None:
    """Its weights may lie beside it."""
    import onnx

    model = onnx.load(str(digits().model))
    onnx.save(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0)
    before = Digests().of_model(tmp_path / "m.onnx")
    weights = bytearray((tmp_path / "m.data").read_bytes())
    weights[0] ^= 1
    (tmp_path / "m.data").write_bytes(weights)
    assert Digests().of_model(tmp_path / "m.onnx") != before


def test_a_data_file_that_is_complete_only_later(tmp_path: Path) -> None:
    """A first look at an incomplete data file must not hide the file from later looks."""
    import onnx

    model = onnx.load(str(digits().model))
    onnx.save(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0)
    whole = (tmp_path / "m.data").read_bytes()
    for path in tmp_path.iterdir():
        age(path)
    found = set()
    for content in (whole[:-1], whole, whole[:-1] + bytes([whole[-1] ^ 1])):
        (tmp_path / "m.data").write_bytes(content)
        digests = Digests(tmp_path / "state")
        found.add(digests.of_model(tmp_path / "m.onnx"))
        digests.save()
    assert len(found) == 3


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "device"])
def test_what_is_no_regular_file_is_not_read(kind: str, tmp_path: Path) -> None:
    """Reading it could block for ever."""
    path = Path("/dev/zero") if kind == "device" else tmp_path / "m.onnx"
    if kind != "device":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    assert Digests().of_model(tmp_path / "pipe" if kind == "fifo" else path) == MISSING
