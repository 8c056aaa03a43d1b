"""Scales that runtimes compute with safely: within the range of their type, and without accumulator overflow.

A scale that is 0, denormal or infinite in the type in which a runtime holds it turns a channel into NaN or noise. A
tensor whose scale would be far below the smallest safe one, or above the largest, stays float and is reported; a scale
slightly below is raised to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, dtype, producer
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import RECTIFIERS
from sbonnx.planning.types import Plan, Reader, Site
from sbonnx.report import Note, Reason, Refusal
from sbonnx.small_floats import FLOATS, Kind
from sbonnx.spec import FP8_BITS, HALF_LIMITS, UNUSED_SCALE, Array, Bounds, QParams, ScaleLimits, ScaleRule, exact_scale

COARSEST: Final[dict[Kind, float]] = {
    "int": 4.0,
    **{kind: 64.0 if row.bits == FP8_BITS else 4.0 for kind, row in FLOATS.items()},
}
"""Maximum factor by which a scale may be raised for the widest channel of a tensor.

By more, less than 6 bits of an integer would be left. 8-bit floats are as fine over a range of 2^14, and only values
below a 450th of the widest lose precision.
"""

ACCUMULATOR: Final = 2**31 - 1
"""Largest sum that an integer kernel holds."""

ROUNDING: Final = 2**10
"""Rounding error of a float32 bias scale, in int32 steps (2^31 times 2^-22), with a margin."""

CODE_ERROR: Final = 256
"""Largest change of a sum by rounding one weight, in integers: one step of the weight times an activation's reach."""

FINE: Final = 2.0**23
"""Quantized bias of a channel without weights, whose scale is free: the resolution of float32."""

BYTE_BITS: Final = 8
"""Widest activations whose products are summed in int32."""

COARSER: Final = 2.0
"""Maximum factor for raising a scale shared by channels or ops for the bias of one: the others lose precision."""

POOL_RATIO: Final = 128.0
"""Maximum ratio between the scales of the input and the output of a pool.

onnxruntime does not run GlobalAveragePool from 256 on. The mean of 128 integers or fewer is not finer than that.
"""

GLOBAL_POOL: Final = "GlobalAveragePool"


def limits_for(plan: Plan, tensor: Tensor) -> ScaleLimits:
    """Return the limits of the scale of a tensor, from the runtime and from the type of the tensor."""
    half = dtype(tensor) == np.float16 or (dtype(tensor) == np.float32 and plan.float_type == "fp16")
    return plan.scales.within(HALF_LIMITS) if half else plan.scales


def unfit(site: Site, bounds: Bounds, limits: ScaleLimits, rule: ScaleRule) -> Reason | None:
    """Return why no scale within the limits fits a range, or None. Non-finite ranges are not reported here."""
    if rule == "sparsebit":
        return None  # the ancestor has its own minimum, and no maximum
    with np.errstate(invalid="ignore", over="ignore"):
        widest = float(np.max(exact_scale(bounds, site.spec, rule), initial=0.0))
    if not np.isfinite(widest):
        return None
    if widest == 0 and site.role == "activation":
        return Reason("always-zero", "it was 0 throughout the calibration data, which says nothing of its range")
    if widest > limits.most:
        return Reason(
            "scale-out-of-reach", f"it needs a scale of {widest:.3g}, and the largest that is safe is {limits.most:.6g}"
        )
    if 0 < widest < limits.least / COARSEST[site.spec.kind]:
        return Reason(
            "scale-out-of-reach",
            f"it needs a scale of {widest:.3g}, far below the smallest that is safe, {limits.least:.3g}",
        )
    return None


def raised_channels(bounds: Bounds, site: Site, limits: ScaleLimits, rule: ScaleRule) -> int:
    """Count the channels (or blocks) whose scale is raised, because it is below the smallest safe scale."""
    scale = exact_scale(bounds, site.spec, rule)
    return 0 if rule == "sparsebit" else int(((scale > 0) & (scale < limits.least)).sum())


def one_sided(plan: Plan, sites: Sequence[Site], ranges: Mapping[str, Bounds]) -> Iterator[tuple[Site, Reason]]:
    """Yield sites whose counterpart stays float at every op that reads them, if the plan requires both or neither.

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
            yield site, Reason("input-stays-float", "its input stays float")
        elif site.role == "activation" and nodes <= weightless:
            yield site, Reason("weight-stays-float", "the weight of the same op stays float")


def unread(plan: Plan, qparams: Mapping[str, QParams], lost: Collection[str]) -> frozenset[Reader]:
    """Return the quantized inputs of ops whose weight stays float for lack of a safe scale: they read the float tensor.

    Between Q/DQ pairs onnxruntime would quantize that weight by itself, and its bias to integers that overflow.

    Args:
        lost: keys of those weights.
    """
    nodes = {reader.node for site in plan.sites if site.key in lost for reader in site.readers}
    inputs = (site for site in plan.of_role("activation") if site.key in qparams)
    return frozenset(reader for site in inputs for reader in site.readers if reader.node in nodes)


def pooled(sites: Sequence[Site], tensors: Mapping[str, Tensor], ranges: Mapping[str, Bounds]) -> dict[str, Bounds]:
    """Widen the ranges of global pool outputs, so that onnxruntime can compute them from their quantized inputs."""
    widened = dict(ranges)
    read = {reader: site for site in sites if site.role == "activation" for reader in site.readers}
    for site in sites:
        node = producer(tensors[site.tensor]) if site.role == "activation" and site.key in widened else None
        if node is None or node.op != GLOBAL_POOL:
            continue
        before = read.get(Reader(node.name, 0))
        if before is None or before.key not in widened:
            continue
        source, target = widened[before.key], widened[site.key]
        wide, narrow = (
            float(np.max(exact_scale(bounds, of.spec))) for bounds, of in ((source, before), (target, site))
        )
        if narrow * POOL_RATIO < wide:
            least = Bounds(source.lo / np.float32(POOL_RATIO), source.hi / np.float32(POOL_RATIO)).union(target)
            widened.update((other.key, least) for other in sites if other.group == site.group and other.key in widened)
    return widened


def with_quotients(
    plan: Plan, sites: Sequence[Site], tensors: Mapping[str, Tensor], qparams: Mapping[str, QParams]
) -> dict[str, QParams]:
    """Raise scales of channels of depthwise weights to the smallest s_x s_w / s_y that the runtime supports.

    The weights of such a channel add less than 2^-15 of a step of the output each, before and after.
    """
    raised = dict(qparams)
    if not plan.scales.quotient:
        return raised
    activations = [site for site in sites if site.role == "activation" and site.key in qparams]
    inputs = {reader: site for site in activations for reader in site.readers}
    outputs = {site.tensor: site for site in activations}
    for site in sites:
        if site.role != "weight" or site.key not in raised or raised[site.key].scale.ndim == 0:
            continue
        for reader in tensors[site.tensor].outputs:
            source = inputs.get(Reader(reader.name, 0))
            target = _written(reader, outputs)
            layer = LinearLayer.of_shape(reader.op, reader.attrs, tuple(tensors[site.tensor].shape), 1)
            if source is None or target is None or isinstance(layer, str) or not layer.depthwise:
                continue
            step = plan.scales.quotient * float(np.max(qparams[target.key].scale))
            least = np.float32(step / float(np.min(qparams[source.key].scale)))
            raised[site.key] = replace(raised[site.key], scale=np.maximum(raised[site.key].scale, least))
    return raised


def _written(node: Node, outputs: Mapping[str, Site]) -> Site | None:
    """Return the pair that rounds the output of an op, behind an activation that the op's kernel may include."""
    tensor = node.outputs[0]
    while tensor.name not in outputs and len(tensor.outputs) == 1 and tensor.outputs[0].op in RECTIFIERS:
        tensor = tensor.outputs[0].outputs[0]
    return outputs.get(tensor.name)


def with_headroom(
    plan: Plan, tensors: Mapping[str, Tensor], qparams: Mapping[str, QParams]
) -> tuple[dict[str, QParams], list[Refusal], list[Note]]:
    """Raise weight scales so that int32 biases, and the sums that they are added to, do not overflow.

        s_w >= (r sum|w| + |b| / s_x) / (2^31 - 1 - 2^10 - 256 K)

    with r the largest distance of a quantized activation from its zero point and K the number of values summed: then no
    sum of products with its bias overflows int32. Activations of more than 8 bits have no kernels with int32 sums: only
    the bias counts. The scale of a channel is raised only if its bias is about 2^16 times what its weights can add to
    it, so the precision that its weights lose is below the float32 resolution of the bias times K. A channel without
    weights has a scale for its bias alone. One scale for all channels, and the scales of a weight that several ops
    read, are raised by `COARSER` at most; if that is not enough the weight stays float. (A float bias with an integer
    weight is not possible: onnxruntime quantizes it to int32 itself, and it overflows.)

    Returns:
        The scales and zero points by site key; weights that stay float; a note for each weight that was changed.
    """
    fitted, refusals, notes = dict(qparams), [], []
    by_key = plan.by_key()
    for site in plan.of_role("bias"):
        activation, weight = site.follows or ("", "")
        if activation not in fitted or weight not in fitted or weight not in by_key:
            continue
        values, bias = constant(tensors[by_key[weight].tensor]), constant(tensors[site.tensor])
        if values is None or bias is None or fitted[weight].scale.size == 0:
            continue
        weight_params = fitted[weight]
        wanted = _needed(values, bias, fitted[activation], weight_params)
        limit = float(limits_for(plan, tensors[by_key[weight].tensor]).most)
        axis = weight_params.spec.axis
        others = None if axis is None else tuple(i for i in range(values.ndim) if i != axis)
        free = (wanted > 0) & (weight_params.scale == UNUSED_SCALE) & ~np.any(values != 0, axis=others)
        scale = np.where(free, np.maximum(wanted, plan.scales.least), np.maximum(weight_params.scale, wanted))
        stiff = weight_params.scale.ndim == 0 or len(by_key[weight].readers) > 1
        if (stiff and (~free & (scale > COARSER * weight_params.scale)).any()) or (scale > limit).any():
            del fitted[weight]
            why = Reason(
                "bias-overflows", f"its int32 bias '{site.tensor}' would overflow at any scale that serves its weights"
            )
            refusals.append(Refusal("quantize weight", by_key[weight].tensor, why))
            continue
        changed = scale != weight_params.scale
        if changed.any():
            fitted[weight] = replace(weight_params, scale=np.asarray(scale, np.float32))
            notes.append(
                Note(
                    "scales-for-bias",
                    f"'{by_key[weight].tensor}': {int(changed.sum())} of {changed.size} scales chosen for the "
                    "int32 bias",
                )
            )
    return fitted, refusals, notes


def _needed(weight: Array, bias: Array, data: QParams, made: QParams) -> Array:
    """Compute the smallest scale of each channel, float32 of the shape of the weight's scale; see `with_headroom`."""
    zero = data.zero_point.astype(np.int64)
    reach = float(np.max(np.maximum(data.spec.qmax - zero, zero - data.spec.qmin)))
    if data.spec.bits > BYTE_BITS:
        reach = 0.0
    size = np.abs(np.asarray(weight, np.float64))
    axis = made.spec.axis
    summed = size.size // (bias.size if axis is None else weight.shape[axis])
    room = ACCUMULATOR - ROUNDING - CODE_ERROR * summed
    if room <= 0:
        return np.zeros(made.scale.shape, np.float32)  # no scale is enough: only the bias is checked, by `bias_codes`
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
