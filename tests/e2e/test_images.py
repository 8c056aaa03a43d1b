"""A folder of JPEG files quantizes like the arrays that they become; on the command line, in jobs and in Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.calib.data.dataset import read
from sbonnx.cli import main
from sbonnx.errors import DataError
from sbonnx.graph import load
from tests.support.models import model

Image = pytest.importorskip("PIL.Image")

TEXT = """
agraph (float[N,3,16,16] x) => (float[N,8] y) {
    c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)
    r = Relu(c)
    g = GlobalAveragePool(r)
    f = Flatten(g)
    y = Gemm <transB = 1> (f, v, b)
}"""
SETTINGS = "scale: 1/255\nmean: [0.5, 0.4, 0.3]\nstd: 0.25\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, photos in class folders, and a preprocessing; the working directory."""
    onnx.save(model(TEXT, w=(8, 3, 3, 3), v=(8, 8), b=8), str(tmp_path / "m.onnx"))
    rng = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(folder / f"{number}.jpg")
    (tmp_path / "p.yaml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_way_in_gives_the_same_bytes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = sbonnx.DataPath("photos", "p.yaml")
    feeds = [{"x": feed["x"]} for feed in read(photos, load(place / "m.onnx"))]
    sbonnx.quantize("m.onnx", feeds, output="arrays.onnx", kernel_costs="none")
    sbonnx.quantize("m.onnx", "photos", preprocess="p.yaml", output="python.onnx", kernel_costs="none")
    command = ["quantize", "m.onnx", "--data", "photos", "--preprocess", "p.yaml", "-o", "cli.onnx"]
    assert main([*command, "--set", "kernel_costs=none"]) == 0  # nothing of so small a network pays
    (place / "jobs.yaml").write_text(
        "output: out\ndefaults: {data: photos, preprocess: p.yaml, set: {kernel_costs: none}}\n"
        "jobs: [{model: m.onnx, name: q}]\n"
    )
    assert main(["batch", "jobs.yaml"]) == 0
    wanted = (place / "arrays.onnx").read_bytes()
    for path in ("python.onnx", "cli.onnx", "out/q.onnx"):
        assert (place / path).read_bytes() == wanted, path
    capsys.readouterr()
    assert main(["compare", "m.onnx", "cli.onnx", "--data", "photos", "--preprocess", "p.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_one_line_errors(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        ([], "holds images, which need --preprocess"),
        (["--preprocess", "imagnet"], "'imagnet' is no preprocessing"),
    ):
        assert main(["quantize", "m.onnx", "--data", "photos", *options, "-o", "q.onnx"]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1 and not (place / "q.onnx").exists()
    with pytest.raises(DataError, match="applies to paths of images, audio or text"):
        sbonnx.quantize("m.onnx", [np.zeros((1, 3, 16, 16), np.float32)], preprocess="unit")
