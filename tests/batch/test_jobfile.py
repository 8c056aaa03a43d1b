"""The job file: what is read, and what is said of what cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from runpy import run_path

import pytest

from sbonnx.batch.jobs.job import Acceptance, StepLimits
from sbonnx.batch.jobs.jobfile import AcceptKeys, JobFile, JobKeys, LimitKeys, as_text, read_jobs, schema
from sbonnx.batch.metric import loaded
from sbonnx.errors import RecipeError
from sbonnx.recipe import load

WHOLE = """
title: nightly
output: out
naming: "{model}/{backend}.{bits}"
defaults:
  data: data/{model}.npz
  split: 8
  set: {samples: 64, calibration: {seed: 3}}
  accept: {min_sqnr: 20, min_agreement: 0.99}
  limits: {memory: 2 GiB, seconds: 10 min}
matrix:
  backend: [onnxruntime, tensorrt@10]
  bits: w8a8
jobs:
  - model: a.onnx
    accept: {min_agreement: 0.5, metric: "m.py:score", min_metric: {top1: 0.9}}
    limits: {retries: 0}
"""


def written(folder: Path, text: str, name: str = "jobs.yaml") -> Path:
    """A job file beside an empty model."""
    (folder / "a.onnx").write_bytes(b"model")
    path = folder / name
    path.write_text(text)
    return path


def test_everything_is_read(tmp_path: Path) -> None:
    """Paths are relative to the file, an entry's keys are laid over the defaults one by one."""
    title, output, jobs = read_jobs(written(tmp_path, WHOLE))
    assert (title, output) == ("nightly", tmp_path / "out")
    assert [job.name for job in jobs] == ["a/onnxruntime.w8a8", "a/tensorrt@10.w8a8"]
    first = jobs[0]
    assert first.model == str(tmp_path / "a.onnx")
    assert first.data == str(tmp_path / "data" / "a.npz")
    assert first.output == str(tmp_path / "out" / "a" / "onnxruntime.w8a8.onnx")
    assert first.split == 8
    assert first.overrides == (("samples", "64"), ("calibration.seed", "3"), ("bits", "w8a8"))
    assert first.accept == Acceptance(20.0, 0.5, None, None, (("top1", 0.9),), f"{tmp_path / 'm.py'}:score")
    assert first.limits == StepLimits(memory=2 << 30, seconds=600.0, retries=0)


def test_the_title_is_the_name_of_the_file(tmp_path: Path) -> None:
    """Where none is given."""
    assert read_jobs(written(tmp_path, "output: o\njobs: [{model: a.onnx}]", "night.yaml"))[0] == "night"


PROBLEMS = {
    "an unknown key": ("output: o\njobs:\n - modle: a.onnx", ["jobs.0.modle", "line 3", "Did you mean model?"]),
    "an unknown key of accept": (
        "output: o\ndefaults: {accept: {min_sqr: 1}}\njobs: [{model: a.onnx}]",
        ["defaults.accept.min_sqr", "line 2", "min_sqnr"],
    ),
    "no jobs": ("output: o", ["'jobs'", "is missing"]),
    "an empty list": ("output: o\njobs: []", ["'jobs'", "at least 1"]),
    "jobs that are no list": ("output: o\njobs: {a: b}", ["'jobs'", "must be a list"]),
    "no model": ("output: o\njobs: [{bits: w8a8}]", ["jobs.0.model", "is missing"]),
    "an unknown backend": ("output: o\nmatrix: {backend: tensort}\njobs: [{model: a.onnx}]", ["tensorrt?"]),
    "a backend close to a short name": ("output: o\nmatrix: {backend: ortt}\njobs: [{model: a.onnx}]", ["mean ort?"]),
    "bits that are none": ("output: o\njobs: [{model: a.onnx, bits: [w8a8, w9x]}]", ["jobs.0.bits", "w9x"]),
    "an unknown key of the recipe": (
        "output: o\njobs: [{model: a.onnx, set: {sampels: 3}}]",
        ["jobs.0.set.sampels", "not a key of the recipe", "SAMPLES"],
    ),
    "a size without a unit that is known": (
        "output: o\njobs: [{model: a.onnx, limits: {memory: 3 bananas}}]",
        ["4 GiB"],
    ),
    "a limit of nothing": ("output: o\njobs: [{model: a.onnx, limits: {seconds: 0}}]", ["above 0"]),
    "a share above one": ("output: o\njobs: [{model: a.onnx, accept: {min_agreement: 99}}]", ["0 to 1", "99"]),
    "a metric without a function": ("output: o\njobs: [{model: a.onnx, accept: {metric: m.py}}]", ["file.py:function"]),
    "values of no metric": ("output: o\njobs: [{model: a.onnx, accept: {min_metric: {a: 1}}}]", ["needs metric"]),
    "a backend twice": ("output: o\njobs: [{model: a.onnx, backend: [virtual, virtual]}]", ["twice"]),
    "a key twice": ("output: o\noutput: p\njobs: [{model: a.onnx}]", ["'output' twice"]),
    "no mapping": ("- a", ["must be a mapping"]),
    "no YAML": ("output: [", ["is not YAML"]),
    "a recipe that is not there": ("output: o\njobs: [{model: a.onnx, recipe: r.yaml}]", ["jobs.0.recipe", "r.yaml"]),
    "a glob of nothing": ("output: o\njobs: [{model: 'x*.onnx'}]", ["jobs.0.model", "matches no file", "x*.onnx"]),
}


@pytest.mark.parametrize(("text", "parts"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, parts: list[str]) -> None:
    """In one line, with the file, the key and the mend."""
    with pytest.raises(RecipeError) as caught:
        read_jobs(written(tmp_path, text))
    told = str(caught.value)
    assert "\n" not in told
    assert "jobs.yaml" in told
    assert [part for part in parts if part not in told] == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is called a job file, not a recipe."""
    with pytest.raises(RecipeError, match=r"the job file .*none\.yaml does not exist"):
        read_jobs(tmp_path / "none.yaml")


@pytest.mark.parametrize("value", ["w8a8", "a: b", "3", 3, 0.001, True, ["*/x", "y, z"], [[1, 2.5]], {"*c*": [0, 6]}])
def test_values_come_back_from_their_text(value: object) -> None:
    """What a job file sets reaches the recipe as it was written."""
    from sbonnx.recipe.yaml_text import parse

    assert parse(as_text(value), "")[0] == value


def test_settings_are_those_of_the_recipe(tmp_path: Path) -> None:
    """Nested keys, mappings of the user's names and lists, as a recipe reads them."""
    text = """
output: o
jobs:
  - model: a.onnx
    set: {EXCLUDE: ["*head*"], RANGES: {"x.y": [0, 6]}, W: {QUANTIZER: {TYPE: MSE}}, verify.feeds: 3}
"""
    job = read_jobs(written(tmp_path, text))[2][0]
    found = load(None, backend="onnxruntime", overrides=[f"{key}={value}" for key, value in job.overrides])
    assert found.exclude == ("*head*",)
    assert found.ranges == {"x.y": (0.0, 6.0)}
    assert found.verify.feeds == 3


def test_the_schema_knows_every_key() -> None:
    """For editors: valid JSON, all keys of a file, unknown ones refused."""
    found = json.loads(json.dumps(schema()))
    assert set(found["properties"]) == set(JobFile.model_fields)
    assert found["additionalProperties"] is False
    assert found["required"] == ["output", "jobs"]


ROOT = Path(__file__).resolve().parents[2]


def test_the_job_file_of_the_documentation(tmp_path: Path) -> None:
    """It is read, and makes the jobs that one would expect."""
    text = (ROOT / "docs" / "batch.md").read_text().split("```yaml\n")[1].split("```")[0]
    for name in (
        "models/a.onnx",
        "models/b.onnx",
        "detectors/ultraface.onnx",
        "recipes/plain.yaml",
        "recipes/careful.yaml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("SAMPLES: 3\n")
    names = [job.name for job in read_jobs(written(tmp_path, text))[2]]
    assert len(names) == 10
    assert "a/tensorrt@10-w8a8" in names
    assert "ultraface/w4a8-careful" in names


def test_every_key_is_documented() -> None:
    """In the tables of docs/batch.md."""
    page = (ROOT / "docs" / "batch.md").read_text()
    keys = {*JobFile.model_fields, *JobKeys.model_fields, *AcceptKeys.model_fields, *LimitKeys.model_fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_the_example(tmp_path: Path) -> None:
    """Its models are made, its jobs are read, and its metric recognises digits."""
    shutil.copytree(ROOT / "examples" / "batch", tmp_path / "x", ignore=shutil.ignore_patterns("out", "models"))
    run_path(str(tmp_path / "x" / "prepare.py"), run_name="__main__")
    _, output, jobs = read_jobs(tmp_path / "x" / "jobs.yaml")
    assert output == tmp_path / "x" / "out"
    assert len(jobs) == 9
    assert {Path(job.model).stem for job in jobs} == {"digits", "digits_moved", "digits_probs"}
    for job in jobs[::3]:
        assert job.accept.metric is not None
        with loaded(job.accept.metric) as metric:
            assert metric.values(Path(job.model))["top1"] > 0.95
