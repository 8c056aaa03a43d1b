"""LSTM, GRU and RNN layers, unidirectional and bidirectional."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.torchnet.call import Call, Tensor, Unfit

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


def layer(
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    p: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """ONNX LSTM of x (T, N, inputs) → Y (T, D, N, H), Y_h and Y_c (D, N, H); GRU and RNN → Y, Y_h.

    GRU and RNN have no cell state `c` and no peepholes `p`. With layout 1 the batch is the first axis.
    """
    batch_first = bool(call.integer("layout", 0))
    if batch_first:
        x = x.transpose(0, 1)
        h, c = (None if one is None else one.transpose(0, 1) for one in (h, c))
    hidden, directions = r.shape[2], r.shape[0]
    empty = x.new_zeros(directions, x.shape[1], hidden)
    h, c = (empty if one is None else one for one in (h, c))
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
    """Return the names of the activations of all directions, in lower case."""
    given = call.attributes.get("activations") or DEFAULTS[call.op] * directions
    return [(one.decode() if isinstance(one, bytes) else str(one)).lower() for one in given]


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
    """Compute the layer by torch's fused function."""
    torch, order, hidden = call.torch, FUSED_ORDER[call.op], h.shape[2]
    flat = [
        torch.cat([part[gate * hidden : (gate + 1) * hidden] for gate in order])
        for one in weights
        for part in (one.w, one.r, one.wb, one.rb)
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
    for d, one in enumerate(weights):
        reverse = d == 1 or call.text("direction", "forward") == "reverse"
        seen = x.gather(0, backwards.expand(*valid.shape, x.shape[2])) if reverse else x
        projected = seen @ one.w.transpose(0, 1) + one.wb
        state, cell, made = h[d], c[d], []
        for step in range(steps):
            new, new_cell = _step(call, projected[step], state, cell, one, activations[d])
            keep = valid[step][:, None]
            state, cell = torch.where(keep, new, state), torch.where(keep, new_cell, cell)
            made.append(torch.where(keep, new, torch.zeros_like(new)))
        y = torch.stack(made) if made else x.new_zeros(0, *h[d].shape)
        y = y.gather(0, backwards.expand(*valid.shape, h.shape[2])) if reverse else y
        results.append((y, state, cell))
    ys, states, cells = zip(*results, strict=True)
    return torch.stack(ys, dim=1), torch.stack(states), torch.stack(cells)


def _step(
    call: Call, x: Tensor, h: Tensor, c: Tensor, weights: _Weights, activations: Sequence[Activation]
) -> tuple[Tensor, Tensor]:
    """Compute one time step: (new state, new cell). Source: the equations of ONNX LSTM, GRU, RNN.

    Args:
        call: the node.
        x: input after the projection by W, (N, gates * H).
        h, c: state and cell, (N, H).
        weights: weights of the direction.
        activations: functions of the direction.
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
    """Return the activations of each direction; alphas and betas are assigned in order to those that have them."""
    alphas = list(call.attributes.get("activation_alpha") or ())
    betas = list(call.attributes.get("activation_beta") or ())
    made = []
    for name in _named(call, directions):
        if name not in _ACTIVATIONS:
            raise Unfit(f"it has the activation '{name}'")
        default_alpha, default_beta, make = _ACTIVATIONS[name]
        alpha = alphas.pop(0) if default_alpha is not None and alphas else default_alpha
        beta = betas.pop(0) if default_beta is not None and betas else default_beta
        made.append(make(call.torch, alpha, beta))
    each = len(DEFAULTS[call.op])
    return [made[d * each : (d + 1) * each] for d in range(directions)]


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
