"""A small decoder with GroupQueryAttention, as onnxruntime-genai's builder exports them, and its numpy reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array
from tests.llm.tiny_decoder import CONTEXT, VOCABULARY, write_folder

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 128, 4, 2, 32
QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE


def grouped_model(layers: int = 2, *, rotary: str = "inside", shares: bool = False) -> onnx.ModelProto:
    """Return a decoder of attention and residual additions, with caches of (batch, 2, length, a symbol).

    Args:
        rotary: "inside" GroupQueryAttention, "interleaved" inside it, "partial" (half of each head), "before" it by
            RotaryEmbedding, or "none".
        shares: the second layer also reads the keys of the first.
    """
    random = np.random.default_rng(0)
    rotated = HEAD_SIZE // 2 if rotary == "partial" else HEAD_SIZE
    angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-np.arange(0, rotated, 2) / rotated)
    stored: dict[str, Array] = {
        "embedding": random.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float32),
        "head": random.normal(0, 0.3, (HIDDEN, VOCABULARY)).astype(np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "one": np.array([1], np.int64),
        "last": np.array(1, np.int64),
    }
    nodes: list[onnx.NodeProto] = []

    def add(op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> None:
        nodes.append(helper.make_node(op, inputs, outputs, name=f"n_{outputs[0]}", domain=domain, **attributes))

    add("ReduceSum", ["attention_mask", "one"], ["sum"], keepdims=0)
    add("Sub", ["sum", "last"], ["before"])
    add("Cast", ["before"], ["lengths"], to=TensorProto.INT32)
    add("Shape", ["attention_mask"], ["shape"])
    add("Gather", ["shape", "last"], ["total0"])
    add("Cast", ["total0"], ["total"], to=TensorProto.INT32)
    add("Gather", ["embedding", "input_ids"], ["x0"])
    for layer in range(layers):
        stored[f"qkv{layer}"] = random.normal(0, HIDDEN**-0.5, (HIDDEN, QKV)).astype(np.float32)
        stored[f"o{layer}"] = random.normal(0, HIDDEN**-0.5, (HIDDEN, HIDDEN)).astype(np.float32)
        add("MatMul", [f"x{layer}", f"qkv{layer}"], [f"p{layer}"])
        query, tables = [f"p{layer}", "", ""], ["cos", "sin"]
        settings = {"do_rotary": 1, "rotary_interleaved": int(rotary == "interleaved")}
        if rotary in ("before", "none"):
            stored["sizes"] = np.array([HEADS, KV_HEADS, KV_HEADS], np.int64) * HEAD_SIZE
            query = [f"{part}{layer}" for part in "qkv"]
            add("Split", [f"p{layer}", "sizes"], query, axis=2)
            settings, tables = {}, ["", ""]
            for part in "qk" if rotary == "before" else "":
                heads = {"num_heads": HEADS if part == "q" else KV_HEADS, "rotary_embedding_dim": HEAD_SIZE}
                inputs = [f"{part}{layer}", "position_ids", "cos", "sin"]
                add("RotaryEmbedding", inputs, [f"{part}r{layer}"], "com.microsoft", **heads)
            query = [query[0], query[1], query[2]] if rotary == "none" else [f"qr{layer}", f"kr{layer}", f"v{layer}"]
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        inputs = [*query, *past, "lengths", "total", *tables]
        heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
        add("GroupQueryAttention", inputs, [f"a{layer}", *present], "com.microsoft", **heads, **settings)
        add("MatMul", [f"a{layer}", f"o{layer}"], [f"y{layer}"])
        add("Add", [f"x{layer}", f"y{layer}"], [f"x{layer + 1}"])
    if shares:
        add("ReduceMax", ["present.0.key"], ["largest"], keepdims=0)
        add("Mul", [f"x{layers}", "largest"], ["scaled"])
    add("MatMul", ["scaled" if shares else f"x{layers}", "head"], ["logits"])
    floats, whole = TensorProto.FLOAT, TensorProto.INT64
    info = helper.make_tensor_value_info
    caches = [(layer, kind) for layer in range(layers) for kind in ("key", "value")]
    positions = [info("position_ids", whole, ["batch", "length"])] if rotary == "before" else []
    graph = helper.make_graph(
        nodes,
        "grouped",
        [
            info("input_ids", whole, ["batch", "length"]),
            info("attention_mask", whole, ["batch", "total"]),
            *positions,
            *(info(f"past_key_values.{at}.{kind}", floats, ["batch", KV_HEADS, "past", "size"]) for at, kind in caches),
        ],
        [
            info("logits", floats, ["batch", "length", VOCABULARY]),
            *(info(f"present.{at}.{kind}", floats, ["batch", KV_HEADS, "total", "size"]) for at, kind in caches),
        ],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def write_grouped_folder(folder: Path, model: onnx.ModelProto | None = None) -> Path:
    """Write a folder in the form of onnxruntime-genai."""
    write_folder(folder, grouped_model() if model is None else model)
    (folder / "config.json").unlink()
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "model.onnx",
        "head_size": HEAD_SIZE,
        "hidden_size": HIDDEN,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
        "outputs": {"logits": "logits"},
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    sizes = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    config = {"model": {**sizes, "decoder": decoder, "type": "llama"}, "search": {"past_present_share_buffer": True}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


def attend(query: Array, keys: Array, values: Array) -> Array:
    """Causal attention of one sequence in float64.

    Args:
        query: of the last positions, (heads, length, size).
        keys, values: of all positions, (kv heads, total, size).
    """
    length, total = query.shape[1], keys.shape[1]
    keys, values = (np.repeat(each, HEADS // KV_HEADS, axis=0) for each in (keys, values))
    scores = np.einsum("hqd,hkd->hqk", query, keys) * HEAD_SIZE**-0.5
    scores[:, np.arange(total) > np.arange(total - length, total)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: Array = np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), values)
    return found


def rotate(heads: Array, begin: int = 0) -> Array:
    """Rotate halves of heads, (heads, length, size), for positions from `begin`."""
    half = HEAD_SIZE // 2
    angles = np.arange(begin, begin + heads.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    low, high = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
