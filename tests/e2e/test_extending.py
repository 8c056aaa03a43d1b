"""A third party adds an observer, a rounding, a pattern, a lint rule and a backend in one file, a table line each."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbonnx
from sbonnx import backends, lint, patterns
from sbonnx.calib.observers import OBSERVERS
from sbonnx.errors import RecipeError
from sbonnx.rounding import ROUNDERS
from tests.support import extension
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
    tables: tuple[MutableMapping[str, Any], ...] = (OBSERVERS, ROUNDERS, lint.RULES, backends.BACKENDS)
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
    assert passed is not None and int(passed[1]) > 60, done.stdout


@pytest.mark.usefixtures("extended")
def test_a_file_is_made_with_all_of_them() -> None:
    proto = model(NET, w=(4, 3, 3, 3), v=(4, 4, 1, 1))
    report = sbonnx.quantize(
        proto,
        FEEDS,
        backend=extension.BACKEND,
        recipe={"A": {"OBSERVER": {"TYPE": extension.OBSERVER}}, "W": {"ROUNDING": {"TYPE": extension.ROUNDING}}},
    )
    assert report.ok, report.problems
    assert report.backend == extension.BACKEND
    assert extension.PATTERN in {fired.pattern for fired in report.applied}
    assert report.quantized is not None
    reference, found = run(proto, FEEDS[0])["y"], run(report.quantized, FEEDS[0])["y"]
    assert np.square(found - reference).sum() < 0.01 * np.square(reference).sum()
    report.quantized.graph.node[0].name = "n" * 101
    findings = lint.lint(report.quantized, "onnxruntime")
    assert extension.RULE in {finding.rule for finding in findings}


def test_without_the_rows_the_names_are_unknown() -> None:
    with pytest.raises(RecipeError, match=extension.OBSERVER):
        sbonnx.quantize(model(NET, w=(4, 3, 3, 3), v=(4, 4, 1, 1)), FEEDS, observer=extension.OBSERVER)
