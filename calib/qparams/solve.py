"""Computes scales, zero points, quantized weights and quantized biases from ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sbonnx.calib.observers import Observer, make_observer
from sbonnx.calib.qparams.safe_scales import (
    limits_for,
    one_sided,
    pooled,
    raised_channels,
    unfit,
    unread,
    with_headroom,
    with_quotients,
)
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError, ModelError, NumericError, RecipeError
from sbonnx.graph import Constant, Graph, Tensor
from sbonnx.graph.query import constant, dtype, tensors_by_name
from sbonnx.graph.storage.weights import release_pages, spill_large
from sbonnx.planning.magnitudes import KINDS
from sbonnx.planning.types import Plan, Site, Solution
from sbonnx.report import Note, Reason, Refusal
from sbonnx.rounding.base import nearest_codes
from sbonnx.rounding.hqq import hqq_bounds
from sbonnx.spec import AT_ONCE, Array, Bounds, QParams, QuantSpec, ScaleRule, pair_bounds, params_from_bounds

Solve = Callable[[Site, Array, QParams], Array]
"""Rounds a weight: site, float weight, scales → quantized values of the weight's shape."""

INT32: Final = np.iinfo(np.int32)


def fixed_bounds(site: Site, tensor: Tensor) -> Bounds:
    """Return the range that the user fixed, for every channel or block."""
    if site.fixed is None:
        raise ValueError(f"site '{site.key}' has no fixed range")
    axis, block = site.spec.axis, site.spec.block_size
    shape: tuple[int, ...] = () if axis is None else (tensor.shape[axis],)
    if axis is not None and block is not None:
        shape = (*tensor.shape[:axis], -(-tensor.shape[axis] // block), *tensor.shape[axis + 1 :])
    lo, hi = site.fixed
    return Bounds(np.full(shape, lo, np.float32), np.full(shape, hi, np.float32))


def weight_of(site: Site, tensor: Tensor) -> Array:
    """Return the constant of a weight or bias site.

    Raises:
        ModelError: the tensor is not a constant.
    """
    value = constant(tensor)
    if value is None:
        raise ModelError(f"'{site.tensor}' is planned as a {site.role} and is no constant")
    return value


def weight_bounds(site: Site, weight: Array, rule: ScaleRule = "exact") -> Bounds:
    """Compute the range of a weight per tensor, channel or block by its observer; optimised by HQQ if requested.

    Raises:
        NumericError: it holds NaN or Inf.
        RecipeError: the observer is for activations only.
    """
    observer = make_observer(site.observer.name, site.observer.arguments)
    if not observer.for_weights:
        raise RecipeError(
            f"observer '{site.observer.name}' is for activations; use 'minmax' for weight '{site.tensor}'"
        )
    if not _is_finite(weight):
        raise NumericError(f"weight '{site.tensor}' holds NaN or infinite values: fix the model")
    if site.spec.block_size is not None:
        bounds = _block_bounds(weight, site.spec, observer, rule)
    else:
        bounds = observer.bounds(Sketch.of(weight, site.spec.axis), replace(site.spec, pairs=()), rule)
    if site.rounding.scale == "hqq":
        bounds = hqq_bounds(weight, site.spec, bounds, rule)
    if site.spec.pairs:
        bounds = pair_bounds(weight, site.spec, bounds, rule)
    return Bounds(spill_large(bounds.lo), spill_large(bounds.hi))


def _is_finite(weight: Array) -> bool:
    """Return whether all values are finite in float32."""
    with np.errstate(over="ignore"):
        return all(np.isfinite(part.astype(np.float32, copy=False)).all() for _, part in _pieces(np.atleast_1d(weight)))


def _pieces(values: Array) -> Iterator[tuple[slice, Array]]:
    """Yield slices along the leading axis, of about `AT_ONCE` values each, and the values: temporaries stay small.

    Pages of mapped values are released after each slice.
    """
    rows = max(1, AT_ONCE // max(1, values[:1].size))
    for start in range(0, len(values), rows):
        part = slice(start, start + rows)
        yield part, values[part]
        if len(values) > rows:
            release_pages()


def _block_bounds(weight: Array, spec: QuantSpec, observer: Observer, rule: ScaleRule) -> Bounds:
    """Compute the range of each block; the shape of the weight with the axis divided by the block size.

    Every block is a channel of the sketch; a shorter last block has a separate sketch.
    """
    size, axis = spec.block_size or 1, spec.axis or 0
    rows = np.moveaxis(weight, axis, -1)
    lines, length = np.atleast_2d(rows), rows.shape[-1]
    whole, count = length // size, -(-length // size)
    ends = np.zeros((2, *lines.shape[:-1], count), np.float32)
    for place, part in _pieces(lines):
        target = ends[:, place]
        cuts = (
            (part[..., : whole * size], target[..., :whole], size),
            (part[..., whole * size :], target[..., whole:], 0),
        )
        for values, ends_of_cut, width in cuts:
            if values.size:
                blocks = np.ascontiguousarray(values).reshape(-1, width or values.shape[-1])
                bounds = observer.bounds(Sketch.of(blocks, 0), spec, rule)
                ends_of_cut[0], ends_of_cut[1] = (end.reshape(ends_of_cut.shape[1:]) for end in (bounds.lo, bounds.hi))
    lo, hi = (np.moveaxis(end.reshape(*rows.shape[:-1], count), -1, axis) for end in ends)
    return Bounds(lo, hi)


def united(sites: Iterable[Site], bounds: Mapping[str, Bounds], fixed: Mapping[str, Bounds]) -> dict[str, Bounds]:
    """Unite the bounds of each group, by site key; a range fixed by the user takes precedence in its group."""
    sites = tuple(sites)
    groups: dict[str, Bounds] = {}
    for chosen in (fixed, bounds):
        mine: dict[str, Bounds] = {}
        for site in sites:
            if site.key in chosen and site.group not in groups:
                seen = mine.get(site.group)
                mine[site.group] = chosen[site.key] if seen is None else seen.union(chosen[site.key])
        groups.update(mine)
    return {site.key: groups[site.group] for site in sites if site.group in groups}


def scale_type(tensor: Tensor, plan: Plan) -> Any:
    """Return the type that the scales of a tensor are rounded to before use.

    That is the type of the tensor, or the type that float32 becomes by `Plan.float_type`.
    """
    if dtype(tensor) != np.float32 or plan.float_type == "fp32":
        return np.float16 if dtype(tensor) == np.float16 else np.float32
    return KINDS[plan.float_type].dtype


def qparams_of(site: Site, bounds: Bounds, tensor: Tensor, plan: Plan) -> QParams:
    """Compute scale and zero point of a site; in half precision if the tensor is or will be.

    Raises:
        NumericError: the range cannot be represented; the message names the tensor.
    """
    scale_dtype = scale_type(tensor, plan)
    if site.given is not None:
        scale, zero = np.asarray(site.given.scale, scale_dtype), np.asarray(site.given.zero_point, site.spec.dtype)
        shape = () if site.spec.axis is None else (tensor.shape[site.spec.axis],)
        wide = (np.broadcast_to(values.squeeze() if values.size == 1 else values, shape) for values in (scale, zero))
        scale, zero = (np.ascontiguousarray(values).reshape(shape) for values in wide)
        return QParams(scale.astype(np.float32), zero, site.spec)
    try:
        least = limits_for(plan, tensor).least
        qparams = params_from_bounds(bounds, site.spec, rule=plan.scale_rule, scale_dtype=scale_dtype, least=least)
    except NumericError as error:
        raise NumericError(f"'{site.tensor}': {error}") from error
    return replace(qparams, scale=spill_large(qparams.scale), zero_point=spill_large(qparams.zero_point))


def bias_codes(site: Site, bias: Array, qparams: Mapping[str, QParams]) -> tuple[Array, Array] | Refusal:
    """Compute the int32 values and float32 scale of a bias; the scale is the activation's times the weight's.

    A bias that does not fit int32 (a channel with tiny weights has a tiny scale) stays float: clipping it would shift
    the whole channel.
    """
    if site.follows is None:
        raise ValueError(f"bias site '{site.key}' does not say which scales it follows")
    activation, weight = site.follows
    if activation not in qparams or weight not in qparams:
        lost = activation if activation not in qparams else weight
        return Refusal(
            "quantize bias",
            site.tensor,
            Reason("bias-without-scale", f"'{lost}', whose scale it needs, is not quantized"),
        )
    scale = (qparams[activation].scale * qparams[weight].scale).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        codes = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    if not (np.isfinite(codes).all() and np.abs(codes).max(initial=0.0) <= INT32.max):
        return Refusal(
            "quantize bias",
            site.tensor,
            Reason("bias-not-int32", "it does not fit int32 at the scale of its activation and weight"),
        )
    return codes.astype(np.int32), scale


def left_alone(plan: Plan, measured: Mapping[str, Bounds]) -> list[Site]:
    """Return the weights that would be the only quantized input of their nodes, if the plan does not allow that."""
    if plan.weights_alone:
        return []
    reached = {site.group for site in plan.sites if site.key in measured or site.fixed is not None}
    activations = plan.of_role("activation")
    dropped = {reader.node for site in activations if site.group not in reached for reader in site.readers}
    return [site for site in plan.of_role("weight") if all(reader.node in dropped for reader in site.readers)]


def safe_ranges(
    plan: Plan, sites: Sequence[Site], tensors: Mapping[str, Tensor], ranges: Mapping[str, Bounds]
) -> tuple[dict[str, Bounds], list[Refusal], list[Note]]:
    """Select the ranges that have a scale which the runtime computes with safely.

    Returns:
        Ranges by site key; refusals for lack of a safe scale, and for their counterparts; notes.
    """
    if plan.scale_rule == "sparsebit":
        return dict(ranges), [], []
    fits = pooled(sites, tensors, ranges)
    refusals, notes = [], []
    for site in sites:
        if site.key in fits:
            limits = limits_for(plan, tensors[site.tensor])
            why = unfit(site, fits[site.key], limits, plan.scale_rule)
            raised = raised_channels(fits[site.key], site, limits, plan.scale_rule)
            if why is not None:
                refusals.append(Refusal(f"quantize {site.role}", site.tensor, why))
                del fits[site.key]
            elif raised:
                notes.append(
                    Note(
                        "scales-raised",
                        f"'{site.tensor}': {raised} scales are raised to {limits.least:.3g}, the smallest safe one",
                    )
                )
    return fits, [*refusals, *_drop_one_sided(plan, sites, fits)], notes


def _drop_one_sided(plan: Plan, sites: Sequence[Site], ranges: dict[str, Bounds]) -> list[Refusal]:
    """Remove sites without their counterpart from `ranges`, in place, and return their refusals."""
    unpaired = list(one_sided(plan, sites, ranges))
    for site, _ in unpaired:
        del ranges[site.key]
    return [Refusal(f"quantize {site.role}", site.tensor, why) for site, why in unpaired]


def safe_numbers(
    plan: Plan,
    sites: Sequence[Site],
    tensors: Mapping[str, Tensor],
    ranges: Mapping[str, Bounds],
    chosen: Mapping[str, QParams],
) -> tuple[dict[str, QParams], dict[str, Bounds], list[Refusal], list[Note]]:
    """Compute scales and zero points that runtimes compute with safely: those `chosen`, else those of the ranges.

    Returns:
        Scales and zero points by site key; the ranges of those sites; refusals; notes.
    """
    fits, refusals, notes = safe_ranges(plan, sites, tensors, ranges)
    while True:
        computed = {
            site.key: chosen.get(site.key) or qparams_of(site, fits[site.key], tensors[site.tensor], plan)
            for site in sites
            if site.key in fits
        }
        qparams, lost, widened = with_headroom(plan, tensors, with_quotients(plan, sites, tensors, computed))
        if not lost:
            return qparams, fits, refusals, [*notes, *widened]
        fits = {key: bounds for key, bounds in fits.items() if key in qparams}
        refusals += [*lost, *_drop_one_sided(plan, sites, fits)]


def solution_of(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    measured: Mapping[str, Bounds],
    solve: Solve | None = None,
    *,
    chosen: Mapping[str, QParams] | None = None,
    constants: Mapping[str, Array] | None = None,
) -> Solution:
    """Build the solution from ranges. Weights are read one at a time, once for the range and once for quantization.

    Args:
        tensors: of all scopes, by name.
        measured: ranges of activations by site key, and of weights if already known.
        solve: rounds weights; None: round to nearest.
        chosen: scales and zero points of weights that do not follow from a range, by site key.
        constants: new values of float constants by tensor name, such as corrected biases.
    """
    constants = constants or {}
    tensors = {**tensors, **{name: Constant(name, values) for name, values in constants.items()}}
    fixed: dict[str, Bounds] = {}
    alone = left_alone(plan, measured)
    measured = dict(measured)
    refusals = [
        Refusal("quantize weight", site.tensor, Reason("input-stays-float", "its input stays float")) for site in alone
    ]
    sites = [site for site in plan.sites if site not in alone]
    for site in sites:
        if site.fixed is not None and site.role != "bias":
            fixed[site.key] = fixed_bounds(site, tensors[site.tensor])
        elif site.role == "weight" and site.key not in measured:
            measured[site.key] = weight_bounds(site, weight_of(site, tensors[site.tensor]), plan.scale_rule)
            release_pages()
    ranges = united((site for site in sites if site.role != "bias"), measured, fixed)
    qparams, ranges, unsafe, notes = safe_numbers(plan, sites, tensors, ranges, chosen or {})
    refusals += unsafe
    codes: dict[str, Array] = {}
    scales: dict[str, Array] = {}
    for site in sites:
        if site.role == "weight" and site.key in qparams:
            weight = weight_of(site, tensors[site.tensor])
            weight_params = qparams[site.key]
            codes[site.key] = spill_large(
                nearest_codes(weight, weight_params) if solve is None else solve(site, weight, weight_params)
            )
            release_pages()
        elif site.role == "bias":
            bias = bias_codes(site, weight_of(site, tensors[site.tensor]), qparams)
            if isinstance(bias, Refusal):
                refusals.append(bias)
            else:
                codes[site.key], scales[site.key] = bias
    unfit_weights = {site.key for site in sites if site.role == "weight" and site.key not in qparams}
    left = unread(plan, qparams, unfit_weights)
    activations = {site.key: ranges[site.key] for site in plan.of_role("activation") if site.key in ranges}
    return Solution(
        qparams,
        codes,
        activations,
        tuple(refusals),
        bias_scales=scales,
        notes=tuple(notes),
        unread=left,
        constants=constants,
    )


def weights_alone(graph: Graph, plan: Plan, solve: Solve | None = None) -> Solution:
    """Build the solution of a plan that measures nothing because no activation is quantized.

    Raises:
        DataError: the plan quantizes activations, which need data.
        NumericError: a weight holds NaN or Inf.
    """
    if plan.of_role("activation"):
        raise DataError("the plan quantizes activations, whose ranges need calibration data: give some")
    return solution_of(plan, tensors_by_name(graph), {}, solve)
