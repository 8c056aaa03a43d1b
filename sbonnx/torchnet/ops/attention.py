"""Attention and rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

from sbonnx.torchnet.call import Call, Tensor, Unfit


def attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Any, ...]:
    """ONNX Attention → Y, present key, present value, and the QK matrix selected by qk_matmul_output_mode.

    softmax(softcap(scale q k^T) + mask) v on (N, heads, T, size), or on (N, T, heads * size) with the numbers of heads
    as attributes. With grouped-query attention, several query heads share one key/value head.
    The output of a query whose keys are all masked is 0.
    """
    torch, flat = call.torch, q.dim() == 3
    if flat:
        q = _heads(q, call.integer("q_num_heads", 1))
        k, v = (_heads(one, call.integer("kv_num_heads", 1)) for one in (k, v))
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    present = (k, v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    half = math.sqrt(call.number("scale", 1 / math.sqrt(q.shape[-1])))
    scores = (q * half) @ (k * half).transpose(-1, -2)
    bias = _bias(call, scores, mask, 0 if past_k is None else past_k.shape[2], lengths)
    cap = call.number("softcap", 0.0)
    capped = cap * torch.tanh(scores / cap) if cap else scores
    biased = capped if bias is None else capped + bias
    dead = torch.isneginf(biased).all(dim=-1, keepdim=True)  # all keys masked: output and gradient are 0
    shares = torch.softmax(torch.where(dead, torch.zeros_like(biased), biased), dim=-1) * ~dead
    y = shares @ v
    y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1) if flat else y
    return y, *present, (scores, capped, biased, shares)[call.integer("qk_matmul_output_mode", 0)]


def _heads(x: Tensor, count: int) -> Tensor:
    """Split heads: (N, T, heads * size) → (N, heads, T, size)."""
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def _bias(call: Call, scores: Tensor, mask: Tensor | None, past: int, lengths: Tensor | None) -> Tensor | None:
    """Combine mask, causality, windows and lengths to a bias of the scores: -inf for masked keys, or None."""
    torch = call.torch
    queries, keys = scores.shape[-2:]
    bias = None
    if mask is not None:
        missing = keys - mask.shape[-1]
        never = False if mask.dtype == torch.bool else -math.inf
        mask = torch.nn.functional.pad(mask, [0, missing], value=never) if missing > 0 else mask
        bias = _forbidden(call, ~mask, scores) if mask.dtype == torch.bool else mask
    key = torch.arange(keys, device=scores.device)
    query = torch.arange(queries, device=scores.device)[:, None] + past
    ends = None if lengths is None else lengths.to(scores.device).to(torch.int64).reshape(-1, 1, 1, 1)
    if ends is not None and past == 0:
        query = query + ends - queries
    left, right = call.integer("left_window_size", -1), call.integer("right_window_size", -1)
    walls = [key > query] if call.integer("is_causal", 0) else []
    walls += [key < query - left] if left >= 0 else []
    walls += [key > query + right] if right >= 0 else []
    walls += [key >= ends] if ends is not None else []
    if not walls:
        return bias
    hidden = walls[0]
    for other in walls[1:]:
        hidden = hidden | other
    wall = _forbidden(call, hidden, scores)
    return wall if bias is None else bias + wall


def _forbidden(call: Call, hidden: Tensor, scores: Tensor) -> Tensor:
    """Return minus infinity where `hidden` is true, else 0."""
    zero = call.torch.zeros((), dtype=scores.dtype, device=scores.device)
    return call.torch.where(hidden.to(scores.device), zero - math.inf, zero)


def rotary_embedding(call: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """ONNX RotaryEmbedding of (N, heads, T, size) or (N, T, heads * size).

    Raises:
        Unfit: an input of rank 3 without the attribute num_heads.
    """
    torch, flat = call.torch, x.dim() == 3
    if flat:
        count = call.integer("num_heads", 0)
        if not count:
            raise Unfit("RotaryEmbedding of rank 3 has no num_heads")
        x = x.reshape(x.shape[0], x.shape[1], count, -1)
    else:
        x = x.transpose(1, 2)
    if positions is not None:
        cos, sin = (part[positions.to(part.device).to(torch.int64)] for part in (cos, sin))
    size = call.integer("rotary_embedding_dim", 0) or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    cos, sin = (part[..., : size // 2].unsqueeze(2) for part in (cos, sin))
    if call.integer("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        made = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).reshape(turned.shape)
    else:
        a, b = turned.chunk(2, dim=-1)
        made = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    made = torch.cat([made, rest], dim=-1)
    return made.reshape(x.shape[0], x.shape[1], -1) if flat else made.transpose(1, 2)
