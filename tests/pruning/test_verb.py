"""`sbonnx.prune` and the verb prune."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.cli import main
from sbonnx.errors import RecipeError
from tests.pruning.test_prune import feeds, inverted
from tests.support.models import run


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model and 80 samples."""
    model, data = tmp_path / "m.onnx", tmp_path / "d.npz"
    graphs.save(inverted(), model)
    np.savez(data, x=np.concatenate([feed["x"] for feed in feeds(80)]))
    return model, data


def test_the_verb_prunes_verifies_and_reports(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = files
    output, page = tmp_path / "p.onnx", tmp_path / "r.json"
    arguments = ["prune", str(model), "--data", str(data), "--split", "8", "-o", str(output), "--macs", "0.6"]
    assert main([*arguments, "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "multiplications" in shown
    assert "'y' is an output" in shown
    report = json.loads(page.read_text())
    assert report["ok"]
    assert report["macs"] <= 0.6
    assert report["metrics"]["held_out"] == 8
    assert {row["before"] > row["after"] for row in report["dimensions"]} >= {True}
    small = onnx.load(output)
    assert [value.name for value in (*small.graph.input, *small.graph.output)] == ["x", "y"]
    read = graphs.load(output)
    assert any("sbonnx.pruned" in graphs.node_metadata(read, node.name) for node in read.nodes)
    html = tmp_path / "r.html"
    for line in (["view", str(page), "-o", str(html), "--no-open"], [*arguments, "--report", str(html), "--force"]):
        assert main(line) == 0
        text = html.read_text()
        assert "Pruning report" in text and 'aria-label="dimensions"' in text
        assert f"{100 * report['macs']:.2f} % of the multiplications remain" in text
        html.unlink()
    capsys.readouterr()
    # the same file again, and a limit that it misses
    assert main([*arguments, "--min-sqnr", "90", "--force", "--json"]) == 1
    assert "dB signal to error, and 90 are asked for" in json.loads(capsys.readouterr().out)["problems"][0]
    assert onnx.load(output) == small


def test_masked_and_removed_files_compute_the_same(files: tuple[Path, Path]) -> None:
    model, _ = files
    found = [sbonnx.prune(model, feeds(), ratio=0.5, masked=masked) for masked in (True, False)]
    big, small = (report.pruned for report in found)
    assert big is not None
    assert small is not None
    assert found[0].plan == found[1].plan
    assert small.ByteSize() < big.ByteSize()
    x = {"x": feeds(1, seed=7)[0]["x"]}
    np.testing.assert_allclose(run(small, x)["y"], run(big, x)["y"], rtol=1e-4, atol=1e-4)


def test_without_data_the_file_is_checked_and_not_compared(files: tuple[Path, Path], tmp_path: Path) -> None:
    report = sbonnx.prune(files[0], ratio=0.25, output=tmp_path / "p.onnx")
    assert report.ok
    assert not report.metrics
    assert any("not compared with the original" in note for note in report.notes)
    assert (tmp_path / "p.onnx").is_file()


def test_errors_leave_no_file(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = files
    with pytest.raises(RecipeError, match=r"needs a goal: --ratio, --macs, .* or --sparsity, or its key in SPARSE"):
        sbonnx.prune(model, str(data), output=tmp_path / "p.onnx")
    assert main(["prune", str(model), "-o", str(tmp_path / "p.onnx"), "--macs", "0.5"]) == 2
    assert "give calibration data" in capsys.readouterr().err
    assert not (tmp_path / "p.onnx").exists()


def test_the_plan_needs_no_data(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(files[0]), "--plan", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sorted(row["groups"] for row in shown["dimensions"]) == [8, 16]
    assert [row["why"] for row in shown["pinned"]] == ["all output channels stay: 'y' is an output"]


def test_the_plan_of_sparse_weights(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(files[0]), "--plan", "--json", "--pattern", "2:4"]) == 0
    rows = json.loads(capsys.readouterr().out)["sparse"]
    assert [row["pattern"] for row in rows] == [None, "2:4", None, "2:4", "2:4"]
    assert all(bool(row["why"]) != bool(row["tensorrt"]) for row in rows)


def test_that_nothing_gets_faster_is_said_before_the_work(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = files
    wrong = ["prune", str(model), "--data", str(tmp_path / "none"), "-o", str(tmp_path / "p.onnx"), "--sparsity", "0.5"]
    assert main(wrong) == 2
    assert "onnxruntime has no kernels for sparse weights" in capsys.readouterr().out
    assert main([*wrong, "--backend", "tensorrt"]) == 2
    assert "no kernels" not in capsys.readouterr().out
    right = ["prune", str(model), "--data", str(data), "--split", "8", "-o", str(tmp_path / "p.onnx")]
    assert main([*right, "--sparsity", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("no kernels for sparse weights") == 1
    assert "sparse weights" in shown and "written:" in shown
