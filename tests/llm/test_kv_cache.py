"""Quantized caches: onnxruntime's attention against numpy, folders, and a trained decoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx import llm
from sbonnx.cli import main
from sbonnx.errors import DataError, DeviceError, ModelError, NumericError, RecipeError, SbonnxError
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.evaluate import evaluate_windows
from sbonnx.llm.generation import generate_with_genai
from sbonnx.llm.kv_cache import OLDEST_KERNEL, cache_bounds, quantize_caches, read_attention
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.spec import Array
from sbonnx.system.runtime import version
from tests.conftest import PACK
from tests.llm.grouped_decoder import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    attend,
    grouped_model,
    rotate,
    write_grouped_folder,
)
from tests.llm.tiny_decoder import decoder_model, token_windows, write_folder
from tests.support.values import some

pytestmark = pytest.mark.skipif(version() < OLDEST_KERNEL, reason="onnxruntime has no kernel for quantized caches")

CLASSICS, STRUCTURES = PACK / "classics_llama", PACK / "llm_structures"
SMALL = ["MIN_WEIGHT_SIZE=0", "CALIBRATION.THREADS=1", "EFFORT=fast", "W.ROUNDING.TYPE=nearest"]


def quantized_copy(source: Path, target: Path, bits: int, ids: Array) -> Decoder:
    """Return the decoder of a folder with quantized caches and float weights."""
    decoder = read_decoder(source)
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    quantize_caches(target / "model.onnx", decoder, ids, bits)
    return read_decoder(target)


def constants(path: Path) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def unpacked(codes: Array, bits: int) -> Array:
    """Return integers of a stored cache: the low half of a byte comes first, plus 8."""
    if bits == 8:
        return codes.astype(np.int32)
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype(np.int32) - 8


@pytest.mark.parametrize("bits", [8, 4])
def test_attention_of_stored_integers(tmp_path: Path, bits: int) -> None:
    """Codes and logits of prefill and of every decoded token follow the formulas, from the float keys and values."""
    source, ids = write_grouped_folder(tmp_path / "m", grouped_model(1)), token_windows()
    decoder = quantized_copy(source, tmp_path / "q", bits, ids[:8])
    assert decoder.cache[0].dtype == (np.int8 if bits == 8 else np.uint8)
    assert (decoder.head_size, decoder.cache[0].bits, decoder.cache[0].head_size) == (HEAD_SIZE, bits, HEAD_SIZE)
    stored = constants(tmp_path / "q" / "model.onnx")
    row, top = ids[12], 2 ** (bits - 1) - 1
    stream = stored["embedding"][row].astype(np.float64)
    parts = (stream @ stored["qkv0"]).reshape(len(row), -1, HEAD_SIZE).transpose(1, 0, 2)
    query, keys = rotate(parts[:HEADS]), rotate(parts[HEADS : HEADS + KV_HEADS])
    session = DecoderSession(decoder, threads=1)
    logits, cache = session(row[None, :9])
    pieces = [logits[0]]
    for at in range(9, len(row)):
        logits, cache = session(row[None, at : at + 1], cache)
        pieces.append(logits[0])
    read = {}
    for kind, floats in (("key", keys), ("value", parts[HEADS + KV_HEADS :])):
        scale = stored[f"past_key_values.0.{kind}_scale"][0]
        codes = unpacked(cache[f"past_key_values.0.{kind}"][0], bits)
        expected = np.clip(np.round(floats / scale), -top - 1, top)
        assert np.abs(codes - expected).max() <= 1  # float32 and float64 round ties differently
        assert (codes == expected).mean() > 0.995
        assert np.abs(codes).max() > 0.9 * top
        read[kind] = codes * scale.astype(np.float64)
    heads = attend(query, read["key"], read["value"]).transpose(1, 0, 2).reshape(len(row), HIDDEN)
    assert np.abs(np.concatenate(pieces) - (stream + heads @ stored["o0"]) @ stored["head"]).max() < 1e-4
    at_once, again = session(row[None])
    assert np.abs(np.concatenate(pieces) - at_once[0]).max() < 1e-4
    assert all((again[name] == cache[name]).all() for name in cache)


@pytest.mark.parametrize(
    ("rotary", "partner"),
    [
        ("inside", [16, 17, 24, 4]),
        ("before", [16, 17, 24, 4]),
        ("interleaved", [1, 0, 9, 21]),
        ("partial", [8, 9, 0, 20]),
        ("none", [0, 1, 8, 20]),
    ],
)
def test_scales_of_rotated_pairs(tmp_path: Path, rotary: str, partner: list[int]) -> None:
    """Bounds of keys are those of the keys before rotation, at any position; the largest values otherwise."""
    decoder = read_decoder(write_grouped_folder(tmp_path / "m", grouped_model(rotary=rotary)))
    layers, ids = read_attention(decoder), token_windows(8)
    assert [list(layer.partner[[0, 1, 8, 20]]) for layer in layers] == [partner] * 2
    stored = constants(tmp_path / "m" / "model.onnx")
    parts = (stored["embedding"][ids] @ stored["qkv0"]).reshape(-1, HEADS + 2 * KV_HEADS, HEAD_SIZE)
    keys, values = parts[:, HEADS : HEADS + KV_HEADS], parts[:, HEADS + KV_HEADS :]
    bounds = cache_bounds(decoder, layers, ids)
    pairs = layers[0].partner
    norms = np.where(pairs == np.arange(HEAD_SIZE), np.abs(keys), np.hypot(keys, keys[..., pairs]))
    assert bounds["past_key_values.0.key"] == pytest.approx(norms.max(0), rel=1e-4)
    assert bounds["past_key_values.0.value"] == pytest.approx(np.abs(values).max(0), rel=1e-4)
    for past, bound in bounds.items():
        floats = np.concatenate([DecoderSession(decoder).prefill(row[None])[past][0] for row in ids], axis=1)
        assert (np.abs(floats).max(1) <= bound * 1.0001).all()


def test_channels_without_values_have_a_scale(tmp_path: Path) -> None:
    model = grouped_model(1)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "qkv0")
    values = numpy_helper.to_array(weight).copy()
    values[:, -3] = 0
    values[:, -2 * HEAD_SIZE : -HEAD_SIZE] = 0
    weight.CopyFrom(numpy_helper.from_array(values, "qkv0"))
    decoder = read_decoder(write_grouped_folder(tmp_path / "m", model))
    bound = cache_bounds(decoder, read_attention(decoder), token_windows(2))["past_key_values.0.value"]
    assert (bound[0] == 1).all()
    assert bound[1, -3] == bound[1].max()


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_a_folder_with_quantized_caches(tmp_path: Path, bits: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and configuration are those of a folder with float caches."""
    source, ids = write_grouped_folder(tmp_path / "m", grouped_model(1)), token_windows()
    plain = llm.quantize(source, ids, output=tmp_path / "p", overrides=SMALL, latency=False)
    report = llm.quantize(source, ids, output=tmp_path / "q", kv_bits=bits, overrides=SMALL, latency=False)
    assert report.ok, report.problems
    figures = some(some(report.metrics).llm)
    assert figures.cached_perplexity == pytest.approx(figures.uncached_perplexity, rel=1e-4)
    assert figures.cache_bytes == (512, 512 * bits // 32)
    assert 0 < some(figures.kl) < 0.2
    assert some(some(plain.metrics).llm).cache_bytes == (512, 512)
    weights, expected = constants(tmp_path / "q" / "model.onnx"), constants(tmp_path / "p" / "model.onnx")
    scales = {name for name in weights if "past_key_values" in name}
    assert len(scales) == 2
    assert weights.keys() - scales == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in expected)
    assert (tmp_path / "q" / "genai_config.json").read_bytes() == (source / "genai_config.json").read_bytes()
    assert json.loads((tmp_path / "q" / "sbonnx_llm.json").read_text())["recipe"]["LLM"]["KV_BITS"] == bits
    assert main(["llm", "inspect", str(tmp_path / "q")]) == 0
    out = capsys.readouterr().out
    assert f"2 of {bits} bits ({'int8' if bits == 8 else 'uint8'})" in out
    assert f"{512 * bits // 32} B per token" in out
    weightless = llm.quantize(source, ids, output=tmp_path / "w", bits="w0", kv_bits=bits, latency=False)
    assert weightless.ok, weightless.problems
    assert {weight.label() for weight in read_decoder(tmp_path / "w").structure.weights} == {"float32"}


@pytest.mark.slow
def test_the_command_and_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_grouped_folder(tmp_path / "m"), tmp_path / "q"
    np.savez(tmp_path / "t.npz", ids=token_windows())
    command = ["llm", "quantize", str(source), "--text", str(tmp_path / "t.npz"), "-o", str(target), "--no-latency"]
    assert main([*command, "--kv", "4", "-v", "--set", "MIN_WEIGHT_SIZE=0"]) == 0
    assert "128 B per token (1.02 kB float)" in capsys.readouterr().out
    assert main([*command, "--kv", "8"]) == 2
    assert "give --force" in capsys.readouterr().err
    assert main([*command, "--set", "LLM.KV_BITS=8", "--force"]) == 0
    assert read_decoder(target).cache[0].dtype == np.int8


def test_nothing_is_left_of_a_run_that_fails_at_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NumericError("not finite")

    monkeypatch.setattr("sbonnx.llm.kv_cache.cache_bounds", fail)
    source = write_grouped_folder(tmp_path / "m", grouped_model(1))
    with pytest.raises(NumericError):
        llm.quantize(source, token_windows(), output=tmp_path / "q", kv_bits=8, overrides=SMALL, latency=False)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def without_attention(folder: Path, fault: str) -> Path:
    """Write a folder whose caches cannot be quantized."""
    if fault == "plain":
        return write_folder(folder, decoder_model())
    if fault == "shared":
        return write_grouped_folder(folder, grouped_model(shares=True))
    model = grouped_model()
    if fault == "cast":
        node = next(each for each in model.graph.node if each.op_type == "GroupQueryAttention")
        node.input[3] = "keys"
        model.graph.node.insert(0, onnx.helper.make_node("Identity", ["past_key_values.0.key"], ["keys"], name="same"))
    if fault == "infinite":
        weight = next(tensor for tensor in model.graph.initializer if tensor.name == "qkv1")
        values = numpy_helper.to_array(weight).copy()
        values[0, -1] = np.inf
        weight.CopyFrom(numpy_helper.from_array(values, "qkv1"))
    return write_grouped_folder(folder, model)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("plain", ModelError, r"layer 0 of .* computes attention with Softmax 'n_l0_p', and onnxruntime quantizes"),
        ("shared", ModelError, r"layer 0 of .*: ReduceMax 'n_largest' reads the cache 'present.0.key' too"),
        ("cast", ModelError, r"layer 0 of .*: caches are no direct inputs and outputs of GroupQueryAttention 'n_a0'"),
        ("infinite", NumericError, r"cache 'past_key_values.1.value' of .* has values that are not finite"),
    ],
)
def test_refused_models(tmp_path: Path, fault: str, error: type[SbonnxError], text: str) -> None:
    decoder = read_decoder(without_attention(tmp_path / "m", fault))
    with pytest.raises(error, match=text) as caught:
        quantize_caches(tmp_path / "m" / "model.onnx", decoder, token_windows(1), 8)
    assert "\n" not in str(caught.value)


def test_refusals_before_the_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids = write_grouped_folder(tmp_path / "m"), token_windows()
    with pytest.raises(DataError, match=r"measured on texts, and none were given: give --text"):
        llm.quantize(source, output=tmp_path / "q", kv_bits=8)
    with pytest.raises(RecipeError, match=r"LLM.KV_BITS.*8 or 4"):
        llm.quantize(source, ids, output=tmp_path / "q", kv_bits=6)
    quantized_copy(source, tmp_path / "k", 4, ids[:1])
    with pytest.raises(ModelError, match=r"are quantized already \('past_key_values.0.key' has 4 bits\)"):
        llm.quantize(tmp_path / "k", ids, output=tmp_path / "q", kv_bits=8)
    monkeypatch.setattr("sbonnx.llm.kv_cache.version", lambda: (1, 27))
    with pytest.raises(DeviceError, match=r"onnxruntime 1.27 has no kernel .* install 1.28 or newer"):
        llm.quantize(source, ids, output=tmp_path / "q", kv_bits=8)
    assert not (tmp_path / "q").exists()


@pytest.mark.slow
def test_weights_of_a_decoder_with_quantized_caches(tmp_path: Path) -> None:
    """Caches of the input are kept."""
    quantized_copy(write_grouped_folder(tmp_path / "m"), tmp_path / "k", 8, token_windows())
    report = llm.quantize(tmp_path / "k", token_windows(), output=tmp_path / "q", overrides=SMALL, latency=False)
    assert report.ok, report.problems
    assert read_decoder(tmp_path / "q").cache[0].dtype == np.int8


@pytest.mark.slow
@pytest.mark.skipif(not CLASSICS.is_dir(), reason=f"no model in {CLASSICS}")
@pytest.mark.parametrize(("bits", "increase", "kl"), [(8, 0.0005, 5e-5), (4, 0.007, 0.006)])
def test_caches_of_a_trained_decoder(tmp_path: Path, bits: int, increase: float, kl: float) -> None:
    ids = np.load(CLASSICS / "calib.npz")["ids"][:64].astype(np.int64)
    decoder = quantized_copy(CLASSICS / "genai", tmp_path / "q", bits, ids)
    windows = np.load(CLASSICS / "eval.npz")["ids"].astype(np.int64)
    found = evaluate_windows(decoder, windows, against=read_decoder(CLASSICS / "genai"), latency=False)
    assert found.float_perplexity is not None
    assert abs(found.perplexity / found.float_perplexity - 1) < increase
    assert found.kl is not None
    assert found.kl < kl
    assert found.cached_perplexity == pytest.approx(found.uncached_perplexity, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_onnxruntime_genai_opens_the_folder(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    source = STRUCTURES / "genai_llama_fp32"
    if not source.is_dir():
        pytest.skip(f"no model in {source}")
    ids = np.random.default_rng(0).integers(2, 319, (16, 48))
    llm.quantize(source, ids, output=tmp_path / "q", kv_bits=bits, overrides=SMALL, latency=False)
    decoder = read_decoder(tmp_path / "q")
    run = generate_with_genai(decoder, ids[0])
    assert run.error == ""
    assert list(run.tokens) == DecoderSession(decoder, threads=1).greedy(ids[0][:16], 16)
