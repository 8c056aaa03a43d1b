"""AdaRound on batches, as its paper has it: what the form by moments is timed beside. In torch, on one layer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.reconstruct.layer_inputs import Layer
from sbonnx.spec import Array, QParams

BATCH: Final = 32
"""Samples per step."""

RATE: Final = 0.1
"""Learning rate of Adam, as for the form by moments. The paper's code has 0.01; with 1,000 steps, a tenth of the
paper's, that leaves a larger error (tried on layers of cifar_resnet20: 0.01 to 0.1)."""

WEIGHT: Final = 2.4
"""Weight of the rounding regularizer, a mean over the weights, relative to an error that is 1 for nearest rounding. As
for the form by moments, it is 0.2 of the error of one step in one weight; the mean error of nearest rounding is 1/12 of
that. A smaller weight leaves a larger error (tried: 0.02 to 2.4)."""

WARMUP: Final = 0.2
BETA: Final = (20.0, 2.0)
SPREAD: Final = (-0.1, 1.1)
"""Settings of the paper: `WARMUP`, fraction of the steps before the regularizer starts; `BETA`, its first and last
exponent; `SPREAD`, ends of the stretched sigmoid."""

Apply = Callable[[Any, Any], Any]
"""(input, weight) → output without bias, which neither form changes."""


def on_batches(
    layer: Layer, inputs: Sequence[Array], weight: Array, qparams: QParams, iterations: int
) -> tuple[Array, float]:
    """Run AdaRound on batches of samples in memory; returns the codes of a weight, and seconds including the targets.

    Minimizes over u, with h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1), initialized at the weight itself:

        |x * w - x * v|^2 / (that of the nearest codes) + WEIGHT mean(1 - |2 h - 1|^beta),  v = (low + h - zero) scale

    Args:
        layer: the layer.
        inputs: input activations of the layer, sample by sample, float32.
        weight: float weight.
        qparams: scale and zero point of the weight.
        iterations: number of steps.

    Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", equations 21 to 25.
    """
    import torch

    random = np.random.default_rng(0)
    start = time.perf_counter()
    x = torch.from_numpy(np.concatenate(list(inputs)))
    floats = torch.from_numpy(np.array(weight, np.float32))
    apply = applied(torch, layer)
    with torch.no_grad():
        targets = torch.cat([apply(part, floats) for part in x.split(BATCH)])
        near = torch.from_numpy(qparams.dequantize(qparams.quantize(weight)).astype(np.float32))
        unit = sum(float(((apply(a, near) - b) ** 2).sum()) for a, b in _parts(x, targets)) / len(x)
    scale, low, u = _choices(torch, weight, qparams)
    optimizer = torch.optim.Adam([u], lr=RATE)
    for step in range(iterations):
        picks = torch.from_numpy(random.choice(len(x), min(BATCH, len(x)), replace=False))
        optimizer.zero_grad(set_to_none=True)
        h = _soft(torch, u)
        loss = ((apply(x[picks], (low + h) * scale) - targets[picks]) ** 2).sum() / (len(picks) * unit)
        beta = exponent(step, iterations)
        if beta is not None:
            loss = loss + WEIGHT * (1.0 - (2.0 * h - 1.0).abs().pow(beta)).mean()
        loss.backward()
        optimizer.step()
    zero = qparams.along(qparams.zero_point, weight.shape).astype(np.float64)
    chosen = (low + (u.detach() >= 0)).numpy().astype(np.float64) + zero
    return chosen.astype(qparams.spec.dtype), time.perf_counter() - start


def exponent(step: int, iterations: int) -> float | None:
    """Compute the exponent of the regularizer, with cosine annealing from first to last; None before it starts."""
    begin = WARMUP * iterations
    if step < begin:
        return None
    way = (step - begin) / (iterations - begin)
    return BETA[1] + (BETA[0] - BETA[1]) * (1.0 + math.cos(math.pi * way)) / 2.0


def _choices(torch: Any, weight: Array, qparams: QParams) -> tuple[Any, Any, Any]:
    """Return scale, floor code minus zero point, and u such that h(u) is the fractional part of weight / scale."""
    scale = np.broadcast_to(qparams.along(qparams.scale, weight.shape), weight.shape).astype(np.float64)
    zero = qparams.along(qparams.zero_point, weight.shape).astype(np.float64)
    ratio = np.asarray(weight, np.float64) / scale + zero
    low = np.clip(np.floor(ratio), qparams.spec.qmin, qparams.spec.qmax - 1)
    share = np.clip(ratio - low, 0.01, 0.99)
    u = -np.log((SPREAD[1] - SPREAD[0]) / (share - SPREAD[0]) - 1.0)
    whole, rest, first = (torch.from_numpy(np.array(each, np.float32)) for each in (scale, low - zero, u))
    return whole, rest, first.requires_grad_(True)


def _soft(torch: Any, u: Any) -> Any:
    return torch.clamp(torch.sigmoid(u) * (SPREAD[1] - SPREAD[0]) + SPREAD[0], 0.0, 1.0)


def _parts(x: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
    return zip(x.split(BATCH), targets.split(BATCH), strict=True)


def applied(torch: Any, layer: Layer) -> Apply:
    """Return the torch function of a Conv or a Gemm."""
    attributes = layer.node.attrs
    if layer.node.op == "Gemm":
        turned = bool(attributes.get("transB", 0))
        return lambda x, w: x @ (w.T if turned else w)
    axes = len(layer.geometry.kernel)
    pads = list(attributes.get("pads", [0] * 2 * axes))
    strides, dilations = (list(attributes.get(key, [1] * axes)) for key in ("strides", "dilations"))
    around = [end for axis in reversed(range(axes)) for end in (pads[axis], pads[axis + axes])]
    kinds = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
    convolve, even = kinds[axes], pads[:axes] == pads[axes:]

    def apply(x: Any, w: Any) -> Any:
        if even:
            return convolve(x, w, stride=strides, padding=pads[:axes], dilation=dilations)
        return convolve(torch.nn.functional.pad(x, around), w, stride=strides, dilation=dilations)

    return apply
