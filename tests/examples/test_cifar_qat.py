"""The example of a loop of one's own: a real network, few images, one epoch, a file that onnxruntime runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "cifar_qat" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cifar_qat_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scores(path: Path, images: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input": images})[0])


@pytest.mark.slow
def test_one_epoch(example: ModuleType, pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it writes agrees with the float network on images that it was not given."""
    model, images = pack / "models" / "cifar_resnet20.onnx", pack / "data" / "cifar_calib.npz"
    out = tmp_path / "trained.onnx"
    line = [str(model), str(images), "-o", str(out), "--limit", "48", "--epochs", "1", "--batch", "16"]
    assert example.main(line) == 0
    said = capsys.readouterr().out
    assert re.search(r"^epoch 1: loss \d\.\d{4}$", said, re.MULTILINE) and "trained.onnx: " in said
    unseen = example.normalised(np.load(pack / "data" / "cifar_eval.npz")["X"][:100], example.MEAN, example.STD)
    found, wanted = scores(out, unseen), scores(model, unseen)
    assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.7
    assert not np.allclose(found, wanted, atol=1e-3)


def test_a_folder_of_images(example: ModuleType, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 10, 3), np.uint8)
    for at, one in enumerate(pixels):
        (tmp_path / f"{at}").mkdir()
        image.fromarray(one).save(tmp_path / f"{at}" / "image.png")
    np.testing.assert_array_equal(example.read_images(tmp_path), pixels)
    np.savez(tmp_path / "images.npz", X=pixels, Y=np.arange(3))
    np.testing.assert_array_equal(example.read_images(tmp_path / "images.npz"), pixels)
    expected = (pixels[1, 2, 3, 2] / 255.0 - 0.25) / 0.5
    assert example.normalised(pixels, [0.5, 0.5, 0.25], [1.0, 1.0, 0.5])[1, 2, 2, 3] == pytest.approx(
        expected, rel=1e-5
    )
    np.savez(tmp_path / "floats.npz", X=pixels / 255.0)
    with pytest.raises(SystemExit, match=r"must be uint8 \(N, H, W, 3\), got float64"):
        example.read_images(tmp_path / "floats.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="holds no images"):
        example.read_images(tmp_path / "empty")
