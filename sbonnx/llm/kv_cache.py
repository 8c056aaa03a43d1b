"""Quantization of key/value caches: scales from the float decoder, attention that stores integers.

Supported: GroupQueryAttention of onnxruntime (1.28 or newer on the CPU), with its caches as inputs and outputs of the
model, 8 bits (int8) or 4 bits (uint8, two values in a byte).
Refused: other attention, caches that are quantized already, caches that other operators read.

With the scale s of a channel, the kernel stores q = clip(round(x / s), -2^(b-1), 2^(b-1) - 1) of every new key and
value, also in prefill, and computes attention from s q. At 4 bits a byte has q + 8 of an even channel in its low half,
and that of the next channel in its high half. Keys are stored after rotation.

Source: docs/ContribOperators.md (GroupQueryAttention) and docs/contrib_ops/cpu/gqa.md of onnxruntime. Keys per channel:
Hooper et al. 2024, "KVQuant", section 3.1; one scale for a rotated pair, and the search of ranges, are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from sbonnx.errors import DeviceError, ModelError, NumericError
from sbonnx.graph import read_proto
from sbonnx.graph.protos import domain_of, node_protos, sort_protos
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import CACHE_WIDTH, CacheTensor, Decoder
from sbonnx.llm.structure import ATTENTION, MOVES
from sbonnx.ops import CONTRIB
from sbonnx.spec import Array
from sbonnx.system.runtime import version

OPERATOR: Final = "GroupQueryAttention"
OLDEST_KERNEL: Final = (1, 28)
"""First version of onnxruntime whose CPU kernel stores quantized caches."""

KEY, PAST_KEY, PAST_VALUE, COS, KEY_SCALE, VALUE_SCALE = 1, 3, 4, 7, 12, 13
PRESENT_KEY, PRESENT_VALUE = 1, 2
"""Positions in the inputs and outputs of GroupQueryAttention."""

COS_OF_ROTARY: Final = {CONTRIB: 2, "": 1}
"""Position of the table of cosines in the inputs of RotaryEmbedding, by domain."""

STORED_TYPES: Final[dict[int, int]] = {8: TensorProto.INT8, 4: TensorProto.UINT8}
"""Element type of a cache by its bits."""

PER_BYTE: Final = {8: 1, 4: 2}
"""Values in a byte, by the bits of a cache."""

CLIPS: Final = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the bound of a channel that are tried as its range."""

POWER: Final = 3
"""Power of the error that ranges are searched with. Squares clip too much: outliers decide where attention looks."""

FIX: Final = "export it with the model builder of onnxruntime-genai, or leave out --kv (LLM.KV_BITS)"


@dataclass(frozen=True)
class CachedAttention:
    """Attention of one layer.

    Attributes:
        key, value: its caches.
        partner: for each channel of a key, the channel that it rotates with; itself for channels that do not rotate,
            int64 (head size,).
    """

    key: CacheTensor
    value: CacheTensor
    partner: Array


def read_attention(decoder: Decoder) -> tuple[CachedAttention, ...]:
    """Find the attention of each layer whose caches can be quantized.

    Raises:
        ModelError: the decoder has no caches, they are quantized already, or the attention of a layer is not
            GroupQueryAttention that reads and writes them directly.
        DeviceError: onnxruntime is too old.
    """
    if not decoder.cache:
        raise ModelError(f"'{decoder.model}' has no caches to quantize: leave out --kv (LLM.KV_BITS)")
    first = decoder.cache[0]
    if first.dtype.kind in "iu":
        raise ModelError(
            f"the caches of '{decoder.model}' are quantized already ('{first.past}' has {first.bits} bits): leave out "
            "--kv (LLM.KV_BITS)"
        )
    if version() < OLDEST_KERNEL:
        installed, needed = (".".join(map(str, pair)) for pair in (version(), OLDEST_KERNEL))
        raise DeviceError(f"onnxruntime {installed} has no kernel for quantized caches: install {needed} or newer")
    graph = read_proto(decoder.model).graph
    sort_protos(graph)
    return tuple(_layer(decoder, graph, key, value) for key, value in _by_layer(decoder.cache))


def quantize_caches(path: Path, decoder: Decoder, ids: Array, bits: int) -> None:
    """Quantize the caches of a model file, with scales from the float decoder.

    Args:
        path: a decoder with the inputs and outputs of `decoder`, such as `decoder` with quantized weights; changed in
            place. Its external data is not touched.
        decoder: the float decoder.
        ids: windows of tokens to measure on, int64 (windows, length).
        bits: 8 or 4.

    Raises:
        ModelError, DeviceError: see `read_attention`.
        DataError: the decoder cannot run the tokens.
        NumericError: a cache is not finite.
        OSError: the file cannot be written.
    """
    layers = read_attention(decoder)
    scales = cache_scales(decoder, layers, ids, bits)
    model = read_proto(path)
    write_scales(model, layers, scales, bits)
    path.write_bytes(model.SerializeToString())


def cache_scales(decoder: Decoder, layers: Sequence[CachedAttention], ids: Array, bits: int) -> dict[str, Array]:
    """Return the scale of each channel of the caches, by past input.

    Of the bounds of `cache_bounds` times each of `CLIPS`, the range with the least error to the power of `POWER` is
    taken, summed over the channel, or over both channels of a rotated pair.

    Args:
        ids: int64 (windows, length); run twice.
        bits: 8 or 4.

    Returns:
        float32, (heads, head size), above 0.

    Raises:
        DataError, NumericError: see `cache_bounds`.
    """
    top = 2 ** (bits - 1) - 1
    bounds = cache_bounds(decoder, layers, ids)
    grids = {
        past: np.multiply.outer(np.asarray(CLIPS, np.float32), bound / top)[..., None, :]
        for past, bound in bounds.items()
    }
    errors = {past: np.zeros((len(CLIPS), *bound.shape)) for past, bound in bounds.items()}
    session = DecoderSession(decoder)
    for window in ids:
        for past, stored in session.prefill(window[None]).items():
            values = np.asarray(stored[0], np.float32)
            for scale, error in zip(grids[past], errors[past], strict=True):
                codes = np.clip(np.rint(values / scale), -top - 1, top)
                error += np.power(np.abs(codes * scale - values), POWER).sum(1)
    for layer in layers:
        errors[layer.key.past] += errors[layer.key.past][..., layer.partner]
    return {
        past: np.take_along_axis(grid[..., 0, :], errors[past].argmin(0)[None], axis=0)[0]
        for past, grid in grids.items()
    }


def cache_bounds(decoder: Decoder, layers: Sequence[CachedAttention], ids: Array) -> dict[str, Array]:
    """Return the largest absolute value of each channel of the caches, by past input.

    Channels of keys that rotate into each other get the largest norm of the pair: at other positions, which a short
    window does not have, either may reach it. A channel that is always 0 gets the largest bound of its head.

    Args:
        ids: int64 (windows, length).

    Returns:
        float32, (heads, head size), above 0.

    Raises:
        DataError: the decoder cannot run the tokens.
        NumericError: a cache is not finite.
    """
    session = DecoderSession(decoder)
    partners = {layer.key.past: layer.partner for layer in layers}
    bounds = {tensor.past: np.zeros((tensor.heads, tensor.width), np.float32) for tensor in decoder.cache}
    for window in ids:
        for past, values in session.prefill(window[None]).items():
            magnitudes = np.abs(np.asarray(values, np.float32))
            partner = partners.get(past)
            if partner is not None:
                rotates = partner != np.arange(len(partner))
                magnitudes = np.hypot(magnitudes, np.where(rotates, magnitudes[..., partner], 0))
            np.maximum(bounds[past], magnitudes.max((0, 2)), out=bounds[past])
    for past, bound in bounds.items():
        if not np.isfinite(bound).all():
            raise NumericError(
                f"cache '{past}' of '{decoder.model}' has values that are not finite on these texts: leave out --kv "
                "(LLM.KV_BITS), or check the model"
            )
    return {past: _positive(bound) for past, bound in bounds.items()}


def _positive(bound: Array) -> Array:
    largest = bound.max(-1, keepdims=True)
    return np.where(bound > 0, bound, np.where(largest > 0, largest, 1)).astype(np.float32)


def write_scales(
    model: onnx.ModelProto, layers: Sequence[CachedAttention], scales: Mapping[str, Array], bits: int
) -> None:
    """Let the attention of a model read and write quantized caches. In place.

    Args:
        scales: by past input, float32 (heads, head size).
        bits: 8 or 4.
    """
    graph = model.graph
    nodes = {node.input[PAST_KEY]: node for node in graph.node if _is_attention(node)}
    values = {value.name: value for value in (*graph.input, *graph.output)}
    taken = {name for node in node_protos(graph) for name in (*node.input, *node.output)}
    taken |= {tensor.name for tensor in graph.initializer} | values.keys()
    for layer in layers:
        node = nodes[layer.key.past]
        inputs = [*node.input, *[""] * (VALUE_SCALE + 1 - len(node.input))]
        for place, cache in ((KEY_SCALE, layer.key), (VALUE_SCALE, layer.value)):
            scale = scales[cache.past].reshape(1, cache.heads, 1, cache.width)
            inputs[place] = _fresh(f"{cache.past}_scale", taken)
            graph.initializer.append(numpy_helper.from_array(np.asarray(scale, np.float32), inputs[place]))
            for name in (cache.past, cache.present):
                _set_type(values[name], cache, bits)
        del node.input[:]
        node.input.extend(inputs)
        settings = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": bits}
        others = [attribute for attribute in node.attribute if attribute.name not in settings]
        del node.attribute[:]
        node.attribute.extend([*others, *(onnx.helper.make_attribute(*pair) for pair in settings.items())])


def _fresh(stem: str, taken: set[str]) -> str:
    """Return a name that is not taken, and take it."""
    name = stem
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _set_type(value: onnx.ValueInfoProto, cache: CacheTensor, bits: int) -> None:
    """Set the stored type of a cache; its last axis is bytes."""
    value.type.tensor_type.elem_type = STORED_TYPES[bits]
    value.type.tensor_type.shape.dim[CACHE_WIDTH].dim_value = cache.width // PER_BYTE[bits]


def _is_attention(node: NodeProto) -> bool:
    return node.op_type == OPERATOR and domain_of(node) == CONTRIB


def _by_layer(caches: Sequence[CacheTensor]) -> Iterator[tuple[CacheTensor, CacheTensor]]:
    """Yield keys and values of each layer."""
    by_kind = {(tensor.layer, tensor.kind): tensor for tensor in caches}
    for layer in dict.fromkeys(tensor.layer for tensor in caches):
        yield by_kind[layer, "key"], by_kind[layer, "value"]


def _layer(decoder: Decoder, graph: GraphProto, key: CacheTensor, value: CacheTensor) -> CachedAttention:
    """Return the attention of a layer.

    Raises:
        ModelError: its caches cannot be quantized.
    """
    where = f"layer {key.layer} of '{decoder.model}'"
    node = _reader(graph, key.past)
    if node is None or not _is_attention(node):
        operator = "unknown operators" if node is None else f"{node.op_type} '{node.name}'"
        raise ModelError(
            f"{where} computes attention with {operator}, and onnxruntime quantizes caches of {OPERATOR} only: {FIX}"
        )
    caches = {PAST_KEY: key.past, PAST_VALUE: value.past}
    presents = {PRESENT_KEY: key.present, PRESENT_VALUE: value.present}
    direct = all(_at(node.input, place) == name for place, name in caches.items())
    if not direct or any(_at(node.output, place) != name for place, name in presents.items()):
        raise ModelError(
            f"{where}: caches are no direct inputs and outputs of {OPERATOR} '{node.name}', so they stay float: {FIX}"
        )
    shared = {*caches.values(), *presents.values()}
    for other in node_protos(graph):
        names = sorted(shared.intersection(other.input))
        if names and list(other.output) != list(node.output):
            raise ModelError(
                f"{where}: {other.op_type} '{other.name}' reads the cache '{names[0]}' too, so it stays float: leave "
                "out --kv (LLM.KV_BITS)"
            )
    return CachedAttention(key, value, _partners(graph, node, key.width))


def _at(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else ""


def _reader(graph: GraphProto, past: str) -> NodeProto | None:
    """Return the first attention operator that depends on a cache; bodies included."""
    reached = {past}
    for node in node_protos(graph):
        if reached.intersection(node.input):
            if node.op_type in ATTENTION:
                return node
            reached.update(node.output)
    return None


def _partners(graph: GraphProto, node: NodeProto, width: int) -> Array:
    """Return the channel that each channel of a key rotates with; see `CachedAttention`.

    Rotation is known inside GroupQueryAttention and in RotaryEmbedding before it. Channels that other operators rotate
    have no partner.
    """
    partner = np.arange(width)
    if _attribute(node, "do_rotary"):
        table, interleaved = _at(node.input, COS), _attribute(node, "rotary_interleaved")
    else:
        producers = {name: producer for producer in graph.node for name in producer.output}
        source = producers.get(_at(node.input, KEY))
        while source is not None and source.op_type in MOVES:
            source = producers.get(source.input[0])
        if source is None or source.op_type != "RotaryEmbedding":
            return partner
        table = _at(source.input, COS_OF_ROTARY.get(domain_of(source), -1))
        interleaved = _attribute(source, "interleaved")
    sizes = next((tensor.dims for tensor in graph.initializer if tensor.name == table), (0, width // 2))
    rotated = 2 * sizes[-1]
    half = np.arange(rotated)
    partner[:rotated] = half ^ 1 if interleaved else (half + rotated // 2) % rotated
    return partner


def _attribute(node: NodeProto, name: str) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), 0)
