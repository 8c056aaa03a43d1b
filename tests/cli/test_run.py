"""``sbonnx run`` and ``sbonnx bench``, against onnxruntime itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import sbonnx
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.verify import sessions

MODEL = str(digits().model)
DATA = str(digits().eval)


def outputs_of(images: np.ndarray) -> np.ndarray:
    return np.asarray(ort.InferenceSession(MODEL).run(None, {"image": images})[0])


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_outputs_are_those_of_onnxruntime(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file with all feeds, or a folder of one file each."""
    path = tmp_path / name
    assert main(["run", MODEL, "--data", DATA, "--split", "100", "--samples", "3", "-o", str(path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["feeds"] == 3
    images = np.load(DATA)["image"][:300]
    wanted = outputs_of(images)
    files = [path] if path.suffix else sorted(path.iterdir())
    assert len(files) == (1 if path.suffix else 3)
    found = np.concatenate([np.load(file)["scores"] for file in files])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    row = value["outputs"][0]
    assert (row["name"], row["type"], row["shape"], row["not_finite"]) == ("scores", "float32", [100, 10], 0)
    np.testing.assert_allclose([row["min"], row["mean"], row["max"]], [wanted.min(), wanted.mean(), wanted.max()], 1e-5)


def test_random_inputs(tmp_path: Path) -> None:
    """The seed gives the values; dynamic axes other than the leading one need a shape."""
    files = [tmp_path / f"{index}.npz" for index in range(3)]
    for file, more in zip(files, (["--batch", "2"], ["--shape", "image=2x1x8x8"], ["--seed", "1"]), strict=True):
        assert main(["run", MODEL, "-o", str(file), "--quiet", *more]) == 0
    first, second, third = (np.load(file)["scores"] for file in files)
    np.testing.assert_array_equal(first, second)
    assert (first.shape, third.shape) == ((2, 10), (1, 10))
    assert not np.array_equal(first[:1], third)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", MODEL, "--shape", "x=1x2"], "a shape is given for 'x', which is no input of the model: image"),
        (["run", MODEL, "--shape", "image=1x2"], "the shape (1, 2) does not fit the input 'image'"),
        (["run", MODEL, "--shape", "image"], "--shape is INPUT=DIMS, such as image=1x3x224x224, got 'image'"),
        (["run", MODEL, "--batch", "0"], "--batch 0: a batch has 1 or more samples"),
        (["run", MODEL, "-o", "out.txt"], "outputs are written to FILE.npz, or to a folder without a suffix"),
        (["run", MODEL, "--data", "absent"], "absent"),
        (["run", "absent.onnx"], "'absent.onnx' does not exist"),
        (["bench", MODEL, "--threads", "1,x"], "--threads is a number of 1 or more, or several"),
        (["bench", MODEL, "--samples", "3"], "--samples 3: give --data with it"),
        (["bench", MODEL, "--seconds", "0"], "the time limit is above 0"),
        (["bench", MODEL, "absent.onnx"], "'absent.onnx' does not exist"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_outputs_of_other_shapes_are_not_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Feeds of two sizes, in an output without a common leading axis: nothing is written."""
    import onnx
    from onnx import TensorProto, helper

    node = helper.make_node("Shape", ["x"], ["y"])
    floats, ints = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        [node, helper.make_node("ReduceSum", ["y"], ["z"], keepdims=0)],
        "g",
        [helper.make_tensor_value_info("x", floats, ["n"])],
        [helper.make_tensor_value_info("z", ints, [])],
    )
    model = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model)
    data = tmp_path / "data"
    data.mkdir()
    for count in (1, 2):
        np.savez(data / f"{count}.npz", x=np.zeros(count, np.float32))
    assert main(["run", str(model), "--data", str(data), "-o", str(tmp_path / "out.npz")]) == 2
    assert "cannot be joined in one .npz: give -o a folder" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()
    assert main(["run", str(model), "--data", str(data), "-o", str(tmp_path / "out"), "--quiet"]) == 0
    assert [int(np.load(file)["z"]) for file in sorted((tmp_path / "out").iterdir())] == [1, 2]


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows by batch, threads and model; the times themselves are not judged."""
    words = ["bench", MODEL, MODEL, "--threads", "1,2", "--batch", "1,4", "--seconds", "0.01", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["batch"], row["threads"]) for row in rows] == [
        (batch, threads) for batch in (1, 4) for threads in (1, 2) for _ in range(2)
    ]
    for row in rows:
        assert row["runs"] >= 5
        assert 0 < row["best_ms"] <= row["median_ms"] <= row["p95_ms"]
        np.testing.assert_allclose(row["samples_per_second"], 1000 * row["batch"] / row["median_ms"])
    assert {row["ratio"] for row in rows[::2]} == {1.0}
    assert main(["bench", MODEL, "--data", DATA, "--batch", "4", "--seconds", "0.01"]) == 0
    assert "time of the first" not in capsys.readouterr().out


def test_bench_runs_feeds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the first N feeds is run; in every round, all models run on the same one."""
    runs: list[tuple[int, int]] = []
    run_one = sessions.run

    def recorded(model: Any, feeds: Any, number: int) -> Any:
        runs.append((id(model), number))
        return run_one(model, feeds, number)

    monkeypatch.setattr(sessions, "run", recorded)
    result = sbonnx.bench([MODEL, MODEL], DATA, split=4, samples=7, seconds=0.001)
    assert {number for _, number in runs} == set(range(7))
    assert [number for _, number in runs] == [turn % 7 for turn in range(result.rows[0].runs) for _ in range(2)]
