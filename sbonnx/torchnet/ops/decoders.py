"""Ops of onnxruntime in exported decoders: weights packed in blocks, grouped-query attention, RMS norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, number
from sbonnx.torchnet.ops.sequence_layers import attention, rotary_embedding

PACKED_BITS: Final = (2, 4, 8)
"""Widths that fill a byte."""


def matmul_nbits(
    call: Call,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *optional: Tensor | None,
    matrix: Callable[..., Tensor] | None = None,
) -> Tensor:
    """ONNX Runtime MatMulNBits: x (..., K) times the transposed dequantized weight (N, K), plus bias.

    codes: uint8, (N, blocks, bytes of a block). Optional inputs: zero points (packed like the codes, or floats),
    g_idx, bias (N,). The weight is dequantized in the forward pass and again in the backward pass, so that only packed
    values are in memory between them. `matrix` is called instead of `nbits_matrix`, without the call.

    Raises:
        Unfit: other widths than 2, 4 and 8 bits, an order of rows (g_idx), or a layout for one GPU.
    """
    zero_points, order, bias = [*optional, None, None, None][:3]
    if order is not None:
        raise Unfit("g_idx is not supported: store the rows in order")
    if call.integer("weight_prepacked", 0):
        raise Unfit("the weight is stored in the layout of one GPU (weight_prepacked)")

    def product(x: Tensor, codes: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        weight = matrix(codes, scales, zero_points) if matrix else nbits_matrix(call, codes, scales, zero_points)
        return x @ weight.to(x.dtype).transpose(0, 1)

    inputs = (x, codes, scales, zero_points)
    if call.torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        from torch.utils.checkpoint import checkpoint

        y = checkpoint(product, *inputs, use_reentrant=False, preserve_rng_state=False)
    else:
        y = product(*inputs)
    return y if bias is None else y + bias


def nbits_matrix(call: Call, codes: Tensor, scales: Tensor, zero_points: Tensor | None = None) -> Tensor:
    """Return the dequantized weight of a MatMulNBits, (N, K).

    Raises:
        Unfit: other widths than 2, 4 and 8 bits.
    """
    values, shift, scales = nbits_parts(call, codes, scales, zero_points)
    whole = (values.to(scales.dtype) - shift) * scales
    return whole.narrow(-1, 0, call.integer("K", whole.shape[-1]))


def nbits_parts(
    call: Call, codes: Tensor, scales: Tensor, zero_points: Tensor | None = None
) -> tuple[Tensor, Any, Tensor]:
    """Return quantized values, zero points and scales of a MatMulNBits, (N, K in whole blocks); weight: (q - z) * s.

    Raises:
        Unfit: other widths than 2, 4 and 8 bits.
    """
    bits, rows = call.integer("bits", 4), codes.shape[0]
    _require_bits(bits)
    values = _unpacked(call, codes.reshape(rows, -1).to(scales.device), bits)
    scales = scales.reshape(rows, -1)
    shift = _zero_points(call, zero_points, scales, bits, packed=True)
    return values, *_spread(scales, shift, call.integer("block_size", 0), values.shape[-1], -1)


def gather_block_quantized(
    call: Call, codes: Tensor, indices: Tensor, scales: Tensor, zero_points: Tensor | None = None
) -> Tensor:
    """ONNX Runtime GatherBlockQuantized: gather along one axis, and dequantize only what was gathered.

    codes: uint8 with several values a byte along the last axis, or one 4-bit value an element. A missing zero point is
    the middle of the range for packed values, else 0.

    Raises:
        Unfit: other widths than 2, 4 and 8 bits, or blocks along the axis that is gathered.
    """
    bits, block = call.integer("bits", 4), call.integer("block_size", 128)
    _require_bits(bits)
    axis = axis_of(call.integer("gather_axis", 0), codes.dim())
    along = axis_of(call.integer("quantize_axis", 1), codes.dim())
    if axis == along:
        raise Unfit("gather_axis and quantize_axis are the same axis")
    per_byte = 8 // bits
    packed = codes.dtype == call.torch.uint8 and -(-codes.shape[-1] * per_byte // block) == scales.shape[-1]
    rows = indices.reshape(-1).to(scales.device) % codes.shape[axis]

    def picked(tensor: Tensor) -> Tensor:
        return tensor.to(scales.device).index_select(axis, rows)

    values, scales = picked(codes), picked(scales)
    values = _unpacked(call, values, bits) if packed else values
    zeros = None if zero_points is None else picked(zero_points)
    shift = _zero_points(call, zeros, scales, bits, packed=packed)
    result = _dequantized(values, scales, shift, block, along)
    return result.reshape(*codes.shape[:axis], *indices.shape, *result.shape[axis + 1 :])


def _require_bits(bits: int) -> None:
    if bits not in PACKED_BITS:
        raise Unfit(f"weights of {bits} bits are not supported, only of {', '.join(map(str, PACKED_BITS))}")


def _unpacked(call: Call, packed: Tensor, bits: int) -> Tensor:
    """Unpack the values of each byte, lowest bits first: (..., n) → (..., n * 8 / bits)."""
    if bits == 8:
        return packed
    shifts = call.torch.arange(0, 8, bits, dtype=packed.dtype, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _zero_points(call: Call, given: Tensor | None, scales: Tensor, bits: int, *, packed: bool) -> Any:
    """Return the zero points in the shape of the scales, or one number."""
    if given is None:
        return float(1 << (bits - 1)) if packed else 0.0
    lines = given.to(scales.device).reshape(*scales.shape[:-1], -1)
    if packed and given.dtype == call.torch.uint8:
        lines = _unpacked(call, lines, bits).narrow(-1, 0, scales.shape[-1])
    return lines.to(scales.dtype)


def _dequantized(values: Tensor, scales: Tensor, shift: Any, block: int, axis: int) -> Tensor:
    """Compute (values - zero point) * scale, with one scale for `block` values along `axis`."""
    shift, spread = _spread(scales, shift, block, values.shape[axis], axis)
    return (values.to(scales.dtype) - shift) * spread


def _spread(scales: Tensor, shift: Any, block: int, size: int, axis: int) -> tuple[Any, Tensor]:
    """Return zero points (one number stays one) and scales for each of `size` values along `axis`."""
    if not isinstance(shift, float):
        shift = shift.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return shift, scales.repeat_interleave(block, dim=axis).narrow(axis, 0, size)


ATTENTION_INPUTS: Final = (
    *("key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"),
    *("position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight"),
)
"""Inputs of GroupQueryAttention after the query."""

NO_ATTENTION_INPUTS: Final = ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight")
NO_ATTENTION_ATTRIBUTES: Final = {"causal": 1, "qk_output": 0, "sliding_window_cache": 0}
"""Attributes of which only the default is supported."""


def group_query_attention(call: Call, query: Tensor, *optional: Tensor | None) -> tuple[Any, ...]:
    """ONNX Runtime GroupQueryAttention → output (N, T, heads * size), present key, present value.

    Causal attention of query (N, T, heads * size) with key and value (N, T, kv_heads * size), or with all three packed
    in `query`, and caches (N, kv_heads, past, size). Rotary embeddings are applied first (do_rotary). Tokens of a
    prompt after its length (padding on the right) change no other token.

    Raises:
        Unfit: a quantized or shared cache, norms of query and key, or another attribute that is not supported.
    """
    given = dict(zip(ATTENTION_INPUTS, [*optional, *[None] * len(ATTENTION_INPUTS)], strict=False))
    _require_plain_attention(call, given)
    heads, kv_heads = call.integer("num_heads", 0), call.integer("kv_num_heads", 0)
    batch, length = query.shape[:2]
    if given["key"] is None:
        size = query.shape[-1] // (heads + 2 * kv_heads)
        query, key, value = query.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    else:
        key, value = given["key"], given["value"]
    q, k, v = (part.reshape(batch, length, count, -1).transpose(1, 2) for part, count in
               ((query, heads), (key, kv_heads), (value, kv_heads)))  # fmt: skip
    past = 0 if given["past_key"] is None else given["past_key"].shape[2]
    _require_full_cache(given, past, length)
    if call.integer("do_rotary", 0):
        positions = given["position_ids"]
        if positions is None:
            positions = call.torch.arange(past, past + length, device=q.device)[None]
        turn = replace(call, attributes={"interleaved": call.integer("rotary_interleaved", 0)})
        q, k = (_turned(turn, part, positions, given["cos_cache"], given["sin_cache"]) for part in (q, k))
    window = call.integer("local_window_size", -1)
    scale = call.number("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    inner = {"is_causal": 1, "scale": scale, "softcap": call.number("softcap", 0.0)}
    inner |= {"left_window_size": window - 1} if window > 0 else {}
    sink = given["head_sink"]
    if sink is None and call.integer("smooth_softmax", 0) == 1:
        sink = q.new_zeros(heads)
    plain = replace(call, attributes=inner)
    caches = (given["past_key"], given["past_value"])
    y, present_key, present_value, _ = attention(plain, q, k, v, given["attention_bias"], *caches, sink=sink)
    return y.transpose(1, 2).reshape(batch, length, -1), present_key, present_value


def _require_plain_attention(call: Call, given: dict[str, Tensor | None]) -> None:
    for name in NO_ATTENTION_INPUTS:
        if given[name] is not None:
            raise Unfit(f"its input {name} is not supported")
    for name, default in NO_ATTENTION_ATTRIBUTES.items():
        if call.integer(name, default) != default:
            raise Unfit(f"{name}={call.integer(name, default)} is not supported")
    for name in ("k_quant_type", "v_quant_type"):
        if call.text(name, "NONE") != "NONE":
            raise Unfit(f"quantized caches are not supported ({name}={call.text(name, '')})")


def _require_full_cache(given: dict[str, Tensor | None], past: int, length: int) -> None:
    """Refuse caches with more places than tokens, and different lengths in one batch after a past."""
    total, lengths = given["total_sequence_length"], given["seqlens_k"]
    if total is not None and number(total) != past + length:
        raise Unfit(f"total_sequence_length is {number(total)}, and past and new tokens are {past + length}")
    if past and lengths is not None and bool((lengths + 1 != past + length).any()):
        raise Unfit("sequences of different lengths after a past are not supported")


def _turned(call: Call, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (N, heads, T, size) by the angles at `positions`; the tables may cover a part of each head."""
    size = 2 * cos.shape[-1]
    attributes = {**call.attributes, "rotary_embedding_dim": size if size < x.shape[-1] else 0}
    turned: Tensor = rotary_embedding(replace(call, attributes=attributes), x, cos, sin, positions)
    return turned


def rotary_embedding_with_offset(call: Call, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """ONNX Runtime RotaryEmbedding of (N, heads, T, size) or (N, T, heads * size).

    positions: (N, T), or the position of the first token, (1,).

    Raises:
        Unfit: another scale than 1, or batches packed into one sequence.
    """
    if call.number("scale", 1.0) != 1.0 or call.integer("is_packed_batching", 0):
        raise Unfit("the attributes scale and is_packed_batching are not supported")
    flat = x.dim() == 3
    length = x.shape[1] if flat else x.shape[2]
    if positions.dim() == 1:
        positions = positions.to(x.device) + call.torch.arange(length, device=x.device)[None]
    heads = call.integer("num_heads", 0) or (x.shape[-1] // (2 * cos.shape[-1]) if flat else 0)
    attributes = {**call.attributes, "num_heads": heads}
    turned: Tensor = rotary_embedding(replace(call, attributes=attributes), x, cos, sin, positions)
    return turned


def simplified_layer_norm(call: Call, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """ONNX Runtime SimplifiedLayerNormalization → x / sqrt(mean(x²) + epsilon) * scale, and 1 / that root."""
    axes = list(range(axis_of(call.integer("axis", -1), x.dim()), x.dim()))
    wide = x.float() if x.dtype in (call.torch.float16, call.torch.bfloat16) else x
    root = call.torch.rsqrt((wide * wide).mean(dim=axes, keepdim=True) + call.number("epsilon", 1e-5))
    return (wide * root).to(x.dtype) * scale, root


def skip_simplified_layer_norm(
    call: Call, x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """ONNX Runtime SkipSimplifiedLayerNormalization → norm of the sum, 0, 1 / root, sum x + skip + bias.

    The second output is a mean in the schema, which an RMS norm does not have: onnxruntime writes zeros.
    """
    whole = x + skip if bias is None else x + skip + bias
    y, root = simplified_layer_norm(call, whole, scale)
    return y, call.torch.zeros_like(root), root, whole


def skip_layer_norm(
    call: Call, x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """ONNX Runtime SkipLayerNormalization → layer norm of the sum, mean, 1 / deviation, sum x + skip + bias."""
    whole = x + skip if bias is None else x + skip + bias
    mean = whole.mean(dim=-1, keepdim=True)
    centred = whole - mean
    root = call.torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + call.number("epsilon", 1e-12))
    y = centred * root * scale
    return (y if shift is None else y + shift), mean, root, whole
