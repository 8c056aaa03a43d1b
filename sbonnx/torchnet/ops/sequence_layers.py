"""Attention, rotary embeddings and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.torchnet.call import Call, Tensor, Unfit


def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, *optional: Tensor | None, sink: Tensor | None = None
) -> tuple[Any, ...]:
    """ONNX Attention → Y, present key, present value, and the QK matrix selected by qk_matmul_output_mode.

    softmax(softcap(scale q k^T) + mask) v on (N, heads, T, size), or on (N, T, heads * size) with the numbers of heads
    as attributes. With grouped-query attention, several query heads share one key/value head.
    The output of a query whose keys are all masked is 0. Optional inputs: mask, past key, past value, lengths.
    sink: (heads,), scores of one more key per head, whose value is 0.
    """
    torch, flat = call.torch, q.dim() == 3
    mask, past_k, past_v, lengths = [*optional, None, None, None, None][:4]
    if flat:
        q = _heads(q, call.integer("q_num_heads", 1))
        k, v = (_heads(values, call.integer("kv_num_heads", 1)) for values in (k, v))
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
    alive = torch.where(dead, torch.zeros_like(biased), biased)
    if sink is not None:
        column = sink.reshape(1, -1, 1, 1).to(alive.dtype).expand(*alive.shape[:-1], 1)
        alive = torch.cat([alive, column], dim=-1)
    shares = torch.softmax(alive, dim=-1)[..., : biased.shape[-1]] * ~dead
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
            raise Unfit("RotaryEmbedding of a rank 3 input needs num_heads")
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
        y = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).reshape(turned.shape)
    else:
        a, b = turned.chunk(2, dim=-1)
        y = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    y = torch.cat([y, rest], dim=-1)
    return y.reshape(x.shape[0], x.shape[1], -1) if flat else y.transpose(1, 2)


Activation = Callable[[Tensor], Tensor]

GATES: Final = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS: Final = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
FUSED_ORDER: Final = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Index in the gate order of ONNX for each gate of torch: i f c o from i o f c, and r z h from z r h."""


@dataclass(frozen=True)
class _Weights:
    """Weights of one direction.

    Attributes:
        w, r: W (gates * H, inputs) and R (gates * H, H).
        wb, rb: their biases, (gates * H,).
        p: peepholes (3 * H,), or None.
    """

    w: Tensor
    r: Tensor
    wb: Tensor
    rb: Tensor
    p: Tensor | None


def recurrent(call: Call, x: Tensor, w: Tensor, r: Tensor, *optional: Tensor | None) -> tuple[Tensor, ...]:
    """ONNX LSTM of x (T, N, inputs) → Y (T, D, N, H), Y_h and Y_c (D, N, H); GRU and RNN → Y, Y_h.

    Optional inputs: biases, lengths, initial state h, and for LSTM initial cell state c and peepholes p. With layout 1
    the batch is the first axis.
    """
    b, lengths, h, c, p = [*optional, None, None, None, None, None][:5]
    batch_first = bool(call.integer("layout", 0))
    if batch_first:
        x = x.transpose(0, 1)
        h, c = (None if state is None else state.transpose(0, 1) for state in (h, c))
    hidden, directions = r.shape[2], r.shape[0]
    empty = x.new_zeros(directions, x.shape[1], hidden)
    h, c = (empty if state is None else state for state in (h, c))
    b = w.new_zeros(directions, 2 * w.shape[1]) if b is None else b
    half = w.shape[1]
    weights = [_Weights(w[d], r[d], b[d, :half], b[d, half:], None if p is None else p[d]) for d in range(directions)]
    if lengths is None and p is None and _is_plain(call):
        y, h_last, c_last = _fused(call, x, weights, h, c)
    else:
        y, h_last, c_last = _stepped(call, x, weights, lengths, h, c)
    if batch_first:
        y, h_last, c_last = y.permute(2, 0, 1, 3), h_last.transpose(0, 1), c_last.transpose(0, 1)
    return (y, h_last, c_last) if call.op == "LSTM" else (y, h_last)


def _named(call: Call, directions: int) -> list[str]:
    given = call.attributes.get("activations") or DEFAULTS[call.op] * directions
    return [(name.decode() if isinstance(name, bytes) else str(name)).lower() for name in given]


def _is_plain(call: Call) -> bool:
    """Return whether torch's fused layer supports the node; it has no reverse-only direction."""
    directions = 2 if call.text("direction", "forward") == "bidirectional" else 1
    default = _named(call, directions) == [name.lower() for name in DEFAULTS[call.op] * directions]
    reset = call.op != "GRU" or bool(call.integer("linear_before_reset", 0))
    return (
        default
        and reset
        and call.attributes.get("clip") is None
        and not call.integer("input_forget", 0)
        and call.text("direction", "forward") != "reverse"
    )


def _fused(call: Call, x: Tensor, weights: Sequence[_Weights], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    torch, order, hidden = call.torch, FUSED_ORDER[call.op], h.shape[2]
    flat = [
        torch.cat([part[gate * hidden : (gate + 1) * hidden] for gate in order])
        for direction in weights
        for part in (direction.w, direction.r, direction.wb, direction.rb)
    ]
    both = len(weights) == 2
    if call.op == "LSTM":
        y, h_last, c_last = torch.lstm(x, (h, c), flat, True, 1, 0.0, False, both, False)
    else:
        function = torch.gru if call.op == "GRU" else torch.rnn_tanh
        y, h_last = function(x, h, flat, True, 1, 0.0, False, both, False)
        c_last = h_last
    return y.reshape(*y.shape[:2], len(weights), hidden).permute(0, 2, 1, 3), h_last, c_last


def _stepped(
    call: Call, x: Tensor, weights: Sequence[_Weights], lengths: Tensor | None, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the layer step by step; supports other activations, peepholes, clipping and sequence lengths."""
    torch, steps = call.torch, x.shape[0]
    activations = _activations(call, len(weights))
    at = torch.arange(steps, device=x.device)[:, None]
    ends = torch.full_like(at, steps) if lengths is None else lengths.to(x.device).to(torch.int64)[None, :]
    valid = (at < ends).expand(steps, x.shape[1])
    backwards = torch.where(valid, ends - 1 - at, at.expand_as(valid))[..., None]
    results = []
    for d, part in enumerate(weights):
        reverse = d == 1 or call.text("direction", "forward") == "reverse"
        seen = x.gather(0, backwards.expand(*valid.shape, x.shape[2])) if reverse else x
        projected = seen @ part.w.transpose(0, 1) + part.wb
        state, cell, outputs = h[d], c[d], []
        for step in range(steps):
            new, new_cell = _step(call, projected[step], state, cell, part, activations[d])
            keep = valid[step][:, None]
            state, cell = torch.where(keep, new, state), torch.where(keep, new_cell, cell)
            outputs.append(torch.where(keep, new, torch.zeros_like(new)))
        y = torch.stack(outputs) if outputs else x.new_zeros(0, *h[d].shape)
        y = y.gather(0, backwards.expand(*valid.shape, h.shape[2])) if reverse else y
        results.append((y, state, cell))
    ys, states, cells = zip(*results, strict=True)
    return torch.stack(ys, dim=1), torch.stack(states), torch.stack(cells)


def _step(
    call: Call, x: Tensor, h: Tensor, c: Tensor, weights: _Weights, activations: Sequence[Activation]
) -> tuple[Tensor, Tensor]:
    """Compute one time step: (new state, new cell) of one direction. Source: the equations of ONNX LSTM, GRU, RNN.

    x: input after the projection by W, (N, gates * H); h, c: state and cell, (N, H).
    """
    limit = call.attributes.get("clip")

    def clip(value: Tensor) -> Tensor:
        return value if limit is None else value.clamp(-float(limit), float(limit))

    if call.op == "RNN":
        return activations[0](clip(x + h @ weights.r.transpose(0, 1) + weights.rb)), c
    if call.op == "GRU":
        size = h.shape[1]
        xz, xr, xh = x.split(size, dim=1)
        r_z, r_r, r_h = weights.r.split(size)
        b_z, b_r, b_h = weights.rb.split(size)
        z = activations[0](clip(xz + h @ r_z.transpose(0, 1) + b_z))
        reset = activations[0](clip(xr + h @ r_r.transpose(0, 1) + b_r))
        if call.integer("linear_before_reset", 0):
            inner = reset * (h @ r_h.transpose(0, 1) + b_h)
        else:
            inner = (reset * h) @ r_h.transpose(0, 1) + b_h
        return (1 - z) * activations[1](clip(xh + inner)) + z * h, c
    i, o, f, g = (x + h @ weights.r.transpose(0, 1) + weights.rb).split(h.shape[1], dim=1)
    p_i, p_o, p_f = (0.0, 0.0, 0.0) if weights.p is None else weights.p.split(h.shape[1])
    gate_i = activations[0](clip(i + p_i * c))
    gate_f = 1 - gate_i if call.integer("input_forget", 0) else activations[0](clip(f + p_f * c))
    cell = gate_f * c + gate_i * activations[1](clip(g))
    gate_o = activations[0](clip(o + p_o * cell))
    return gate_o * activations[2](cell), cell


def _activations(call: Call, directions: int) -> list[list[Activation]]:
    alphas = list(call.attributes.get("activation_alpha") or ())
    betas = list(call.attributes.get("activation_beta") or ())
    functions = []
    for name in _named(call, directions):
        if name not in _ACTIVATIONS:
            raise Unfit(f"activation '{name}' is not supported")
        default_alpha, default_beta, make = _ACTIVATIONS[name]
        alpha = alphas.pop(0) if default_alpha is not None and alphas else default_alpha
        beta = betas.pop(0) if default_beta is not None and betas else default_beta
        functions.append(make(call.torch, alpha, beta))
    per_direction = len(DEFAULTS[call.op])
    return [functions[d * per_direction : (d + 1) * per_direction] for d in range(directions)]


_Row = tuple[float | None, float | None, Callable[[Any, Any, Any], Activation]]
_ACTIVATIONS: Final[dict[str, _Row]] = {
    "relu": (None, None, lambda torch, a, b: torch.relu),
    "tanh": (None, None, lambda torch, a, b: torch.tanh),
    "sigmoid": (None, None, lambda torch, a, b: torch.sigmoid),
    "softsign": (None, None, lambda torch, a, b: torch.nn.functional.softsign),
    "softplus": (None, None, lambda torch, a, b: torch.nn.functional.softplus),
    "affine": (1.0, 0.0, lambda torch, a, b: lambda x: a * x + b),
    "leakyrelu": (0.01, None, lambda torch, a, b: lambda x: torch.where(x < 0, a * x, x)),
    "thresholdedrelu": (1.0, None, lambda torch, a, b: lambda x: torch.where(x > a, x, torch.zeros_like(x))),
    "scaledtanh": (1.0, 1.0, lambda torch, a, b: lambda x: a * torch.tanh(b * x)),
    "hardsigmoid": (0.2, 0.5, lambda torch, a, b: lambda x: (a * x + b).clamp(0.0, 1.0)),
    "elu": (1.0, None, lambda torch, a, b: lambda x: torch.nn.functional.elu(x, a)),
}
"""Name → (default alpha, default beta, factory); None for a parameter that it does not have. Source: ONNX LSTM."""
