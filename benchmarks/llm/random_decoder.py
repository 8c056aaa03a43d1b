"""Decoders of any size with random weights, as folders of onnxruntime-genai with external data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from sbonnx.spec import Array

ALIGNMENT: Final = 4096
"""Each tensor of the data file starts at a multiple of this, as in files of the builder."""


@dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder in the layout of Llama: RMSNorm, grouped attention with rotary positions, gated MLP.

    Attributes:
        hidden, inner: width of the residual stream and of the MLP.
        layers: number of blocks.
        heads, kv_heads: of queries, and of keys and values; a head has `hidden` / `heads` channels.
        vocabulary, context: in tokens.
        half: weights, caches and logits are float16.
    """

    hidden: int = 1024
    inner: int = 3072
    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 8192
    context: int = 512
    half: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def dtype(self) -> Any:
        return np.float16 if self.half else np.float32


class _Writer:
    """Nodes of a graph, and weights in a data file: one weight is in memory at a time."""

    def __init__(self, size: DecoderSize, path: Path) -> None:
        self.size = size
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._path = path
        self._random = np.random.default_rng(0)

    def node(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, f"/{outputs[0]}/{op}", domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str, values: Array) -> str:
        with self._path.open("ab") as file:
            file.write(bytes(-file.tell() % ALIGNMENT))
            tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=values.shape)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": self._path.name, "offset": file.tell(), "length": values.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(values.tobytes())
        self.weights.append(tensor)
        return name

    def matrix(self, name: str, rows: int, columns: int, scale: float | None = None) -> str:
        values = self._random.standard_normal((rows, columns), np.float32)
        values *= rows**-0.5 if scale is None else scale
        return self.weight(name, values.astype(self.size.dtype))

    def norm(self, name: str) -> str:
        return self.weight(name, np.ones(self.size.hidden, self.size.dtype))

    def product(self, data: str, name: str, rows: int, columns: int) -> str:
        return self.node("MatMul", [data, self.matrix(f"{name}.weight", rows, columns)], [f"{name}/out"])


def write_random_decoder(folder: Path, size: DecoderSize) -> Path:
    """Write model, external data and configuration, without a tokenizer; return the folder."""
    folder.mkdir()
    writer = _Writer(size, folder / "model.onnx.data")
    _lengths(writer)
    angles = np.outer(np.arange(size.context), 1e4 ** -(np.arange(0, size.head_size, 2) / size.head_size))
    for name, table in (("cos_cache", np.cos(angles)), ("sin_cache", np.sin(angles))):
        writer.weight(name, table.astype(size.dtype))
    table = writer.matrix("embed_tokens.weight", size.vocabulary, size.hidden, 1.0)
    stream = writer.node("Gather", [table, "input_ids"], ["embed_tokens/out"])
    normed = writer.node(
        "SimplifiedLayerNormalization", [stream, writer.norm("first_norm")], ["first_norm/out"], epsilon=1e-6
    )
    for layer in range(size.layers):
        stream, normed = _block(writer, layer, stream, normed)
    writer.node("MatMul", [normed, writer.matrix("lm_head.weight", size.hidden, size.vocabulary)], ["logits"])
    onnx.save(_model(writer), folder / "model.onnx")
    (folder / "genai_config.json").write_text(json.dumps(_config(size)))
    return folder


def _lengths(writer: _Writer) -> None:
    """Compute the lengths that GroupQueryAttention reads from the mask."""
    for name, values in (("axis", np.array([1], np.int64)), ("one", np.array([1], np.int64))):
        writer.weights.append(onnx.numpy_helper.from_array(values, name))
    writer.weights.append(onnx.numpy_helper.from_array(np.array(1, np.int64), "second"))
    writer.node("ReduceSum", ["attention_mask", "axis"], ["tokens_0"], keepdims=0)
    writer.node("Sub", ["tokens_0", "one"], ["tokens_1"])
    writer.node("Cast", ["tokens_1"], ["lengths"], to=TensorProto.INT32)
    writer.node("Shape", ["attention_mask"], ["mask_shape"])
    writer.node("Gather", ["mask_shape", "second"], ["total_0"], axis=0)
    writer.node("Cast", ["total_0"], ["total"], to=TensorProto.INT32)


def _block(writer: _Writer, layer: int, stream: str, normed: str) -> tuple[str, str]:
    size, at = writer.size, f"layers.{layer}"
    width = (size.heads + 2 * size.kv_heads) * size.head_size
    qkv = writer.product(normed, f"{at}.qkv_proj", size.hidden, width)
    past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
    present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
    attention = writer.node(
        "GroupQueryAttention",
        [qkv, "", "", *past, "lengths", "total", "cos_cache", "sin_cache"],
        [f"{at}.attention/out", *present],
        "com.microsoft",
        num_heads=size.heads,
        kv_num_heads=size.kv_heads,
        do_rotary=1,
        scale=size.head_size**-0.5,
    )
    added = writer.product(attention, f"{at}.o_proj", size.hidden, size.hidden)
    stream, normed = _skip(writer, f"{at}.mlp_norm", stream, added)
    gate = writer.product(normed, f"{at}.gate_proj", size.hidden, size.inner)
    up = writer.product(normed, f"{at}.up_proj", size.hidden, size.inner)
    sigmoid = writer.node("Sigmoid", [gate], [f"{at}.sigmoid/out"])
    silu = writer.node("Mul", [gate, sigmoid], [f"{at}.silu/out"])
    gated = writer.node("Mul", [silu, up], [f"{at}.gated/out"])
    return _skip(writer, f"{at}.last_norm", stream, writer.product(gated, f"{at}.down_proj", size.inner, size.hidden))


def _skip(writer: _Writer, name: str, stream: str, added: str) -> tuple[str, str]:
    """Add to the residual stream and normalize it; return both."""
    outputs = [f"{name}/out", "", "", f"{name}/stream"]
    inputs = [stream, added, writer.norm(name)]
    normed = writer.node("SkipSimplifiedLayerNormalization", inputs, outputs, "com.microsoft", epsilon=1e-6)
    return outputs[3], normed


def _model(writer: _Writer) -> onnx.ModelProto:
    size, floats = writer.size, helper.np_dtype_to_tensor_dtype(np.dtype(writer.size.dtype))
    info, head = helper.make_tensor_value_info, size.head_size
    caches = [(layer, kind) for layer in range(size.layers) for kind in ("key", "value")]

    def cache(name: str, length: str) -> onnx.ValueInfoProto:
        return info(name, floats, ["batch", size.kv_heads, length, head])

    graph = helper.make_graph(
        writer.nodes,
        "random_decoder",
        [
            info("input_ids", TensorProto.INT64, ["batch", "length"]),
            info("attention_mask", TensorProto.INT64, ["batch", "total_length"]),
            *(cache(f"past_key_values.{layer}.{kind}", "past_length") for layer, kind in caches),
        ],
        [
            info("logits", floats, ["batch", "length", size.vocabulary]),
            *(cache(f"present.{layer}.{kind}", "total_length") for layer, kind in caches),
        ],
        writer.weights,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _config(size: DecoderSize) -> dict[str, Any]:
    decoder = {
        "filename": "model.onnx",
        "head_size": size.head_size,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    sizes = {"vocab_size": size.vocabulary, "context_length": size.context, "bos_token_id": 0, "eos_token_id": 1}
    return {"model": {**sizes, "type": "llama", "decoder": decoder}}
