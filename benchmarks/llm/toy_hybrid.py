"""A small trained hybrid of attention and linear attention: `python -m benchmarks.llm.toy_hybrid FOLDER`.

The decoder of the pack (`classics_llama`) with a causal convolution and a gated linear attention in place of the
attention of `RECURRENT`, trained as `benchmarks.llm.toy_mixture`. Its caches are keys and values of the other blocks,
and states of fixed size (`conv_state`, `recurrent_state`) of these. FOLDER gets the decoder in the form of optimum.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.llm.toy_mixture import (
    CACHED,
    HEAD,
    HEADS,
    HIDDEN,
    Weights,
    attention,
    float_weights,
    logits_of,
    mlp,
    train,
    training_windows,
)
from benchmarks.results import PACK
from sbonnx.spec import Array

RECURRENT: Final = (0, 2)
"""Blocks with linear attention."""

TAPS: Final = 4
CHANNELS: Final = (HEADS + 2 * CACHED) * HEAD
CONTEXT: Final = 4096
"""Positions of the rotary tables of the file, of which 192 are trained."""

LASTING: Final = 3.0
"""First logit of the decay: a state keeps 0.95 of itself from token to token."""


def linear_attention(x: Any, weights: Weights, layer: int) -> Any:
    """Compute the convolution and the gated linear attention of a block, or the attention of the others."""
    import torch
    from torch.nn import functional

    if layer not in RECURRENT:
        return attention(x, weights, layer)
    batch, length, _ = x.shape
    wide = (x @ weights[f"layers.{layer}.attn.qkv_proj.MatMul.weight"]).transpose(1, 2)
    wide = functional.conv1d(functional.pad(wide, (TAPS - 1, 0)), weights[f"layers.{layer}.conv"], groups=CHANNELS)
    q, k, v = functional.silu(wide).view(batch, -1, HEAD, length).transpose(2, 3).split([HEADS, CACHED, CACHED], dim=1)
    decay = functional.logsigmoid(x @ weights[f"layers.{layer}.decay"] + weights[f"layers.{layer}.decay_bias"])
    summed = decay.transpose(1, 2).cumsum(-1)
    past = torch.ones(length, length, dtype=torch.bool).tril()
    kept = (summed[..., :, None] - summed[..., None, :]).masked_fill(~past, -torch.inf).exp()
    k, v, kept = (part.repeat_interleave(HEADS // CACHED, dim=1) for part in (k, v, kept))
    y = ((q @ k.transpose(2, 3)) * HEAD**-0.5 * kept) @ v
    return y.transpose(1, 2).reshape(batch, length, -1) @ weights[f"layers.{layer}.attn.o_proj.MatMul.weight"]


def initial(weights: dict[str, Array]) -> dict[str, Array]:
    """Add the weights of convolutions, which begin as the identity, and decays."""
    added = dict(weights)
    for layer in RECURRENT:
        added[f"layers.{layer}.conv"] = np.tile(np.array([0, 0, 0, 1], np.float32), (CHANNELS, 1, 1))
        added[f"layers.{layer}.decay"] = np.zeros((HIDDEN, CACHED), np.float32)
        added[f"layers.{layer}.decay_bias"] = np.full(CACHED, LASTING, np.float32)
    return added


def rotary_tables(weights: dict[str, Array]) -> dict[str, Array]:
    """Return tables of `CONTEXT` positions."""
    angles = np.arctan2(weights["sin_cache"][1], weights["cos_cache"][1]).astype(np.float64)
    turns = np.arange(CONTEXT)[:, None] * angles
    return {"cos_cache": np.cos(turns).astype(np.float32), "sin_cache": np.sin(turns).astype(np.float32)}


def hybrid(model: onnx.ModelProto, weights: dict[str, Array]) -> onnx.ModelProto:
    """Return the float decoder with these weights, and linear attention in some blocks."""
    written = onnx.ModelProto()
    written.CopyFrom(model)
    graph = written.graph
    del graph.node[:], graph.initializer[:], graph.input[:], graph.output[:]
    replaced = tuple(f".{layer}.{kind}" for layer in RECURRENT for kind in ("key", "value"))
    graph.input.extend(value for value in model.graph.input if not value.name.endswith(replaced))
    graph.output.extend(value for value in model.graph.output if not value.name.endswith(replaced))
    shapes = {"conv_state": (CHANNELS, TAPS - 1), "recurrent_state": (CACHED, HEAD, HEAD)}
    for layer in RECURRENT:
        for kind, shape in shapes.items():
            for values, name in ((graph.input, "past_key_values"), (graph.output, "present")):
                named = f"{name}.{layer}.{kind}"
                values.append(helper.make_tensor_value_info(named, TensorProto.FLOAT, ["batch_size", *shape]))
    constants = {**weights, **rotary_tables(weights)}
    plain = ("cos_cache", "sin_cache", "lm_head.MatMul.weight")
    for node in model.graph.node:
        layer = int(node.name.split("layers.")[1].split("/")[0]) if "layers." in node.name else -1
        if node.op_type == "GroupQueryAttention" and layer in RECURRENT:
            graph.node.extend(_recurrence(node, layer))
        else:
            graph.node.append(node)
    constants["sizes"] = np.array([HEADS * HEAD, CACHED * HEAD, CACHED * HEAD])
    for name, values in constants.items():
        named = name if name in (*plain, "sizes") else f"model.{name}"
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), named))
    return written


def _recurrence(node: onnx.NodeProto, layer: int) -> list[onnx.NodeProto]:
    """Return the nodes in place of the attention of a block."""
    stem = f"/model/layers.{layer}/linear"
    nodes: list[onnx.NodeProto] = []

    def add(op: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        name = f"{stem}/{op}_{len(nodes)}"
        domain = "com.microsoft" if op in ("CausalConvWithState", "LinearAttention") else ""
        named = outputs or (f"{name}/output_0",)
        nodes.append(helper.make_node(op, inputs, named, name, domain=domain, **attributes))
        return named[0]

    prefix, past = f"model.layers.{layer}", f"past_key_values.{layer}"
    turned = add("Transpose", node.input[0], perm=[0, 2, 1])
    conv = (f"{stem}/conv", f"present.{layer}.conv_state")
    add(
        "CausalConvWithState",
        *(turned, f"{prefix}.conv", "", f"{past}.conv_state"),
        outputs=conv,
        activation="silu",
        ndim=1,
    )
    parts = tuple(f"{stem}/{name}" for name in "qkv")
    add("Split", add("Transpose", conv[0], perm=[0, 2, 1]), "sizes", outputs=parts, axis=2)
    x = f"/model/layers.{layer}/input_layernorm/output_0"
    scores = add("Add", add("MatMul", x, f"{prefix}.decay"), f"{prefix}.decay_bias")
    decay = add("Neg", add("Softplus", add("Neg", scores)))
    add(
        "LinearAttention",
        *(*parts, f"{past}.recurrent_state", decay),
        outputs=(node.output[0], f"present.{layer}.recurrent_state"),
        q_num_heads=HEADS,
        kv_num_heads=CACHED,
        update_rule="gated",
        scale=HEAD**-0.5,
    )
    return nodes


def main() -> int:
    """Train the hybrid, and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    target = parser.parse_args().folder
    source = PACK / "classics_llama"
    model = onnx.load(source / "genai" / "model.onnx")
    weights = float_weights(model)

    def logits(ids: Any, some: Weights, _: list[Any]) -> Any:
        return logits_of(ids, some, mlp, linear_attention)

    trained = train(weights, initial(weights), logits, training_windows(source / "genai"))
    shutil.copytree(source / "optimum", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.onnx*"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    onnx.save(hybrid(model, trained), target / "model.onnx")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
