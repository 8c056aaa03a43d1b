"""Globs, the matrix, names, outputs, and what must not be seen."""

from __future__ import annotations

import glob
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sbonnx.batch.jobs.job import Job
from sbonnx.batch.jobs.jobfile import read_jobs
from sbonnx.batch.jobs.matrix import glob_files, selected
from sbonnx.batch.jobs.steps import recipe_of
from sbonnx.batch.redaction import Redactor, names_in, reveal_job
from sbonnx.errors import RecipeError


def jobs_of(folder: Path, text: str) -> tuple[Job, ...]:
    """The jobs of a file in `folder`."""
    (folder / "jobs.yaml").write_text(text)
    return read_jobs(folder / "jobs.yaml")[2]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with models in two folders."""
    for name in ("a.onnx", "b.onnx", "deep/c.onnx", "notes.txt"):
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"m")
    return tmp_path


def test_globs_and_the_matrix(models: Path) -> None:
    """Every file with every combination, in order."""
    jobs = jobs_of(
        models,
        "output: o\nmatrix: {backend: [onnxruntime, tensorrt], bits: [w8a8, w4a8]}\njobs: [{model: 'models/*.onnx'}]",
    )
    expected = [
        f"{model}-{backend}-{bits}"
        for model in "ab"
        for backend in ("onnxruntime", "tensorrt")
        for bits in ("w8a8", "w4a8")
    ]
    assert [job.name for job in jobs] == expected
    assert {Path(job.output) for job in jobs} == {models / "o" / f"{name}.onnx" for name in expected}


def test_globs_go_deep(models: Path) -> None:
    """Two stars: all folders below."""
    jobs = jobs_of(models, "output: o\nnaming: '{folder}_{model}'\njobs: [{model: 'models/**/*.onnx'}]")
    assert [job.name for job in jobs] == ["models_a", "models_b", "deep_c"]


@pytest.mark.parametrize(
    ("recipe", "more", "backend"),
    [
        ("BACKEND: TensorRT", "", "tensorrt"),
        ("backend: tensorrt@10", "", "tensorrt@10"),
        ("DEFAULTS: sparsebit", "", "virtual"),
        ("SAMPLES: 3", "", "onnxruntime"),
        ("BACKEND: virtual", "set: {BACKEND: tensorrt}", "tensorrt"),
        ("BACKEND: tensorrt\nMODE: dynamic", "", "tensorrt"),  # refused for MODE, by the job
        ("BACKEND: [", "", "onnxruntime"),  # the job says that it cannot be read
    ],
)
def test_the_backend_of_a_recipe_holds_without_another(models: Path, recipe: str, more: str, backend: str) -> None:
    """In names, in exclude, and in the recipe of the job."""
    (models / "r.yaml").write_text(recipe)
    entry = f"model: models/a.onnx, recipe: r.yaml{more and ', '}{more}"
    (job,) = jobs_of(models, f"output: o\nexclude: [{{backend: none}}]\njobs: [{{{entry}}}]")
    assert (job.backend, job.name) == (backend, f"a-{backend}-r")
    if "[" in recipe or "dynamic" in recipe:
        with pytest.raises(RecipeError, match=r"MODE|YAML"):
            recipe_of(job)
    else:
        found = recipe_of(job)
        assert backend in (found.backend, f"{found.backend}@{found.version}")
    with pytest.raises(RecipeError, match="creates no job"):
        jobs_of(models, f"output: o\nexclude: [{{backend: '{backend}'}}]\njobs: [{{{entry}}}]")


def test_a_backend_that_contradicts_the_recipe_is_refused(models: Path) -> None:
    """Wherever the job file names it."""
    (models / "r.yaml").write_text("BACKEND: tensorrt")
    for file in ("defaults: {backend: virtual}", "matrix: {backend: [virtual]}"):
        (job,) = jobs_of(models, f"output: o\n{file}\njobs: [{{model: models/a.onnx, recipe: r.yaml}}]")
        with pytest.raises(RecipeError, match="the backend virtual was requested"):
            recipe_of(job)


def test_a_folder_with_wildcards_in_its_name(tmp_path: Path) -> None:
    """The folder of the job file is no glob."""
    odd = tmp_path / "night [1]"
    odd.mkdir()
    (odd / "m[x].onnx").write_bytes(b"m")
    assert [job.name for job in jobs_of(odd, "output: o\njobs: [{model: '*.onnx'}]")] == ["m[x]-onnxruntime"]
    assert [job.name for job in jobs_of(odd, "output: o\njobs: [{model: 'm[x].onnx'}]")] == ["m[x]-onnxruntime"]


def test_an_entry_goes_before_the_matrix(models: Path) -> None:
    """Its own lists, whole."""
    text = """
output: o
matrix: {backend: [onnxruntime, tensorrt], bits: [w8a8]}
jobs:
  - {model: models/a.onnx, backend: virtual, bits: [w4a8, w8a8]}
  - {model: models/b.onnx}
"""
    names = [job.name for job in jobs_of(models, text)]
    assert names == ["a-virtual-w4a8", "a-virtual-w8a8", "b-onnxruntime-w8a8", "b-tensorrt-w8a8"]


def test_exclude(models: Path) -> None:
    """All keys of an entry must match; an empty entry matches nothing."""
    text = """
output: o
matrix: {backend: [onnxruntime, tensorrt], bits: [w8a8, w4a8]}
exclude: [{backend: tensorrt*, bits: w4*}, {}]
jobs: [{model: models/a.onnx, exclude: [{bits: w8a8, backend: onnx*}]}]
"""
    assert [job.name for job in jobs_of(models, text)] == ["a-onnxruntime-w4a8", "a-tensorrt-w8a8"]
    with pytest.raises(RecipeError, match="creates no job"):
        jobs_of(models, "output: o\nexclude: [{model: a}]\njobs: [{model: models/a.onnx}]")


def test_a_model_that_is_not_there_costs_its_own_job(models: Path) -> None:
    """Where it is named and no glob, its job is made: the others run."""
    jobs = jobs_of(models, "output: o\njobs: [{model: models/late.onnx}, {model: models/a.onnx}]")
    assert [Path(job.model).name for job in jobs] == ["late.onnx", "a.onnx"]
    assert jobs_of(models, f"output: o\njobs: [{{model: {'x' * 5000}, name: x}}]")[0].name == "x"


GLOBS = ("models/**/*.onnx", "**/*.onnx", "models/**", "**", "*/*", "m*/../models/?.onnx", "models/[a-z].onnx", "no*/x")

REFUSED = {
    "two of a name": ("jobs: [{model: models/a.onnx}, {model: models/a.onnx}]", "second job named"),
    "two outputs": (
        "jobs: [{model: models/a.onnx, backend: [virtual, tensorrt], output: x.onnx}]",
        "two jobs that write",
    ),
    "one output in two spellings": (
        "jobs: [{model: models/a.onnx, output: x.onnx}, {model: models/b.onnx, output: d/../x.onnx}]",
        "two jobs that write",
    ),
    "over an input": (
        "jobs: [{model: models/a.onnx, output: ../models/b.onnx}, {model: models/b.onnx}]",
        "the model of 'b-onnxruntime'",
    ),
    "its data file over an input": (
        "jobs: [{model: models/a.onnx, output: x.onnx, data: o/x.onnx.data}]",
        "the data of 'a-onnxruntime'",
    ),
    "into the data": ("jobs: [{model: models/a.onnx, data: o}]", "part of the data of"),
    "over the job file": ("jobs: [{model: models/a.onnx, output: ../jobs.yaml}]", "the job file"),
    "over the recipe of another job": (
        "jobs: [{model: models/a.onnx, output: ../r.yaml}, {model: models/b.onnx, recipe: r.yaml}]",
        "the recipe of 'b-",
    ),
    "over a metric": (
        "jobs: [{model: models/a.onnx, output: ../metric.py, accept: {metric: 'metric.py:score'}}]",
        "the metric of",
    ),
    "over a module of a metric": (
        "jobs: [{model: models/a.onnx, output: ../inner/deep.py, accept: {metric: 'metric.py:score'}}]",
        "the metric of",
    ),
    "outside the output folder": ("jobs: [{model: models/a.onnx, output: ../x.onnx}]", "outside the output folder"),
    "an absolute path": ("jobs: [{model: models/a.onnx, output: /x.onnx}]", "outside the output folder"),
    "a URL of a path": ("jobs: [{model: models/a.onnx, output: 'file:///x.onnx'}]", "outside the output folder"),
    "through a link": ("jobs: [{model: models/a.onnx, output: link/x.onnx}]", "outside the output folder"),
    "a long name": (f"jobs: [{{model: models/a.onnx, name: {'n' * 300}}}]", "a name of 305 bytes, more than 230"),
    "a long path": (f"jobs: [{{model: models/a.onnx, name: {'n/' * 3000}n}}]", "a path of .* bytes, more than 4000"),
    "a name that leads out": ("naming: ../{model}\njobs: [{model: models/a.onnx}]", "a file in the output folder"),
    "over a report": ("jobs: [{model: models/a.onnx, output: report.json}]", "the batch itself writes"),
    "into the state through a link": (
        "jobs: [{model: models/a.onnx, output: back/.sbonnx/x.onnx}]",
        "the batch itself writes",
    ),
    "into the state": ("jobs: [{model: models/a.onnx, output: .sbonnx/x.onnx}]", "the batch itself writes"),
    "an unknown field": ("naming: '{modle}'\njobs: [{model: models/a.onnx}]", "Did you mean {model}"),
    "a field without a value": ("naming: '{model}{bits}'\njobs: [{model: models/a.onnx}]", "the job has no bits"),
    "a name with a NUL": (
        'jobs: [{model: models/a.onnx, output: "a\\0b"}]',
        "has a character that file names cannot have",
    ),
    "half a surrogate pair": ('jobs: [{model: "\\ud800.onnx"}]', "has a character that file names cannot have"),
    "a folder as output": ("jobs: [{model: models/a.onnx, output: x/}]", "must name a file"),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be(models: Path, text: str, said: str) -> None:
    """Before anything runs."""
    (models / "r.yaml").write_text("SAMPLES: 3\n")
    (models / "metric.py").write_text("def score(path):\n    from inner import deep\n    return deep.score(path)\n")
    (models / "inner").mkdir()
    (models / "inner" / "deep.py").write_text("score = len\n")
    (models / "o").mkdir()
    (models / "o" / "link").symlink_to(models)
    (models / "o" / "back").symlink_to(models / "o")
    with pytest.raises(RecipeError, match=said):
        jobs_of(models, f"output: o\n{text}")


def test_outputs_elsewhere_where_the_file_says_so(models: Path) -> None:
    """An entry's word goes before that of the defaults. Inputs stay out of reach."""
    text = "output: o\ndefaults: {outside_output: true}\njobs: [{model: models/a.onnx, output: %s}]"
    assert jobs_of(models, text % "../x.onnx")[0].output == str(models / "x.onnx")
    with pytest.raises(RecipeError, match="the job file"):
        jobs_of(models, text % "../jobs.yaml")
    with pytest.raises(RecipeError, match="outside the output folder"):
        jobs_of(models, text % "../x.onnx, outside_output: false")


def test_globs_do_not_follow_links_to_themselves(models: Path) -> None:
    """Without such links, the standard library finds the same files."""
    wanted = {pattern: set(glob.glob(str(models / pattern), recursive=True)) for pattern in GLOBS}
    for name in ("x", "y", "z"):
        (models / "models" / "deep" / name).symlink_to(models / "models")
    os.mkfifo(models / "models" / "pipe.onnx")
    for pattern, paths in wanted.items():
        files = [os.path.abspath(path) for path in paths if Path(path).is_file()]
        found = list(glob_files(pattern, models))
        assert len(found) == len(set(found)) and set(found) == set(files), pattern
    assert set(glob_files("models/deep/[xy]/*.onnx", models)) == {
        str(models / "models" / "deep" / name / f"{model}.onnx") for name in "xy" for model in "ab"
    }


def test_globs_have_an_end(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.batch.jobs.matrix.MOST_MODELS", 1)
    with pytest.raises(RecipeError, match="matches more than 1 files"):
        jobs_of(models, "output: o\njobs: [{model: 'models/*.onnx'}]")
    monkeypatch.setattr("sbonnx.batch.jobs.matrix.MOST_JOBS", 3)
    with pytest.raises(RecipeError, match="creates more than 3 jobs"):
        jobs_of(models, "output: o\njobs: [{model: models/a.onnx, bits: [w8a8, w4a8, w8a16, w4a4]}]")


def test_only(models: Path) -> None:
    """A glob of names; one that matches nothing says what is near."""
    jobs = jobs_of(models, "output: o\njobs: [{model: 'models/*.onnx'}]")
    assert [job.name for job in selected(jobs, "b*")] == ["b-onnxruntime"]
    assert selected(jobs, None) == jobs
    with pytest.raises(RecipeError, match="no job's name matches 'c-onn\\*'; near it: "):
        selected(jobs, "c-onn*")


def test_urls(models: Path) -> None:
    """They stay as they are; the name is that of the file."""
    jobs = jobs_of(
        models, "output: o\njobs: [{model: 's3://b/net.onnx', data: 's3://b/d', output: 's3://o/{model}.q'}]"
    )
    job = jobs[0]
    assert (job.name, job.model, job.data) == ("net-onnxruntime", "s3://b/net.onnx", "s3://b/d")
    assert job.output == "s3://o/net.q"
    with pytest.raises(RecipeError, match=r"'output' .*must be a folder"):
        jobs_of(models, "output: s3://x/y\njobs: [{model: models/a.onnx}]")


SECRET = "hunter2-hunter2"


def test_what_the_environment_says_is_not_in_a_job(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """${NAME} is filled in where it is used; globs that go through it are hidden again."""
    secret = models / SECRET
    (models / "models").rename(secret)
    monkeypatch.setenv("VAULT", SECRET)
    monkeypatch.setenv("TOKEN", SECRET)
    text = """
output: o
jobs:
  - {model: '${VAULT}/*.onnx', data: '${VAULT}/d', backend: virtual, set: {EXCLUDE: ['${TOKEN}']}}
  - {model: 's3://${TOKEN}@b/m.onnx', output: 's3://${TOKEN}@b/q.onnx'}
"""
    jobs = jobs_of(models, text)
    assert SECRET not in str([asdict(job) for job in jobs])
    assert set(names_in(jobs)) == {"VAULT", "TOKEN"}
    real = reveal_job(jobs[0])
    assert Path(real.model) == secret / "a.onnx"
    assert real.overrides == (("EXCLUDE", f'["{SECRET}"]'),)
    assert reveal_job(jobs[-1]).output == f"s3://{SECRET}@b/q.onnx"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("output: o\njobs: [{model: '${NO_SUCH_NAME}/a.onnx'}]", "no NO_SUCH_NAME: set it"),
        ("output: o\njobs: [{model: '${SHORT}/a.onnx'}]", "fewer than 4 characters"),
        ("output: '${TOKEN}'\njobs: [{model: models/a.onnx}]", "'output' .*write the value"),
        ("output: o\nnaming: '${TOKEN}'\njobs: [{model: models/a.onnx}]", "'naming' .*write the value"),
        ("output: o\njobs: [{model: models/a.onnx, output: '${TOKEN}.onnx'}]", "'jobs.0.output' .*write the value"),
    ],
)
def test_secrets_that_cannot_be_kept(models: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    """They are refused, and not said."""
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("SHORT", "abc")
    with pytest.raises(RecipeError, match=said) as caught:
        jobs_of(models, text)
    assert SECRET not in str(caught.value)


def test_no_error_shows_a_secret(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those about paths that are made with it."""
    monkeypatch.setenv("TOKEN", SECRET)
    for line in ("model: '${TOKEN}/x*.onnx'", "model: models/a.onnx, recipe: '${TOKEN}.yaml'"):
        with pytest.raises(RecipeError) as caught:
            jobs_of(models, f"output: o\njobs: [{{{line}}}]")
        assert SECRET not in str(caught.value)


def test_the_hider_takes_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value within another, in keys and lists as well."""
    monkeypatch.setenv("ONE", "alpha")
    monkeypatch.setenv("TWO", "alphabet")
    found: Any = Redactor(["ONE", "TWO"]).values({"alphabet": ["x alpha", ("alphabets", 3)]})
    assert found == {"${TWO}": ["x ${ONE}", ("${TWO}s", 3)]}
