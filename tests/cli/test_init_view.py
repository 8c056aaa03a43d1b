"""``sbonnx init`` and ``sbonnx view``."""

from __future__ import annotations

import json
import re
import webbrowser
from pathlib import Path

import onnx
import pytest

from sbonnx import recipe
from sbonnx.assets import digits
from sbonnx.cli import main

MODEL = str(digits().model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["onnxruntime", "trt@10"])
def test_recipe_and_its_suggestions_load(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As written it is the default recipe; each suggestion alone is valid for the model."""
    file = tmp_path / "r.yaml"
    assert main(["init", MODEL, "--backend", backend, "-o", str(file)]) == 0
    assert recipe.load(file).to_dict() == recipe.load(backend=backend).to_dict()
    text = file.read_text()
    suggestions = re.findall(r"^# ([A-Z_]+: .*)$", text, re.MULTILINE)
    assert [line.partition(":")[0] for line in suggestions] == ["SKIP_TRACE_MODULES", "MIXED", "EFFORT", "VERIFY"]
    for line in suggestions:
        file.write_text(text.replace(f"# {line}", line))
        assert main(["plan", MODEL, "--recipe", str(file), "--quiet"]) == 0, line
    assert main(["init", MODEL, "-o", str(file)]) == 2
    assert "exists: give --force" in capsys.readouterr().err


def test_job_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The paths are relative to the file; the data is the user's."""
    file = tmp_path / "jobs.yaml"
    assert main(["init", MODEL, "--jobs", "-o", str(file)]) == 0
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "0.npz").write_bytes(digits().calib.read_bytes())
    capsys.readouterr()
    assert main(["batch", str(file), "--dry-run", "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert len(jobs) == 2


@pytest.mark.slow
def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of the report, written to a temporary or a named file, and opened unless that is declined."""
    opened: list[str] = []

    def open_page(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    report, page, other = (tmp_path / name for name in ("r.json", "page.html", "r.html"))
    common = ["quantize", MODEL, "--data", str(digits().calib), "--no-verify", "--quiet", "--force"]
    for file in (report, other):
        assert main([*common, "-o", str(tmp_path / "q.onnx"), "--report", str(file)]) == 0
    assert main(["view", str(report), "-o", str(page), "--no-open"]) == 0
    assert opened == []
    assert page.read_text() == other.read_text()
    capsys.readouterr()
    assert main(["view", str(report), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert opened == [Path(value["page"]).as_uri()]
    assert Path(value["page"]).read_text() == page.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist: check the path (--report r.json of quantize"),
        ("x", "is no JSON: write it with --report FILE.json"),
        ("[]", "is no report of quantize, qat, prune or batch"),
        ('{"counts": 1, "metrics": 2, "settings": 3}', "is not complete, or of another version"),
    ],
)
def test_no_report(text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    if text is not None:
        file.write_text(text)
    assert main(["view", str(file), "--no-open"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.slow
def test_page_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A float model with what is planned, a quantized one with its ranges, and both with losses."""
    quant, data = str(tmp_path / "q.onnx"), ["--data", str(digits().calib), "--split", "64"]
    assert main(["quantize", MODEL, *data, "-o", quant, "--effort", "fast", "--no-verify", "--quiet"]) == 0
    pages = {
        "planned": [MODEL, "--backend", "tensorrt"],
        "ranges": [quant],
        "losses": [MODEL, quant, *data],
    }
    texts = {}
    for name, arguments in pages.items():
        page = tmp_path / f"{name}.html"
        assert main(["view", *arguments, "-o", str(page), "--no-open", "--quiet"]) == 0
        texts[name] = page.read_text()
    assert "planned for tensorrt" in texts["planned"] and ',"few-channels"]' in texts["planned"]
    assert "int8 axis 0" in texts["planned"] and '["by weights"' not in texts["planned"]
    assert re.search(r'"uint8","bits":8,"range":"0 to \d', texts["ranges"]) and '["by weights"' not in texts["ranges"]
    assert '["by weights"' in texts["losses"] and "Tensors that lose most" in texts["losses"]
    capsys.readouterr()
    overlays = {viewer: str(tmp_path / f"{viewer}.file") for viewer in ("netron", "model-explorer")}
    for viewer, overlay in overlays.items():
        assert main(["view", MODEL, quant, *data, "--export", viewer, "-o", overlay, "--quiet"]) == 0
    results = json.loads(Path(overlays["model-explorer"]).read_text())["results"]  # by name of node, as its adapters
    assert set(results) <= {node.name for node in onnx.load(quant).graph.node}
    assert {tuple(value) for value in results.values()} == {("value", "bgColor", "textColor")}
    assert all(isinstance(value["value"], float) for value in results.values())
    copy = onnx.load(overlays["netron"])
    onnx.checker.check_model(copy)
    metadata = {node.name: {entry.key: entry.value for entry in node.metadata_props} for node in copy.graph.node}
    assert metadata["node_conv2d"]["sbonnx.isolated"] == f"{results['node_conv2d']['value']:.1f} dB"
    assert metadata["node_conv2d"]["sbonnx.state"] == "uint8 × int8 axis 0"
    capsys.readouterr()
    wrong = {
        "--export 'x' is not known: choose one of netron": [quant, "--export", "x", "-o", str(tmp_path / "x")],
        "-o is missing": [quant, "--export", "netron"],
        "is a float model, which has no losses": [MODEL, *data],
        "are against its float model: sbonnx view FLOAT": [quant, *data],
        "no Q/DQ pairs": [MODEL, MODEL],
        "is a report: QUANT": [str(tmp_path / "r.json"), quant],
        "exists: give --force": [quant, "-o", str(tmp_path / "planned.html")],
    }
    for message, arguments in wrong.items():
        assert main(["view", *arguments, "--no-open"]) == 2, message
        captured = capsys.readouterr().err
        assert message in captured and len(captured.splitlines()) == 1
