"""The JSON output of every verb has a published schema. `checked_outputs` validates all outputs of all tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.cli.app import rows_of_commands
from sbonnx.cli.schemas.published import OF_COMMANDS, SCHEMAS, json_schema
from tests.support.json_schemas import check, objects, validator

MODEL, CALIB, EVAL = (str(path) for path in (digits().model, digits().calib, digits().eval))
JOBS = (
    f"title: t\noutput: out\ndefaults: {{data: '{CALIB}', split: 64}}\njobs: [{{model: '{MODEL}', backend: virtual}}]\n"
)

COMMANDS = {
    "quantize": f"quantize {MODEL} --data {CALIB} --split 64 -o q.onnx --report r.json --eval {EVAL} --metric top1",
    "batch-dry-run": "batch jobs.yaml --dry-run",
    "batch": "batch jobs.yaml --quiet",
    "prune": f"prune {MODEL} --data {CALIB} --split 64 -o p.onnx --macs 0.9",
    "prune-dimensions": f"prune {MODEL} --plan",
    "prune-sparse": f"prune {MODEL} --plan --pattern 2:4",
    "simplify": f"simplify {MODEL} -o s.onnx",
    "init": f"init {MODEL} --jobs",
    "recipe": "recipe",
    "inspect": "inspect q.onnx",
    "plan": f"plan {MODEL}",
    "lint": "lint q.onnx --target trt@10",
    "run": f"run {MODEL}",
    "bench": f"bench {MODEL} --seconds 0.1",
    "compare": f"compare {MODEL} q.onnx --data {CALIB} --samples 64",
    "diff": "diff q.onnx s.onnx",
    "eval": f"eval {MODEL} --data {EVAL} --metric top1",
    "profile": f"profile {MODEL} q.onnx --data {CALIB} --split 64 --samples 1",
    "view": "view r.json --no-open -o page.html",
    "explain": "explain T04",
    "doctor": "doctor",
    "schema": "schema",
    "version": "version",
    "completion": "completion bash",
}
"""In an order in which files of one are read by the next. Others have tests of their own."""

ELSEWHERE = {"demo", "llm-inspect", "llm-evaluate", "llm-adapt", "quantize-folder", "tune"}


@pytest.mark.slow
def test_every_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs.yaml").write_text(JOBS)
    for name, command in COMMANDS.items():
        assert main([*command.split(), "--json"]) in (0, 1), command
        output = json.loads(capsys.readouterr().out)
        assert list(output)[:2] == ["schema", "schema_version"] and output["schema"] == name
        check(output)
    for file in ("r.json", "out/report.json"):
        check(json.loads(Path(file).read_text()))
    assert COMMANDS.keys() | ELSEWHERE == SCHEMAS.keys()
    verbs = {name.replace(" ", "-") for name in rows_of_commands()}
    assert verbs <= SCHEMAS.keys() | OF_COMMANDS.keys()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_published_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is valid, all its keys are snake_case, and every object and top-level key has a description."""
    schema = json_schema(name)
    validator(name).check_schema(schema)
    for found in objects(schema):
        assert found["description"], found
        assert not [key for key in found["properties"] if not re.fullmatch(r"[a-z][a-z0-9_]*", key)]
    bare = [key for key, value in schema["properties"].items() if "description" not in value and "const" not in value]
    assert not bare
    assert main(["schema", *name.split("-")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema))


def test_a_wrong_output_is_noticed() -> None:
    output = {"schema": "version", "schema_version": 1, "version": "1", "missing_compiled_loops": []}
    check(output)
    for change in ({"version": 1}, {"schema_version": 2}, {"more": 1}):
        with pytest.raises(AssertionError, match=next(iter(change))):
            check({**output, **change})


def test_names_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "llm", "quantize"]) == 0
    assert json.loads(capsys.readouterr().out)["$id"] == "sbonnx-quantize-1.schema.json"
    assert main(["schema", "benches"]) == 2
    assert capsys.readouterr().err == "RecipeError: there is no schema 'benches'. Did you mean bench or batch?\n"


def test_not_finite_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are strings, which the schema allows."""
    np.savez(tmp_path / "d.npz", image=np.zeros((2, 1, 8, 8), np.float32))
    assert main(["compare", MODEL, MODEL, "--data", str(tmp_path / "d.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["sqnr_db"] == "inf"
