"""``sbonnx profile``: table, bars, JSON, with a recipe or a quantized file, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from sbonnx.present.text.tables import bar
from tests.support.models import residual

COMMAND = ("profile", "m.onnx", "--data", "d.npz")
PLAIN = ("--bits", "w4a8", "--backend", "virtual", "--set", "rounding=nearest", "--set", "bias_correction=none")
LAYERS = ("stem", "conv1", "conv2", "fc")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and data."""
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_table(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Worst first by default, every layer once, with the longest bar first."""
    assert main([*COMMAND, *PLAIN]) == 0
    out = capfd.readouterr().out
    assert "sqnr dB, more is better; 1 feeds" in out
    rows = [line for line in out.splitlines() if line.partition(" ")[0] in LAYERS]
    assert {line.partition(" ")[0] for line in rows} >= set(LAYERS)
    bars = [len(re.findall("[█▏▎▍▌▋▊▉]", line)) for line in out.splitlines() if "█" in line]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] == 8


def test_json(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *PLAIN, "--json", "--sort", "graph"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["measure"], found["unit"], found["higher_is_better"]) == ("sqnr", "dB", True)
    names = [row["node"] for row in found["layers"]]
    assert [name for name in names if name in LAYERS] == list(LAYERS), "as they run"
    (stem,) = [row for row in found["layers"] if row["node"] == "stem"]
    assert stem["alone"] == stem["gathered"]
    assert stem["alone"] < min(stem["weights"], stem["activations"])
    assert list(found["outputs"]) == ["y"]


@pytest.mark.parametrize("sort", ["alone", "weights", "activations", "gathered"])
def test_sorted_and_truncated(sort: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *PLAIN, "--json", "--sort", sort, "--metric", "mse"]) == 0
    rows = json.loads(capfd.readouterr().out)["layers"]
    values = [row[sort] for row in rows if row[sort] is not None]
    assert values == sorted(values, reverse=True)
    assert main([*COMMAND, *PLAIN, "--json", "--sort", sort, "--metric", "mse", "--top", "2"]) == 0
    assert json.loads(capfd.readouterr().out)["layers"] == rows[:2]


def test_a_quantized_file(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The profile of the quantized file equals that of the recipe."""
    assert main(["quantize", "m.onnx", "--data", "d.npz", *PLAIN, "-o", "q.onnx", "--quiet", "--no-verify"]) == 0
    assert main([*COMMAND, *PLAIN, "--json"]) == 0
    expected = json.loads(capfd.readouterr().out)
    assert main(["profile", "m.onnx", "q.onnx", "--data", "d.npz", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["notes"] == []
    known = {row["node"]: row for row in expected["layers"]}
    assert {row["node"] for row in found["layers"]} == known.keys()
    for row in found["layers"]:
        assert row["alone"] == pytest.approx(known[row["node"]]["alone"], abs=0.1)


def test_coloured_graph(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *PLAIN, "--mermaid", "loss.md", "--metric", "mse"]) == 0
    assert "written: loss.md" in capfd.readouterr().out
    chart = (place / "loss.md").read_text()
    assert chart.startswith("graph TD\n")
    assert chart.count("fill:#e53935") == 1
    assert main([*COMMAND, *PLAIN, "--mermaid", "loss.md", "--quiet"]) == 2
    assert "--force" in capfd.readouterr().err


WRONG = {
    "--metric psnr": "--metric psnr: there are mse, sqnr, cosine, max, kl",
    "--sort name": "--sort name: there are graph, alone, weights, activations, gathered",
    "--top 0": "--top 0 shows nothing: use 1 or more",
    "--mode dynamic": "MODE: dynamic cannot be profiled",
}


@pytest.mark.parametrize("flags", WRONG)
def test_mistakes(flags: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *flags.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"RecipeError: {WRONG[flags]}")


def test_quantized_file_with_a_recipe(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "m.onnx", "m.onnx", "--data", "d.npz", "--bits", "w4a8"]) == 2
    assert "RecipeError: m.onnx is quantized already: leave --recipe" in capfd.readouterr().err
    assert main(["profile", "m.onnx", "m.onnx", "--data", "d.npz"]) == 2
    assert "ModelError: 'm.onnx' has no Q/DQ pairs" in capfd.readouterr().err
    assert main(["profile", "m.onnx"]) == 2
    assert "DataError: --data is missing" in capfd.readouterr().err


def test_bars() -> None:
    assert [bar(share, 2) for share in (0.0, 1e-9, 0.25, 0.5, 0.75, 1.0, 7.0, float("nan"))] == [
        "",
        "▏",
        "▌",
        "█",
        "█▌",
        "██",
        "██",
        "██",
    ]


@pytest.mark.slow
def test_loss_in_a_task_metric(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Against files in which only one layer is quantized, or all but one, evaluated in onnxruntime."""
    from sbonnx.assets import digits

    model, data, labelled = (str(path) for path in (digits().model, digits().calib, digits().eval))
    plain = ["--bits", "w2a3", "--backend", "virtual", "--set", "rounding=nearest", "--set", "bias_correction=none"]
    fixed = ["--split", "64", *plain, "--observer", "minmax"]
    evaluated = ["--eval", labelled, "--metric", "top1", "--json"]
    assert main(["profile", model, "--data", data, *fixed, *evaluated, "--top", "2"]) == 0
    found = json.loads(capfd.readouterr().out)["evaluation"]
    assert (found["metric"], found["samples"], found["share"], len(found["layers"])) == ("top1", 450, True, 2)
    assert found["layers"][0]["alone"]["loss"] >= found["layers"][1]["alone"]["loss"]
    row = found["layers"][0]
    files = {"quantized": [], "alone": ["--include", row["node"]], "kept": ["--exclude", row["node"]]}
    names = [str(tmp_path / f"{name}.onnx") for name in files]
    for name, more in zip(names, files.values(), strict=True):
        command = ["quantize", model, "--data", data, *fixed, "-o", name, "--no-verify", "--quiet", *more]
        assert main(command) == 0
    assert main(["eval", model, *names, "--data", labelled, "--metric", "top1", "--json"]) == 0
    values = [each["metric"]["value"] for each in json.loads(capfd.readouterr().out)["rows"]]
    mine = [found["float"], found["quantized"], row["alone"], row["kept_float"]]
    assert [each["metric"]["value"] for each in mine] == pytest.approx(values, abs=1 / 450)
    assert row["gain"] == pytest.approx(mine[1]["loss"] - mine[3]["loss"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "top1"], "--metric top1: there are mse, sqnr, cosine, max, kl; a task metric needs --eval DATA"),
        (["--eval", "d.npz"], "--eval computes a metric: name it with --metric"),
        (["--labels", "y"], "--labels is for labelled data: give it with --eval DATA"),
    ],
)
def test_task_metrics_that_lack_something(
    words: list[str], message: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *words]) == 2
    assert message in capfd.readouterr().err
