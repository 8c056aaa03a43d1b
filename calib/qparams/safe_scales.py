"""Numbers that runtimes compute with safely: scales neither too small nor too large, accumulators that do not overflow.

A scale that is 0, denormal or infinite in the type in which a runtime holds it turns a channel into NaN or noise. What
is far below the smallest scale, or above the largest, stays float and says so; what is near is raised to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx.graph import Tensor
from sbonnx.graph.query import constant, dtype, producer
from sbonnx.plan.types import Plan, Reader, Site
from sbonnx.report import Refusal
from sbonnx.spec import HALF_LIMITS, UNUSED_SCALE, Array, Bounds, Kind, QParams, ScaleLimits, ScaleRule, exact_scale

COARSEST: Final[dict[Kind, float]] = {"int": 4.0, "fp8": 64.0}
"""A scale may be raised so far for the widest channel of a tensor. By more, and less than 6 bits would be left of
integers; of fp8, which is as fine over a range of 2^14, only what is below a 450th of the widest loses precision."""

ACCUMULATOR: Final = 2**31 - 1
"""Largest sum that an integer kernel holds."""

ROUNDING: Final = 2**10
"""What float32 rounds off a bias scale, in codes of 32 bits (2^31 times 2^-22), with some to spare."""

CODE_ERROR: Final = 256
"""What rounding one weight adds to a sum at most, in codes: one step of the weight times the reach of an activation."""

FINE: Final = 2.0**23
"""Codes for the bias of a channel without weights, whose scale is free: as many as float32 tells apart."""

COARSER: Final = 2.0
"""A scale that others share, channels or ops, is raised so far for the bias of one: the others lose by it."""

POOL_RATIO: Final = 128.0
"""Largest scale of a pool's input, in scales of its output: onnxruntime refuses to run GlobalAveragePool from 256 on.
A mean of codes is no finer than that where it is of 128 values or fewer."""

GLOBAL_POOL: Final = "GlobalAveragePool"


def limits_for(plan: Plan, tensor: Tensor) -> ScaleLimits:
    """How small and large the scale of a tensor may be: for the runtime, and for the type of the tensor."""
    half = dtype(tensor) == np.float16 or (dtype(tensor) == np.float32 and plan.float_type == "fp16")
    return plan.scales.within(HALF_LIMITS) if half else plan.scales


def unfit(site: Site, bounds: Bounds, limits: ScaleLimits, rule: ScaleRule) -> str | None:
    """The reason why no scale within the limits serves a range, or None. Ranges that are not finite have none here."""
    if rule == "sparsebit":
        return None  # the ancestor has a floor of its own, and no ceiling
    with np.errstate(invalid="ignore", over="ignore"):
        widest = float(np.max(exact_scale(bounds, site.spec, rule), initial=0.0))
    if not np.isfinite(widest):
        return None
    if widest == 0 and site.role == "activation":
        return "it was 0 throughout the calibration data, which says nothing of its range"
    if widest > limits.most:
        return f"it needs a scale of {widest:.3g}, and the largest that is safe is {limits.most:.6g}"
    if 0 < widest < limits.least / COARSEST[site.spec.kind]:
        return f"it needs a scale of {widest:.3g}, far below the smallest that is safe, {limits.least:.3g}"
    return None


def raised_channels(bounds: Bounds, site: Site, limits: ScaleLimits, rule: ScaleRule) -> int:
    """How many channels (or blocks) get a wider scale than theirs, because theirs would be below the smallest."""
    scale = exact_scale(bounds, site.spec, rule)
    return 0 if rule == "sparsebit" else int(((scale > 0) & (scale < limits.least)).sum())


def one_sided(plan: Plan, sites: Sequence[Site], ranges: Mapping[str, Bounds]) -> Iterator[tuple[Site, str]]:
    """Sites left without their counterpart at every op that reads them, where the plan wants both or none.

    Args:
        ranges: of the sites that will be quantized, by key.
    """
    if plan.weights_alone:
        return
    lost: dict[str, set[Reader]] = {"activation": set(), "weight": set()}
    for site in sites:
        if site.role in lost and site.key not in ranges:
            lost[site.role].update(site.readers)
    weightless = {reader.node for reader in lost["weight"]}
    inputless = {reader.node for reader in lost["activation"]}
    for site in sites:
        if site.key not in ranges or not site.readers:
            continue
        nodes = {reader.node for reader in site.readers}
        if site.role == "weight" and nodes <= inputless:
            yield site, "its input stays float"
        elif site.role == "activation" and nodes <= weightless:
            yield site, "the weight beside it stays float"


def unread(plan: Plan, qparams: Mapping[str, QParams], lost: Collection[str]) -> frozenset[Reader]:
    """Quantized inputs of ops whose weight stays float for want of a safe scale: they keep the float tensor.

    Between pairs onnxruntime would quantize that weight by itself, and its bias to codes that overflow.

    Args:
        lost: keys of those weights.
    """
    nodes = {reader.node for site in plan.sites if site.key in lost for reader in site.readers}
    inputs = (site for site in plan.of_role("activation") if site.key in qparams)
    return frozenset(reader for site in inputs for reader in site.readers if reader.node in nodes)


def pooled(sites: Sequence[Site], tensors: Mapping[str, Tensor], ranges: Mapping[str, Bounds]) -> dict[str, Bounds]:
    """`ranges`, with those behind global pools wide enough for onnxruntime to compute them from their inputs' codes."""
    found = dict(ranges)
    read = {reader: site for site in sites if site.role == "activation" for reader in site.readers}
    for site in sites:
        node = producer(tensors[site.tensor]) if site.role == "activation" and site.key in found else None
        if node is None or node.op != GLOBAL_POOL:
            continue
        before = read.get(Reader(node.name, 0))
        if before is None or before.key not in found:
            continue
        source, target = found[before.key], found[site.key]
        wide, narrow = (float(np.max(exact_scale(one, of.spec))) for one, of in ((source, before), (target, site)))
        if narrow * POOL_RATIO < wide:
            least = Bounds(source.lo / np.float32(POOL_RATIO), source.hi / np.float32(POOL_RATIO)).union(target)
            found.update((other.key, least) for other in sites if other.group == site.group and other.key in found)
    return found


def with_headroom(
    plan: Plan, tensors: Mapping[str, Tensor], qparams: Mapping[str, QParams]
) -> tuple[dict[str, QParams], list[Refusal], list[str]]:
    """Scales of weights, wide enough for int32 biases and for the sums that they are added to.

        s_w >= (r sum|w| + |b| / s_x) / (2^31 - 1 - 2^10 - 256 K)

    with r the largest distance of an activation's code from its zero point and K the number of values summed: then no
    sum of products with its bias leaves int32. A channel's scale rises by it only where its bias is some 2^16 times
    what its weights can add to it, so that what its weights lose is below what float32 resolves of the bias times K.
    A channel without weights has a scale for its bias alone. One scale for all channels, and those of a weight that
    several ops read, are raised by `COARSER` at most; where that is not enough the weight stays float. (A float bias
    beside an integer weight is no way out: onnxruntime gives it int32 codes itself, and they overflow.)

    Returns:
        The scales and zero points by site key; weights that stay float; a note for each weight that was changed.
    """
    found, refusals, notes = dict(qparams), [], []
    by_key = plan.by_key()
    for site in plan.of_role("bias"):
        activation, weight = site.follows or ("", "")
        if activation not in found or weight not in found or weight not in by_key:
            continue
        values, bias = constant(tensors[by_key[weight].tensor]), constant(tensors[site.tensor])
        if values is None or bias is None or found[weight].scale.size == 0:
            continue
        made = found[weight]
        wanted = _needed(values, bias, found[activation], made)
        limit = float(limits_for(plan, tensors[by_key[weight].tensor]).most)
        free = (wanted > 0) & (made.scale == UNUSED_SCALE) & ~_moves(values, made)
        scale = np.where(free, np.maximum(wanted, plan.scales.least), np.maximum(made.scale, wanted))
        stiff = made.scale.ndim == 0 or len(by_key[weight].readers) > 1
        if (stiff and (~free & (scale > COARSER * made.scale)).any()) or (scale > limit).any():
            del found[weight]
            why = f"its int32 bias '{site.tensor}' would overflow at any scale that serves its weights"
            refusals.append(Refusal("quantize weight", by_key[weight].tensor, why))
            continue
        changed = scale != made.scale
        if changed.any():
            found[weight] = replace(made, scale=np.asarray(scale, np.float32))
            notes.append(
                f"'{by_key[weight].tensor}': {int(changed.sum())} of {changed.size} scales chosen for the int32 bias"
            )
    return found, refusals, notes


def _moves(weight: Array, made: QParams) -> Array:
    """Which channels have a weight other than 0, bool, shape of the scale."""
    axis = made.spec.axis
    over = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    return np.asarray(np.any(weight != 0, axis=over))


def _needed(weight: Array, bias: Array, data: QParams, made: QParams) -> Array:
    """The least scale of each channel, float32 of the shape of the weight's scale; see `with_headroom`."""
    zero = data.zero_point.astype(np.int64)
    reach = float(np.max(np.maximum(data.spec.qmax - zero, zero - data.spec.qmin)))
    size = np.abs(np.asarray(weight, np.float64))
    axis = made.spec.axis
    summed = size.size // (bias.size if axis is None else weight.shape[axis])
    room = ACCUMULATOR - ROUNDING - CODE_ERROR * summed
    if room <= 0:
        return np.zeros(made.scale.shape, np.float32)  # nothing helps: the bias alone is judged, by `bias_codes`
    share = np.abs(np.asarray(bias, np.float64)) / float(np.min(data.scale))
    if axis is None:
        least = (reach * summed * float(size.max(initial=0.0)) + share.max(initial=0.0)) / room
    else:
        over = tuple(i for i in range(weight.ndim) if i != axis)
        sums = size.sum(axis=over)
        least = (reach * sums + share) / room
        least = np.where(sums > 0, least, share / FINE)
    wide = np.asarray(least, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        near = wide.astype(np.float32)
        return np.asarray(np.where(near < wide, np.nextafter(near, np.float32(np.inf)), near), np.float32)
