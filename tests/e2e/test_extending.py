"""A third party adds an observer, a rounding, a pattern, a lint rule and a backend in one file, a table line each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import backends, linting, patterns, pipeline
from sbonnx.calib.observers import OBSERVERS
from sbonnx.cli import main
from sbonnx.errors import RecipeError
from sbonnx.rounding import ROUNDERS
from sbonnx.stages.contract import Value
from tests.support import extension, gelu_tables
from tests.support.models import model, run

ROOT = Path(__file__).resolve().parents[2]

CONTRACTS = ("calib/observers", "rounding", "patterns")

NET = """net (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) {
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    b = Relu(a)
    c = Abs(b)
    y = Conv<kernel_shape=[1,1]>(c, v)
}"""
FEEDS = [{"x": np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)}]


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables with the new rows."""
    tables: tuple[MutableMapping[str, Any], ...] = (OBSERVERS, ROUNDERS, linting.RULES, backends.BACKENDS)
    monkeypatch.setattr(patterns, "FUSE", patterns.FUSE)
    before = [dict(table) for table in tables]
    extension.register()
    after = [dict(table) for table in tables]
    for table, old, new in zip(tables, before, after, strict=True):
        table.clear()
        table.update(old)
        for name, row in new.items():
            monkeypatch.setitem(table, name, row)


@pytest.mark.slow
def test_the_contract_suites_hold() -> None:
    """Every contract test of the new rows, in a new process whose tables have them."""
    names = f"({extension.OBSERVER} or {extension.ROUNDING} or {extension.PATTERN}) and not document"
    suites = [str(ROOT / "tests" / folder / "test_contract.py") for folder in CONTRACTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.extension", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "-k", names, *suites], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 40, done.stdout


@pytest.mark.usefixtures("extended")
def test_a_file_is_made_with_all_of_them() -> None:
    proto = model(NET, w=(4, 3, 3, 3), v=(4, 4, 1, 1))
    report = sbonnx.quantize(
        proto,
        FEEDS,
        recipe={
            "BACKEND": extension.BACKEND,
            "A": {"OBSERVER": {"TYPE": extension.OBSERVER}},
            "W": {"ROUNDING": {"TYPE": extension.ROUNDING}},
        },
    )
    assert report.ok, report.problems
    assert report.backend == extension.BACKEND
    assert extension.PATTERN in {fired.pattern for fired in report.applied}
    assert report.quantized is not None
    reference, found = run(proto, FEEDS[0])["y"], run(report.quantized, FEEDS[0])["y"]
    assert np.square(found - reference).sum() < 0.01 * np.square(reference).sum()
    report.quantized.graph.node[0].name = "n" * 101
    findings = linting.lint(report.quantized, "onnxruntime")
    assert extension.RULE in {finding.rule for finding in findings}


def test_without_the_rows_the_names_are_unknown() -> None:
    with pytest.raises(RecipeError, match=extension.OBSERVER):
        recipe = {"A": {"OBSERVER": {"TYPE": extension.OBSERVER}}}
        sbonnx.quantize(model(NET, w=(4, 3, 3, 3), v=(4, 4, 1, 1)), FEEDS, recipe=recipe)


GELU_NET = """net (float[N, 16] x) => (float[N, 4] y) {
    root = Constant<value_float=1.4142135>()
    one = Constant<value_float=1.0>()
    half = Constant<value_float=0.5>()
    h = Gemm(x, w, b)
    a = Div(h, root)
    e = Erf(a)
    p = Add(e, one)
    m = Mul(h, p)
    g = Mul(m, half)
    y = Gemm(g, v, c)
}"""


def test_a_wing_is_one_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GELUs as tables: one file, one line of a tuple. Data, proof, report, page and command line are those of all."""
    monkeypatch.setattr(pipeline, "STAGES", (*pipeline.STAGES[:-1], gelu_tables.tabulate_gelus, pipeline.STAGES[-1]))
    present: frozenset[Value] = frozenset()
    for step in pipeline.STAGES:
        assert step.needs <= present
        present |= step.sets
    monkeypatch.chdir(tmp_path)
    onnx.save(model(GELU_NET, w=(16, 64), b=64, v=(64, 4), c=4), "m.onnx")
    x = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    np.savez("d.npz", x=x)
    arguments = ["quantize", "m.onnx", "--data", "d.npz", "--split", "1", "-o", "q.onnx"]
    assert main([*arguments, "--report", "r.html", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [row["pattern"] for row in report["applied"]].count(gelu_tables.NAME) == 1
    note = "tables of 256 values in place of 1 GELU"
    assert any(note in line for line in report["notes"])
    page = Path("r.html").read_text(encoding="utf-8")
    assert gelu_tables.NAME in page and note in page
    ops = [node.op_type for node in onnx.load("q.onnx").graph.node]
    assert "Gather" in ops and "Erf" not in ops
    reference, result = (run(path, {"x": x})["y"] for path in ("m.onnx", "q.onnx"))
    noise = np.square(result - reference).sum()
    assert 0 < noise < 0.01 * np.square(reference).sum()
