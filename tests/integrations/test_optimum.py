"""Model folders of Hugging Face: what is written, how it runs, what is refused; with Optimum where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import read
from sbonnx.cli import main
from sbonnx.errors import DataError, ModelError, OutputError
from sbonnx.integrations.decoder_feeds import TOKENS, EncoderDecoderFeeds
from sbonnx.integrations.optimum import ModelFolder, quantize_folder
from sbonnx.llm.encoders.encoder import TokenIds
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
    (folder / "model.onnx").rename(folder / "onnx" / "vision_model.onnx")
    onnx.save(model(NET, w=(4, 16), v=(16, 8)), folder / "onnx" / "text_model.onnx")
    with pytest.raises(DataError, match=r"has text_model, vision_model, whose inputs differ: give a folder with data"):
        quantize_folder(folder, FEEDS, tmp_path / "int8")
    reports = quantize_folder(folder, {"vision_model": FEEDS}, tmp_path / "int8", effort="fast")
    assert list(reports) == ["vision_model"]
    written = sorted(path.name for path in (tmp_path / "int8" / "onnx").iterdir())
    assert written == ["text_model.onnx", "vision_model_quantized.onnx"]
    with pytest.raises(ModelError, match=r"has no 'text\.onnx': it has text_model, vision_model"):
        quantize_folder(folder, FEEDS, tmp_path / "other", files=["text"])
    with pytest.raises(DataError, match="there is no data for 'text_model'"):
        quantize_folder(folder, {"vision_model": FEEDS}, tmp_path / "other", files=["text_model"])
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


def test_the_command_line_takes_a_folder_with_several_models(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data folder has an entry for each model, as a file or as a folder of feeds."""
    onnx.save(model(NET, w=(4, 16), v=(16, 8)), folder / "text_model.onnx")
    (tmp_path / "data" / "text_model").mkdir(parents=True)
    np.savez(tmp_path / "data" / "model.npz", **FEEDS[0])  # type: ignore[arg-type]
    for number, feed in enumerate(FEEDS):
        np.savez(tmp_path / "data" / "text_model" / f"{number}.npz", **feed)  # type: ignore[arg-type]
    given = [
        "quantize",
        str(folder),
        "--data",
        str(tmp_path / "data"),
        "--effort",
        "fast",
        "-o",
        str(tmp_path / "int8"),
    ]
    assert main([*given, "--json", "--report", str(tmp_path / "report.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "quantize-folder" and found["ok"] is True
    assert {name: report["counts"]["samples"] for name, report in found["files"].items()} == {
        "model": 8,
        "text_model": 26,
    }
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert main([*given, "--force", "--min-sqnr", "200"]) == 1
    shown = capsys.readouterr().out
    assert all(f"-> {tmp_path / 'int8' / name}_quantized.onnx" in shown for name in ("model", "text_model"))
    for option, hint in (
        ("--report=page.html", "use --report FILE.json"),
        ("--save-recipe=r.yaml", "leave out --save-recipe"),
    ):
        assert main([*given, "--force", option]) == 2
        assert f"has several models (model.onnx, text_model.onnx): {hint}, or give one file" in capsys.readouterr().err


ENCODER = """g (int64[N,S] input_ids, int64[N,S] attention_mask) => (float[N,S,8] last_hidden_state) {
    a = Gather(table, input_ids)
    last_hidden_state = MatMul(a, w)
}"""
DECODER = """g (int64[N,T] input_ids, float[N,S,8] encoder_hidden_states, int64[N,S] encoder_attention_mask)
        => (float[N,T,11] logits, float[N,P,8] present__0__decoder__key) {
    present__0__decoder__key = Gather(table, input_ids)
    s = ReduceMean <axes = [1]> (encoder_hidden_states)
    a = Add(present__0__decoder__key, s)
    b = MatMul(a, w)
    c = Tanh(b)
    logits = MatMul(c, v)
}"""
WITH_PAST = """g (int64[N,T] input_ids, float[N,P,8] past_key_values__0__decoder__key, int64[K] cache_position)
        => (float[N,T,11] logits, float[N,Q,8] present__0__decoder__key) {
    k = Gather(table, input_ids)
    present__0__decoder__key = Concat <axis = 1> (past_key_values__0__decoder__key, k)
    s = ReduceMean <axes = [1]> (present__0__decoder__key)
    b = MatMul(s, w)
    c = Tanh(b)
    logits = MatMul(c, v)
}"""


def dotted(text: str, **weights: Any) -> onnx.ModelProto:
    """A model in whose names `__` is a dot, which the text of a graph cannot have."""
    proto = model(text, **weights)
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = value.name.replace("__", ".")
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("__", ".") for name in names]
    return proto


@pytest.fixture
def encoder_decoder(tmp_path: Path) -> Path:
    """A folder as Optimum exports one: encoder, decoder, decoder with a past."""
    source = tmp_path / "float"
    source.mkdir()
    weights: dict[str, Any] = {"table": (11, 8), "w": (8, 8)}
    onnx.save(model(ENCODER, **weights), source / "encoder_model.onnx")
    onnx.save(dotted(DECODER, **weights, v=(8, 11)), source / "decoder_model.onnx")
    onnx.save(dotted(WITH_PAST, **weights, v=(8, 11)), source / "decoder_with_past_model.onnx")
    (source / "config.json").write_text('{"decoder_start_token_id": 3, "eos_token_id": 99, "forced_decoder_ids": null}')
    ids = RNG.integers(0, 11, (6, 5))
    np.savez(tmp_path / "calib.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    return source


def test_decoders_get_what_the_float_models_decode(encoder_decoder: Path, tmp_path: Path) -> None:
    """Against a loop of onnxruntime, sample by sample."""
    models = ModelFolder.read(encoder_decoder).models
    float_models = {name: onnx.load(path) for name, path in models.items()}
    encoder = graphs.load(models["encoder_model"])
    data = read(tmp_path / "calib.npz", encoder, split=2)
    tokens = TokenIds.read(encoder_decoder)
    first = list(EncoderDecoderFeeds(models, "decoder_model", data, tokens))
    later = list(EncoderDecoderFeeds(models, "decoder_with_past_model", data, tokens))
    assert len(first) == len(later) == 3
    places = set()
    for feed, decoder_feed, past_feed in zip(data, first, later, strict=True):
        states = run(float_models["encoder_model"], feed)["last_hidden_state"]
        np.testing.assert_array_equal(decoder_feed["encoder_hidden_states"], states)
        for row in range(2):
            known = {
                "encoder_hidden_states": states[row : row + 1],
                "encoder_attention_mask": np.ones((1, 5), np.int64),
            }
            ids = [3]
            while len(ids) < TOKENS:
                scores = run(float_models["decoder_model"], {**known, "input_ids": np.array([ids])})["logits"]
                ids.append(int(scores[0, -1].argmax()))
            assert decoder_feed["input_ids"][row].tolist() == ids
        (place,) = past_feed["cache_position"].tolist()
        places.add(place)
        np.testing.assert_array_equal(past_feed["input_ids"], decoder_feed["input_ids"][:, place : place + 1])
        before = {**decoder_feed, "input_ids": decoder_feed["input_ids"][:, :place]}
        past = run(float_models["decoder_model"], before)["present.0.decoder.key"]
        np.testing.assert_array_equal(past_feed["past_key_values.0.decoder.key"], past)
    assert len(places) == 3


def test_an_encoder_decoder_from_the_data_of_its_encoder(
    encoder_decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "quantize",
        str(encoder_decoder),
        "--data",
        str(tmp_path / "calib.npz"),
        "--split",
        "2",
        "--effort",
        "fast",
    ]
    assert main([*given, "-o", str(tmp_path / "int8"), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert list(files) == ["decoder_model", "decoder_with_past_model", "encoder_model"]
    assert all(report["counts"]["samples"] == 6 for report in files.values())
    quantized = onnx.load(tmp_path / "int8" / "decoder_model_quantized.onnx")
    assert "QuantizeLinear" in {node.op_type for node in quantized.graph.node}
    only = quantize_folder(encoder_decoder, tmp_path / "calib.npz", tmp_path / "one", files=["decoder_model"], split=2)
    assert list(only) == ["decoder_model"]
    (encoder_decoder / "config.json").write_text("{}")
    assert main([*given, "-o", str(tmp_path / "other")]) == 2
    assert "has no decoder_start_token_id in generation_config.json or config.json" in capsys.readouterr().err
    (encoder_decoder / "generation_config.json").write_text('{"decoder_start_token_id": 3}')
    onnx.save(
        dotted(DECODER.replace("encoder_attention_mask", "mask"), table=(11, 8), w=(8, 8), v=(8, 11)),
        encoder_decoder / "decoder_model.onnx",
    )
    assert main([*given, "-o", str(tmp_path / "other")]) == 2
    assert "decoder_model.onnx' has an input 'mask' which decoding does not compute" in capsys.readouterr().err


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


@pytest.mark.slow
def test_optimum_generates_the_text_of_the_float_model(tmp_path: Path) -> None:
    """An encoder-decoder of Optimum's export, as three files and with the decoders in one."""
    optimum = pytest.importorskip("optimum.onnxruntime", reason="optimum-onnx is not installed")
    export = pytest.importorskip("optimum.exporters.onnx").main_export
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 120}
    network = transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **size))
    network.save_pretrained(tmp_path / "torch")
    source, target = tmp_path / "float", tmp_path / "int8"
    export(str(tmp_path / "torch"), output=str(source), task="text2text-generation-with-past", do_validation=False)
    ids = RNG.integers(2, 120, (16, 10))
    quantize_folder(source, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, target, effort="fast", split=4)
    prompt = {"input_ids": torch.tensor(RNG.integers(2, 120, (8, 10)))}
    load = optimum.ORTModelForSeq2SeqLM.from_pretrained
    expected = load(source).generate(**prompt, max_new_tokens=12, do_sample=False)
    two = {"decoder_with_past_file_name": "decoder_with_past_model_quantized.onnx"}
    for decoder, others in (("decoder_model", two), ("decoder_model_merged", {})):
        names = {"encoder_file_name": "encoder_model_quantized.onnx", "decoder_file_name": f"{decoder}_quantized.onnx"}
        found = load(target, **names, **others).generate(**prompt, max_new_tokens=12, do_sample=False)
        assert found.shape == expected.shape
        assert (found == expected).float().mean() > 0.9, decoder
