"""Model folders of Hugging Face: what is written, how it runs, what is refused; with Optimum where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from sbonnx.errors import DataError, ModelError, OutputError
from sbonnx.integrations.optimum import quantize_folder
from tests.support.models import model, run

NET = """g (float[N,4] input_ids) => (float[N,8] last_hidden_state) {
    a = MatMul(input_ids, w)
    b = Relu(a)
    last_hidden_state = MatMul(b, v)
}"""
RNG = np.random.default_rng(0)
FEEDS = [{"input_ids": RNG.standard_normal((8, 4)).astype(np.float32)} for _ in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, its configuration, and weights of another framework."""
    source = tmp_path / "float"
    source.mkdir()
    onnx.save(model(NET, w=(4, 16), v=(16, 8)), source / "model.onnx")
    (source / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    (source / "tokenizer_config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "model_quantized.onnx").write_bytes(b"of an earlier tool")
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").write_text("")
    return source


class Rows:
    """A data set as of the package datasets: rows are dicts of lists, with more columns than the model has inputs."""

    column_names = ["input_ids", "label", "text"]  # noqa: RUF012 - as in datasets

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place >= self.count:
            raise IndexError(place)
        values = np.float32(FEEDS[0]["input_ids"][place]).tolist()
        return {"input_ids": np.array(values, np.float32), "label": 1, "text": "a"}


def test_a_folder_gives_a_folder(folder: Path, tmp_path: Path) -> None:
    reports = quantize_folder(folder, FEEDS, tmp_path / "int8", effort="fast")
    target = tmp_path / "int8"
    names = {path.name for path in target.iterdir()}
    assert names == {"config.json", "tokenizer_config.json", "model_quantized.onnx", "ort_config.json"}
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert reports["model"].output == str(target / "model_quantized.onnx")
    quantized = onnx.load(target / "model_quantized.onnx")
    expected = run(onnx.load(folder / "model.onnx"), FEEDS[1])["last_hidden_state"]
    found = run(quantized, FEEDS[1])["last_hidden_state"]
    assert np.square(found - expected).sum() < 0.01 * np.square(expected).sum()
    config = json.loads((target / "ort_config.json").read_text())
    assert config["quantization"]["is_static"] is True and config["quantization"]["format"] == "QDQ"
    assert config["sbonnx"]["files"]["model"]["output"] == "model_quantized.onnx"
    with pytest.raises(OutputError, match="exists: give --force"):
        quantize_folder(folder, FEEDS, target)
    quantize_folder(folder, Rows(8), target, effort="fast", force=True)
    assert json.loads((target / "ort_config.json").read_text())["sbonnx"]["files"]["model"]["metrics"]["feeds"] > 0


def test_files_in_a_subfolder_with_data_for_each(folder: Path, tmp_path: Path) -> None:
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "encoder_model.onnx")
    onnx.save(model(NET, w=(4, 16), v=(16, 8)), folder / "onnx" / "decoder_model.onnx")
    with pytest.raises(DataError, match=r"has decoder_model, encoder_model, whose inputs differ: give data for each"):
        quantize_folder(folder, FEEDS, tmp_path / "int8")
    reports = quantize_folder(folder, {"encoder_model": FEEDS}, tmp_path / "int8", effort="fast")
    assert list(reports) == ["encoder_model"]
    written = sorted(path.name for path in (tmp_path / "int8" / "onnx").iterdir())
    assert written == ["decoder_model.onnx", "encoder_model_quantized.onnx"]
    with pytest.raises(ModelError, match=r"has no 'decoder\.onnx': it has decoder_model, encoder_model"):
        quantize_folder(folder, FEEDS, tmp_path / "other", files=["decoder"])
    with pytest.raises(DataError, match="there is no data for 'decoder_model'"):
        quantize_folder(folder, {"encoder_model": FEEDS}, tmp_path / "other", files=["decoder_model"])
    assert not (tmp_path / "other").exists()


def test_what_is_no_folder_of_a_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        quantize_folder(tmp_path / "none", FEEDS, tmp_path / "int8")
    (folder / "model.onnx").unlink()
    with pytest.raises(ModelError, match=r"has no \.onnx file: export the model first"):
        quantize_folder(folder, FEEDS, tmp_path / "int8")


def test_a_column_that_is_missing(folder: Path, tmp_path: Path) -> None:
    rows = Rows(4)
    rows.column_names = ["text"]
    with pytest.raises(DataError, match="has no column 'input_ids', an input of the model; it has text"):
        quantize_folder(folder, rows, tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


def test_the_command_line_takes_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "calib.npz", input_ids=np.concatenate([feed["input_ids"] for feed in FEEDS]))
    given = ["quantize", str(folder), "--data", str(tmp_path / "calib.npz"), "--split", "8", "--effort", "fast"]
    assert main([*given, "-o", str(tmp_path / "int8"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(tmp_path / "int8" / "model_quantized.onnx")
    onnx.save(model(NET, w=(4, 16), v=(16, 8)), folder / "decoder_model.onnx")
    assert main([*given, "-o", str(tmp_path / "two")]) == 2
    assert "has decoder_model.onnx, model.onnx: give one file" in capsys.readouterr().err


@pytest.mark.slow
def test_optimum_loads_the_result(tmp_path: Path) -> None:
    optimum = pytest.importorskip("optimum.onnxruntime", reason="optimum-onnx is not installed")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    source = tmp_path / "float"
    transformers.BertModel(transformers.BertConfig(vocab_size=100, **size)).save_pretrained(tmp_path / "torch")
    optimum.ORTModelForFeatureExtraction.from_pretrained(tmp_path / "torch", export=True).save_pretrained(source)
    names = ("input_ids", "attention_mask", "token_type_ids")
    values = (RNG.integers(0, 100, (4, 12)), np.ones((4, 12), np.int64), np.zeros((4, 12), np.int64))
    quantize_folder(source, [dict(zip(names, values, strict=True))] * 2, tmp_path / "int8", effort="fast")
    assert optimum.ORTConfig.from_pretrained(tmp_path / "int8").quantization.is_static
    feed = {name: torch.tensor(array) for name, array in zip(names, values, strict=True)}
    load = optimum.ORTModelForFeatureExtraction.from_pretrained
    expected = load(source)(**feed).last_hidden_state.numpy()
    found = load(tmp_path / "int8", file_name="model_quantized.onnx")(**feed).last_hidden_state.numpy()
    assert np.square(found - expected).mean() < 0.05 * np.square(expected).mean()
