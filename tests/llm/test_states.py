"""Decoders with states of fixed size and positions of three axes: read, run token by token, quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import llm
from sbonnx.errors import ModelError
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import read_decoder
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.spec import Array
from tests.llm.tiny_decoder import CONTEXT, VOCABULARY, WIDTH, token_windows, write_folder

STATE = "past_key_values.0.recurrent_state"
LONGEST = "past_key_values.0.conv_state"
TAPS = 3


def recurrent_model(*, fixed: bool = True) -> onnx.ModelProto:
    """A convolution and a linear attention over embeddings of tokens and positions; no keys and values."""
    random = np.random.default_rng(0)
    stored: dict[str, Array] = {
        name: random.normal(0, scale, shape).astype(np.float32)
        for name, shape, scale in (
            ("embedding", (VOCABULARY, WIDTH), 1),
            ("places", (CONTEXT, WIDTH), 0.3),
            ("taps", (WIDTH, 1, TAPS), 0.5),
            *((f"w{part}", (WIDTH, WIDTH), WIDTH**-0.5) for part in "qkvo"),
            ("head", (WIDTH, VOCABULARY), 0.5),
        )
    }
    stored["first"] = np.array(0, np.int64)
    nodes: list[onnx.NodeProto] = []

    def add(op: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: Any) -> None:
        nodes.append(helper.make_node(op, inputs, outputs, f"n_{outputs[0]}", domain=domain, **attributes))

    add("Gather", ["embedding", "input_ids"], "words")
    add("Gather", ["position_ids", "first"], "times", axis=0)
    add("Gather", ["places", "times"], "placed")
    add("Add", ["words", "placed"], "x")
    add("Transpose", ["x"], "turned", perm=[0, 2, 1])
    conv: dict[str, Any] = {"activation": "silu", "ndim": 1, "domain": "com.microsoft"}
    add("CausalConvWithState", ["turned", "taps", "", LONGEST], "c", "present.0.conv_state", **conv)
    add("Transpose", ["c"], "rows", perm=[0, 2, 1])
    for part in "qkv":
        add("MatMul", ["rows", f"w{part}"], part)
    rule: dict[str, Any] = {
        "q_num_heads": 1,
        "kv_num_heads": 1,
        "update_rule": "linear",
        "domain": "com.microsoft",
        "scale": 0.05,
    }
    add("LinearAttention", ["q", "k", "v", STATE], "y", "present.0.recurrent_state", **rule)
    add("MatMul", ["y", "wo"], "o")
    add("Add", ["x", "o"], "z")
    add("MatMul", ["z", "head"], "logits")
    info, floats, whole = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT64
    shapes: dict[str, list[Any]] = {
        "conv_state": [WIDTH, TAPS - 1],
        "recurrent_state": [1, WIDTH, WIDTH if fixed else "width"],
    }
    graph = helper.make_graph(
        nodes,
        "recurrent",
        [
            info("input_ids", whole, ["batch", "length"]),
            info("position_ids", whole, [3, "batch", "length"]),
            *(info(f"past_key_values.0.{kind}", floats, ["batch", *shape]) for kind, shape in shapes.items()),
        ],
        [
            info("logits", floats, ["batch", "length", VOCABULARY]),
            *(info(f"present.0.{kind}", floats, ["batch", *shape]) for kind, shape in shapes.items()),
        ],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_states_carry_over_from_piece_to_piece(tmp_path: Path) -> None:
    decoder = read_decoder(write_folder(tmp_path / "float", recurrent_model()))
    assert not decoder.cache and decoder.position_axes == (3,)
    assert {state.past: state.shape for state in decoder.states} == {
        LONGEST: (WIDTH, TAPS - 1),
        STATE: (1, WIDTH, WIDTH),
    }
    assert [block.layer for block in decoder.structure.blocks] == [0]
    session, row = DecoderSession(decoder, threads=1), token_windows(1)[0]
    whole = session(row[None])[0][0]
    pieces = [logits for _, logits in session.pieces(row, 1, first=5)]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4)
    assert len({logits.shape for logits in pieces}) == 2


@pytest.mark.slow
def test_weights_are_quantized_and_states_are_not(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "float", recurrent_model())
    ids = token_windows()
    report = llm.quantize(
        folder, ids, output=tmp_path / "int4", overrides={"MIN_WEIGHT_SIZE": 0}, latency=False, progress=None
    )
    figures = report.metrics and report.metrics.llm
    assert isinstance(figures, DecoderEvaluation) and figures.kl is not None and figures.kl < 0.1
    assert figures.cached_perplexity == pytest.approx(figures.uncached_perplexity, rel=1e-3)
    written = onnx.load(tmp_path / "int4" / "model.onnx").graph
    assert sum(node.op_type == "MatMulNBits" for node in written.node) == 5
    types = {value.name: value.type.tensor_type.elem_type for value in (*written.input, *written.output)}
    assert types[STATE] == types["present.0.recurrent_state"] == TensorProto.FLOAT


def test_a_state_without_a_fixed_size_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "float", recurrent_model(fixed=False))
    with pytest.raises(ModelError, match=rf"state '{STATE}' .* known is"):
        read_decoder(folder)


def test_embeddings_come_from_the_model_of_the_folder(tmp_path: Path) -> None:
    """The decoder reads embeddings: its logits are those of the decoder with its table."""
    whole = write_folder(tmp_path / "whole")
    folder = write_folder(tmp_path / "parts")
    parts = onnx.load(folder / "model.onnx")
    lookup, width = parts.graph.node[0], helper.make_tensor_value_info("inputs_embeds", 1, ["batch", "length", WIDTH])
    assert lookup.op_type == "Gather"
    del parts.graph.node[0]
    for node in parts.graph.node:
        node.input[:] = ["inputs_embeds" if name == lookup.output[0] else name for name in node.input]
    ids = parts.graph.input[0]
    table = next(tensor for tensor in parts.graph.initializer if tensor.name == "embedding")
    output = helper.make_tensor_value_info(lookup.output[0], 1, ["batch", "length", WIDTH])
    embedder = helper.make_graph([lookup], "embedding", [ids], [output], [table])
    onnx.save(helper.make_model(embedder, opset_imports=parts.opset_import, ir_version=10), folder / "embedding.onnx")
    parts.graph.input[0].CopyFrom(width)
    onnx.save(parts, folder / "model.onnx")
    with pytest.raises(ModelError, match=r"input 'inputs_embeds' .* takes embeddings"):
        read_decoder(folder)
    sizes = {"head_size": WIDTH, "hidden_size": WIDTH, "num_attention_heads": 1, "num_hidden_layers": 2}
    named = {"decoder": {"filename": "model.onnx", **sizes}, "embedding": {"filename": "embedding.onnx"}}
    config = {"model": {**named, "context_length": CONTEXT, "vocab_size": VOCABULARY, "type": "tiny"}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    row = token_windows(1)[0]
    logits = [
        np.concatenate([values for _, values in DecoderSession(read_decoder(place)).pieces(row, 1, first=5)])
        for place in (whole, folder)
    ]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)
