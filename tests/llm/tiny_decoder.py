"""A small decoder with caches, as onnx nodes, and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array

WORDS = ["<s>", "</s>", *(f"w{number}" for number in range(62))]
VOCABULARY, WIDTH, LAYERS, CONTEXT = len(WORDS), 32, 2, 64


def decoder_model(
    *, tied: bool = False, names: str = "past_key_values.{}.{}", forgets: bool = False
) -> onnx.ModelProto:
    """Two layers of causal attention with one head and residual additions.

    Args:
        tied: the head reads the embedding's table through a Transpose.
        names: of cache inputs, by layer and kind.
        forgets: a wrong export: attention does not see the cache.
    """
    random = np.random.default_rng(0)
    stored: dict[str, Array] = {"embedding": random.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32)}
    nodes = []

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=f"n_{output}", **attributes))
        return output

    stored |= {"one": np.array([1], np.int64), "step": np.array(1, np.int64), "none": np.array(0, np.int64)}
    stored["low"] = np.array(-1e9, np.float32)
    stored["root"] = np.array(WIDTH**-0.5, np.float32)
    add("Gather", ["embedding", "input_ids"], "x0")
    for layer in range(LAYERS):
        at, past = f"l{layer}", {kind: names.format(layer, kind) for kind in ("key", "value")}
        for part in ("q", "k", "v", "o"):
            stored[f"{at}_w{part}"] = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        for part in ("q", "k", "v"):
            add("MatMul", [f"x{layer}", f"{at}_w{part}"], f"{at}_{part}0")
            add("Unsqueeze", [f"{at}_{part}0", "one"], f"{at}_{part}")
        for part, kind in (("k", "key"), ("v", "value")):
            add("Concat", [past[kind], f"{at}_{part}"], f"present.{layer}.{kind}", axis=2)
        key, value = (f"{at}_k", f"{at}_v") if forgets else (f"present.{layer}.key", f"present.{layer}.value")
        add("Transpose", [key], f"{at}_kt", perm=[0, 1, 3, 2])
        add("MatMul", [f"{at}_q", f"{at}_kt"], f"{at}_s0")
        add("Mul", [f"{at}_s0", "root"], f"{at}_s1")
        add("Shape", [f"{at}_s1"], f"{at}_shape")
        for axis, place in (("rows", 2), ("columns", 3)):
            stored[f"axis{place}"] = np.array(place, np.int64)
            add("Gather", [f"{at}_shape", f"axis{place}"], f"{at}_{axis}")
        add("Range", ["none", f"{at}_columns", "step"], f"{at}_kpos")
        add("Sub", [f"{at}_columns", f"{at}_rows"], f"{at}_begin")
        add("Range", [f"{at}_begin", f"{at}_columns", "step"], f"{at}_qpos0")
        add("Unsqueeze", [f"{at}_qpos0", "one"], f"{at}_qpos")
        add("LessOrEqual", [f"{at}_kpos", f"{at}_qpos"], f"{at}_seen")
        add("Where", [f"{at}_seen", f"{at}_s1", "low"], f"{at}_s2")
        add("Softmax", [f"{at}_s2"], f"{at}_p", axis=-1)
        add("MatMul", [f"{at}_p", value], f"{at}_y0")
        add("Squeeze", [f"{at}_y0", "one"], f"{at}_y1")
        add("MatMul", [f"{at}_y1", f"{at}_wo"], f"{at}_y")
        add("Add", [f"x{layer}", f"{at}_y"], f"x{layer + 1}")
    if tied:
        add("Transpose", ["embedding"], "head", perm=[1, 0])
    else:
        stored["head"] = random.normal(0, 0.5, (WIDTH, VOCABULARY)).astype(np.float32)
    add("MatMul", [f"x{LAYERS}", "head"], "logits")
    floats, whole = TensorProto.FLOAT, TensorProto.INT64
    info = helper.make_tensor_value_info
    caches = [(layer, kind) for layer in range(LAYERS) for kind in ("key", "value")]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [
            info("input_ids", whole, ["batch", "length"]),
            *(info(names.format(layer, kind), floats, ["batch", 1, "past", WIDTH]) for layer, kind in caches),
        ],
        [
            info("logits", floats, ["batch", "length", VOCABULARY]),
            *(info(f"present.{layer}.{kind}", floats, ["batch", 1, "total", WIDTH]) for layer, kind in caches),
        ],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def merged_model(model: onnx.ModelProto, later: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """Return a merged decoder: one If on use_cache_branch, whose branches have the nodes and share the weights.

    Args:
        later: with the nodes of the branch after a past, and the inputs of both; None: `model`.
    """
    outer = model if later is None else later
    bodies = {}
    for branch, inner in (("then", outer.graph), ("else", model.graph)):
        made = {name: f"{branch}_{name}" for node in inner.node for name in node.output}
        nodes = []
        for node in inner.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = f"{branch}_{node.name}"
            copy.input[:] = [made.get(name, name) for name in node.input]
            copy.output[:] = [made[name] for name in node.output]
            nodes.append(copy)
        outputs = [onnx.ValueInfoProto(name=made[each.name], type=each.type) for each in inner.output]
        bodies[f"{branch}_branch"] = helper.make_graph(nodes, branch, [], outputs)
    names, inner = [each.name for each in outer.graph.output], outer.graph
    select = helper.make_node("If", ["use_cache_branch"], names, name="select", **bodies)
    switch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graph = helper.make_graph([select], "merged", [*inner.input, switch], inner.output, inner.initializer)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def write_folder(folder: Path, model: onnx.ModelProto | None = None) -> Path:
    """Write an optimum folder: model, configuration, tokenizer of words, chat template, and another file."""
    folder.mkdir()
    onnx.save(decoder_model() if model is None else model, folder / "model.onnx")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 1, "max_position_embeddings": CONTEXT}
    config = {"model_type": "tiny", "bos_token_id": 0, "eos_token_id": 1, "vocab_size": VOCABULARY, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}{{ bos_token }} {{ m['role'] }} {{ m['content'] }} {% endfor %}"
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(WORDS)}, "unk_token": "</s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "notes.bin").write_bytes(b"other")
    return folder


def token_windows(count: int = 16, length: int = 24, seed: int = 0) -> Array:
    """Random token ids, (count, length)."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, (count, length))


def perplexity(model: Path, ids: Array) -> tuple[float, Array]:
    """Perplexity and logits of windows in one pass each, by onnxruntime and the formula alone."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    empty = {each.name: np.zeros((1, 1, 0, WIDTH), np.float32) for each in session.get_inputs()[1:]}
    losses, every = [], []
    for row in ids:
        logits = session.run(["logits"], {"input_ids": row[None], **empty})[0][0].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-log_p[at, row[at + 1]] for at in range(len(row) - 1)]
        every.append(log_p)
    return float(np.exp(np.mean(losses))), np.stack(every)
