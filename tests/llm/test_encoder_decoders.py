"""Folders of an encoder and a decoder: read, run token by token, quantized as one thing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import llm
from sbonnx.backends import backend_for
from sbonnx.errors import DataError, ModelError
from sbonnx.llm.decoder_stages import DecoderRequest, DecoderState, copy_folder
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import read_decoder
from sbonnx.llm.windows import DecoderFeeds, read_windows
from sbonnx.options import RunOptions
from sbonnx.recipe import load
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.spec import Array
from sbonnx.stages.state import Request
from tests.llm.tiny_decoder import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    decoder_model,
    merged_model,
    token_windows,
    write_folder,
)

STATES, START, END = "encoder_hidden_states", 3, 5
STREAM = f"x{LAYERS}"
CROSS_NODES = {"c_k0", "c_v0", "present.0.encoder.key", "present.0.encoder.value"}


def encoder_model() -> onnx.ModelProto:
    """Embeddings and a product."""
    random = np.random.default_rng(1)
    stored = {"table": random.normal(0, 1, (VOCABULARY, WIDTH)), "w": random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH))}
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["e"], "embed"),
            helper.make_node("MatMul", ["e", "w"], ["last_hidden_state"], "project"),
        ],
        "encoder",
        [info("input_ids", TensorProto.INT64, ["batch", "source"])],
        [info("last_hidden_state", TensorProto.FLOAT, ["batch", "source", WIDTH])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def cross_model(*, later: bool = False) -> onnx.ModelProto:
    """The small decoder with an attention to the states of an encoder before its head.

    Args:
        later: keys and values of the states are caches, as in the branch after a past.
    """
    model = decoder_model()
    graph, random = model.graph, np.random.default_rng(2)
    head = graph.node.pop()

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> None:
        graph.node.append(helper.make_node(op, inputs, [output], f"n_{output}", **attributes))

    for part in "qkvo":
        weight = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(weight, f"c_w{part}"))
    for part, kind in (("k", "key"), ("v", "value")):
        if later:
            add("Identity", [f"past_key_values.0.encoder.{kind}"], f"present.0.encoder.{kind}")
        else:
            add("MatMul", [STATES, f"c_w{part}"], f"c_{part}0")
            add("Unsqueeze", [f"c_{part}0", "one"], f"present.0.encoder.{kind}")
    add("MatMul", [STREAM, "c_wq"], "c_q0")
    add("Unsqueeze", ["c_q0", "one"], "c_q")
    add("Transpose", ["present.0.encoder.key"], "c_kt", perm=[0, 1, 3, 2])
    add("MatMul", ["c_q", "c_kt"], "c_s")
    add("Softmax", ["c_s"], "c_p", axis=-1)
    add("MatMul", ["c_p", "present.0.encoder.value"], "c_y0")
    add("Squeeze", ["c_y0", "one"], "c_y1")
    add("MatMul", ["c_y1", "c_wo"], "c_y")
    add("Add", [STREAM, "c_y"], "c_x")
    add("MatMul", ["c_x", head.input[1]], "logits")
    info, floats = helper.make_tensor_value_info, TensorProto.FLOAT
    graph.input.append(info(STATES, floats, ["batch", "source", WIDTH]))
    for kind in ("key", "value"):
        graph.input.append(info(f"past_key_values.0.encoder.{kind}", floats, ["batch", 1, "source", WIDTH]))
        graph.output.append(info(f"present.0.encoder.{kind}", floats, ["batch", 1, "source", WIDTH]))
    return model


def without_caches() -> onnx.ModelProto:
    """The decoder as optimum exports its first step: outputs are caches, inputs are not."""
    model = cross_model()
    shapes = {value.name: value for value in model.graph.input if value.name.startswith("past")}
    for value in [*model.graph.input]:
        if value.name in shapes:
            model.graph.input.remove(value)
    for node in model.graph.node:
        if node.op_type == "Concat":
            node.op_type, node.input[:] = "Identity", [node.input[1]]
            del node.attribute[:]
    return model


def write(folder: Path, *, merged: bool = True) -> Path:
    """Write a folder as optimum does."""
    folder.mkdir()
    onnx.save(encoder_model(), folder / "encoder_model.onnx")
    decoder = merged_model(cross_model(), cross_model(later=True)) if merged else without_caches()
    onnx.save(cross_model(later=True), folder / "decoder_with_past_model.onnx")
    onnx.save(decoder, folder / f"decoder_model{'_merged' if merged else ''}.onnx")
    ids = {"decoder_start_token_id": START, "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "n_positions": 64, **ids}))
    return folder


def generated(folder: Path, source: Array, count: int) -> list[int]:
    """Tokens after the first one, by onnxruntime alone: all tokens in every step, without caches."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
        for name in ("encoder_model.onnx", "decoder_model.onnx")
    )
    states, row = encoder.run(None, {"input_ids": source[None]})[0], [START]
    while len(row) <= count and row[-1] != END:
        logits = decoder.run(["logits"], {"input_ids": np.array([row]), STATES: states})[0]
        row.append(int(logits[0, -1].argmax()))
    return row


def test_a_window_is_the_text_that_the_float_models_generate(tmp_path: Path) -> None:
    """Merged with caches, and without: the tokens of a loop in onnxruntime."""
    sources = token_windows(4, 9)
    folders = [write(tmp_path / name, merged=name == "merged") for name in ("plain", "merged")]
    for folder in folders:
        decoder = read_decoder(folder)
        assert decoder.encoder is not None and decoder.encoder.outputs == {STATES: "last_hidden_state"}
        assert len(decoder.cache) == (4 if folder.name == "merged" else 0) and len(decoder.cross) in (0, 2)
        windows = read_windows(decoder, sources, window=12)
        for row, source in zip(windows.ids, sources, strict=True):
            assert row[row >= 0].tolist() == generated(folders[0], source, 11)
        feed = next(iter(DecoderFeeds(decoder, windows.ids, sources=windows.sources)))
        states = onnxruntime.InferenceSession(folder / "encoder_model.onnx").run(None, {"input_ids": sources[:1]})[0]
        np.testing.assert_array_equal(feed[STATES], states)


def test_an_encoder_that_computes_the_caches_of_its_states(tmp_path: Path) -> None:
    """As onnxruntime-genai has Whisper: the same tokens as from the states."""
    states, folder = write(tmp_path / "states", merged=False), tmp_path / "genai"
    folder.mkdir()
    encoder, first, decoder = encoder_model(), cross_model(), cross_model(later=True)
    cross_nodes = [node for node in first.graph.node if node.output[0] in CROSS_NODES]
    for node in cross_nodes:
        node.input[:] = ["last_hidden_state" if name == STATES else name for name in node.input]
    encoder.graph.node.extend(cross_nodes)
    encoder.graph.initializer.extend(t for t in first.graph.initializer if t.name in ("c_wk", "c_wv", "one"))
    names = {f"present.0.encoder.{kind}": f"present_{kind}_cross_0" for kind in ("key", "value")}
    names |= {f"past_key_values.0.encoder.{kind}": f"past_{kind}_cross_0" for kind in ("key", "value")}
    presents = [value for value in decoder.graph.output if value.name in names]
    encoder.graph.output.extend(presents)
    for value in (*presents, next(value for value in decoder.graph.input if value.name == STATES)):
        (decoder.graph.output if value in presents else decoder.graph.input).remove(value)
    for model, name in ((encoder, "encoder.onnx"), (decoder, "decoder.onnx")):
        for value in (*model.graph.input, *model.graph.output):
            value.name = names.get(value.name, value.name)
        for node in model.graph.node:
            for side in (node.input, node.output):
                side[:] = [names.get(text, text) for text in side]
        onnx.save(model, folder / name)
    sizes = {"head_size": WIDTH, "hidden_size": WIDTH, "num_attention_heads": 1, "num_hidden_layers": LAYERS}
    parts = {"decoder": {"filename": "decoder.onnx", **sizes}, "encoder": {"filename": "encoder.onnx"}}
    ids = {"decoder_start_token_id": START, "eos_token_id": END, "vocab_size": VOCABULARY, "context_length": 64}
    (folder / "genai_config.json").write_text(json.dumps({"model": {"type": "whisper", **parts, **ids}}))
    decoder_there, source = read_decoder(folder), token_windows(1, 9)
    assert decoder_there.encoder is not None and not decoder_there.cross
    assert decoder_there.encoder.outputs == {f"past_{k}_cross_0": f"present_{k}_cross_0" for k in ("key", "value")}
    (row,) = read_windows(decoder_there, source, window=12).ids
    assert row[row >= 0].tolist() == generated(states, source[0], 11)


def test_separate_steps_that_stay_float_are_named(tmp_path: Path) -> None:
    """The merged decoder has both steps, and nothing is to be said."""
    notes = {}
    for merged in (False, True):
        decoder, stage = read_decoder(write(tmp_path / f"{merged}", merged=merged)), tmp_path / f"stage_{merged}"
        stage.mkdir()
        request = Request(decoder.model, load(None), backend_for("onnxruntime", None))
        state = DecoderState(request, decoding=DecoderRequest(decoder, None, decoder), folder=stage)
        notes[merged] = [note.code for note in copy_folder(state, RunOptions()).copied]
        assert (stage / "decoder_with_past_model.onnx").is_file()
    assert notes == {False: ["steps-stay-float"], True: []}


def test_lines_of_a_text_are_samples_of_the_encoder(tmp_path: Path) -> None:
    folder = write(tmp_path / "float")
    shutil.copyfile(write_folder(tmp_path / "other") / "tokenizer.json", folder / "tokenizer.json")
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4 w5\n")
    windows = read_windows(read_decoder(folder), tmp_path / "texts.txt", window=5)
    assert [source["input_ids"].tolist() for source in windows.sources or ()] == [[[3, 4, 5]], [[6, 7]]]


def test_pieces_through_the_caches_are_those_at_once(tmp_path: Path) -> None:
    decoder = read_decoder(write(tmp_path / "float"))
    session, row, source = DecoderSession(decoder, threads=1), token_windows(1)[0], {"input_ids": token_windows(1, 7)}
    (whole,) = (logits for _, logits in session.pieces(row, source=source))
    steps = [logits for _, logits in session.pieces(row, 1, first=5, source=source)]
    np.testing.assert_allclose(np.concatenate(steps), whole, atol=1e-4)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "float")
    (folder / "config.json").write_text("{}")
    with pytest.raises(DataError, match="has no decoder_start_token_id"):
        read_windows(read_decoder(folder), token_windows(2, 9))
    (folder / "encoder_model.onnx").unlink()
    with pytest.raises(ModelError, match=f"input '{STATES}' .* takes what an encoder computes"):
        read_decoder(folder)


@pytest.mark.slow
def test_both_models_are_quantized_and_compared_as_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "float")
    report = llm.quantize(
        folder,
        token_windows(16, 9),
        output=tmp_path / "int4",
        window=12,
        latency=False,
        progress=None,
        overrides={"MIN_WEIGHT_SIZE": 0},
    )
    figures = report.metrics and report.metrics.llm
    assert isinstance(figures, DecoderEvaluation) and figures.kl is not None and 0 < figures.kl < 0.2
    assert figures.cached_perplexity == pytest.approx(figures.uncached_perplexity, rel=1e-3)
    assert {path.name for path in (tmp_path / "int4").glob("*.onnx")} == {path.name for path in folder.glob("*.onnx")}
    encoder = onnx.load(tmp_path / "int4" / "encoder_model.onnx")
    assert "MatMulNBits" in {node.op_type for node in encoder.graph.node}
    names = ("encoder_model.onnx", "decoder_model_merged.onnx")
    sizes = [sum((place / name).stat().st_size for name in names) for place in (folder, tmp_path / "int4")]
    assert figures.bytes == tuple(sizes)
    # the error of the encoder counts: with the float one beside the quantized decoder, it is smaller
    shutil.copyfile(folder / "encoder_model.onnx", tmp_path / "int4" / "encoder_model.onnx")
    alone = llm.evaluate(tmp_path / "int4", token_windows(16, 9)[7::8], against=folder, latency=False, window=12)
    assert alone.kl is not None and alone.kl < figures.kl
