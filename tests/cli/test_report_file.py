"""``--report``: JSON or an HTML page, by the suffix of the file."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from sbonnx.assets import digits
from sbonnx.cli import main

LIGHT = ("--samples", "16", "--split", "8", "--quiet")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(verb: str = "quantize") -> list[str]:
    return [verb, str(digits().model), "--data", str(digits().calib), "-o", "q.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r.html", "R.HTM"])
def test_a_page(name: str, place: Path) -> None:
    """The page has the layers of the JSON report of the same run."""
    assert main([*command(), *LIGHT, "--report", name]) == 0
    page = (place / name).read_text(encoding="utf-8").replace("<wbr>", "")
    assert page.startswith("<!doctype html>")
    assert main([*command(), *LIGHT, "--force", "--report", "r.json"]) == 0
    report = json.loads((place / "r.json").read_text(encoding="utf-8"))
    assert report["layers"] and all(f">{row['node']}</td>" in page for row in report["layers"])
    assert "digits.onnx" in page and "q.onnx" in page
    assert sorted(path.name for path in place.iterdir()) == sorted(["q.onnx", "r.json", name])


def test_names_that_look_like_markup(place: Path) -> None:
    model = onnx.load(str(digits().model))
    for node in model.graph.node:
        node.name = f"<script>alert('{node.name}')</script>"
    onnx.save(model, str(place / "m.onnx"))
    assert (
        main(["quantize", "m.onnx", "--data", str(digits().calib), "-o", "q.onnx", *LIGHT, "--report", "r.html"]) == 0
    )
    page = (place / "r.html").read_text(encoding="utf-8")
    assert "<script>alert(" not in page and "&lt;script&gt;alert(" in page


@pytest.mark.parametrize("verb", ["quantize", "qat"])
@pytest.mark.parametrize("name", ["report", "r.txt", "r.json.gz"])
def test_other_suffix(verb: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error before the work begins: nothing is written."""
    assert main([*command(verb), "--report", name]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"--report {name}: the suffix selects the format: use .json or .html" in err
    assert len(err.splitlines()) == 1
    assert list(place.iterdir()) == []


def test_existing_page(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "r.html").write_text("mine")
    assert main([*command(), "--report", "r.html"]) == 2
    assert "'r.html' exists: give --force" in capsys.readouterr().err
    assert (place / "r.html").read_text() == "mine" and not (place / "q.onnx").exists()
