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
"""Samples a step."""

RATE: Final = 0.1
"""Adam's, as for the form by moments. The paper's code has 0.01: in 1,000 steps, ten times fewer than there, that
leaves more error (tried on layers of cifar_resnet20: 0.01 to 0.1)."""

WEIGHT: Final = 2.4
"""Of the pull to whole codes, a mean over the weights, against an error that is 1 for the nearest codes: as for the
form by moments, 0.2 of the error of one code in one weight, of which the nearest codes make a twelfth. Less leaves more
error (tried: 0.02 to 2.4)."""

WARMUP: Final = 0.2
BETA: Final = (20.0, 2.0)
SPREAD: Final = (-0.1, 1.1)
"""Of the paper: share of the steps before the pull begins, its first and last exponent, ends of the sigmoid."""

Apply = Callable[[Any, Any], Any]
"""Input and weight → output, without the bias, which no form moves."""


def on_batches(
    layer: Layer, inputs: Sequence[Array], weight: Array, qparams: QParams, iterations: int
) -> tuple[Array, float]:
    """Codes of a weight, and seconds: from samples in memory, targets computed first, to codes.

    Minimises over u, with h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1) and begun at the weight itself:

        |x * w - x * v|^2 / (that of the nearest codes) + WEIGHT mean(1 - |2 h - 1|^beta),  v = (low + h - zero) scale

    Args:
        inputs: what the layer reads, sample by sample, float32.

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
    """Of the pull: from the first to the last by half a cosine; None before it begins."""
    begin = WARMUP * iterations
    if step < begin:
        return None
    way = (step - begin) / (iterations - begin)
    return BETA[1] + (BETA[0] - BETA[1]) * (1.0 + math.cos(math.pi * way)) / 2.0


def _choices(torch: Any, weight: Array, qparams: QParams) -> tuple[Any, Any, Any]:
    """Scale, lower code less zero point, and u, where h(u) is what the weight has beyond its lower code."""
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
    """A Conv or a Gemm in torch."""
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
