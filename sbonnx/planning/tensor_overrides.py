"""Overrides of single tensors: applied to the sites of a plan, and those that describe a solved plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sbonnx.backends import Backend
from sbonnx.errors import RecipeError
from sbonnx.graph import Tensor, query
from sbonnx.planning.override_file import TensorOverride, type_name
from sbonnx.planning.types import GivenParams, Plan, Site, Solution
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Bounds, QuantSpec, params_from_bounds

WHAT = "override quantization"
"""Title of refusals."""


def overridden(
    sites: Iterable[Site], overrides: Mapping[str, TensorOverride], tensors: Mapping[str, Tensor], backend: Backend
) -> tuple[tuple[Site, ...], tuple[Refusal, ...]]:
    """Apply overrides to sites.

    Args:
        tensors: of the graph, by name.
        backend: may prescribe scales in the overriding type.

    Returns:
        The sites, those of converted types behind the sites that they convert, and overrides without effect.

    Raises:
        RecipeError: an override does not fit its tensor.
    """
    changed: list[Site] = []
    groups: dict[str, list[str]] = {}
    for site in sites:
        groups.setdefault(site.group, []).append(site.key)
        override = overrides.get(site.tensor)
        if override is None or site.role == "bias":
            changed.append(site)
        else:
            site = replace(site, spec=site.spec.unpaired())
            changed += _changed(site, override, tensors[site.tensor], backend)
    by_key = {site.key: site for site in changed}
    shared = {
        key: group for group, keys in groups.items() if len({by_key[key].spec for key in keys}) == 1 for key in keys
    }
    read = {
        (site.after, reader.node): site.key for site in changed if site.after is not None for reader in site.readers
    }
    result = []
    for site in changed:
        if site.role == "bias" and site.follows is not None:
            data, weight = site.follows
            axis = None if by_key[weight].spec.axis is None else 0
            follows = read.get((data, site.readers[0].node), data), weight
            site = replace(site, spec=replace(site.spec, axis=axis), follows=follows)
        elif site.role == "activation" and not site.given:
            site = replace(site, group=shared.get(site.key, site.group))
        result.append(site)
    quantized = {site.tensor for site in result if site.role != "bias"}
    refusals = [
        Refusal(WHAT, tensor, Reason("override-not-used", "it is not quantized, was fused away, or is a bias"))
        for tensor in overrides
        if tensor not in quantized
    ]
    refusals += [
        Refusal(
            WHAT,
            tensor,
            Reason("reduce-range-without-effect", "reduce_range is for kernels that saturate: weights keep their bits"),
        )
        for tensor, override in overrides.items()
        if override.reduce_range
    ]
    return tuple(result), tuple(refusals)


def share_given(sites: Sequence[Site]) -> tuple[Site, ...]:
    """Give set scales to every site that shares a scale with a site of one."""
    given = {site.group: site for site in sites if site.given is not None}
    return tuple(
        replace(site, spec=given[site.group].spec, given=given[site.group].given, fixed=given[site.group].fixed)
        if site.group in given and site.given is None and site.role != "bias"
        else site
        for site in sites
    )


def _changed(site: Site, override: TensorOverride, tensor: Tensor, backend: Backend) -> list[Site]:
    """Return a site with its override, and the site that converts it."""
    base = _prescribed(_with(site, override, tensor), site, tensor, backend)
    if override.convert is None:
        return [base]
    if site.role == "weight":
        raise RecipeError(f"TENSOR_OVERRIDES: '{site.tensor}' is a constant, which 'convert' is not for")
    chosen = [reader for reader in site.readers if override.readers is None or reader.node in override.readers]
    if not chosen:
        return [base]
    key = f"{site.key}#converted"
    converted = replace(site, key=key, group=key, leaves=False, fixed=None, readers=tuple(chosen), after=base.key)
    kept = tuple(reader for reader in site.readers if reader not in chosen)
    return [replace(base, readers=kept), _with(converted, override.convert, tensor)]


def _prescribed(site: Site, before: Site, tensor: Tensor, backend: Backend) -> Site:
    """Return an overridden site with the scale that the backend prescribes for its type, unless a range is set."""
    producer = query.producer(tensor)
    if producer is None or site.role == "weight" or (site.given, site.fixed) != (before.given, before.fixed):
        return site
    if site.fixed is not None and site.given is None:
        return site
    params = backend.numbers.output_params(producer, site.spec)
    return replace(site, given=None, fixed=None) if params is None else _given(site, (params[0],), (params[1],))


def _with(site: Site, override: TensorOverride, tensor: Tensor) -> Site:
    """Return a site with type, axis and range or scale of an override."""
    where = f"TENSOR_OVERRIDES: '{site.tensor}'"
    spec = _spec(site, override, tensor)
    symmetric = site.spec.symmetric if override.symmetric is None else override.symmetric
    if override.scale:
        symmetric = all(zero == replace(spec, symmetric=True).centre for zero in override.zero_point)
    spec = replace(spec, symmetric=symmetric)
    own = spec != site.spec and site.group != site.key
    site = replace(site, spec=spec, group=site.key if own else site.group)
    channels = 1 if spec.axis is None else tensor.shape[spec.axis]
    for values in (override.scale, override.ranges):
        if values and len(values) not in (1, channels):
            raise RecipeError(f"{where} has {channels} channels along axis {spec.axis}, and {len(values)} overrides")
    if override.ranges and len(override.ranges) == 1:
        return replace(site, fixed=override.ranges[0])
    if override.ranges:
        bounds = Bounds(*(np.asarray(ends, np.float32) for ends in zip(*override.ranges, strict=True)))
        qparams = params_from_bounds(bounds, spec)
        return _given(site, qparams.scale.tolist(), qparams.zero_point.tolist())
    if not override.scale:
        return site
    if not all(spec.qmin <= zero <= spec.qmax for zero in override.zero_point):
        raise RecipeError(f"{where} has a zero point outside {spec.label()}, {spec.qmin} to {spec.qmax}")
    return _given(site, override.scale, override.zero_point)


def _spec(site: Site, override: TensorOverride, tensor: Tensor) -> QuantSpec:
    bits = site.spec.bits if override.bits is None else override.bits
    signed = site.spec.signed if override.signed is None else override.signed
    axis = site.spec.axis
    if override.axis is not None:
        if site.role != "weight":
            raise RecipeError(f"TENSOR_OVERRIDES: '{site.tensor}' is no constant, and 'axis' is for constants")
        rank = len(tensor.shape)
        if not -rank <= override.axis < rank:
            raise RecipeError(f"TENSOR_OVERRIDES: '{site.tensor}' has {rank} axes, and none {override.axis}")
        axis = override.axis % rank
    elif override.scale or override.ranges:
        axis = None
    return QuantSpec(bits=bits, signed=signed, symmetric=site.spec.symmetric, axis=axis)


def _given(site: Site, scale: Sequence[float], zero_point: Sequence[int]) -> Site:
    """Return a site with fixed scales and zero points, and the range that they cover."""
    given = GivenParams(tuple(scale), tuple(zero_point))
    rounding = replace(site.rounding, scale="observer")
    return replace(site, given=given, fixed=given.covered(site.spec), rounding=rounding)


def overrides_of(plan: Plan, solution: Solution) -> dict[str, list[dict[str, Any]]]:
    """Return the overrides with which onnxruntime's quantizer computes the scales of a solution.

    Biases, whose scales are products, and tensors in branches are left out.
    """
    rows_by_tensor: dict[str, list[dict[str, Any]]] = {}
    for site in plan.sites:
        qparams = solution.qparams.get(site.key)
        if qparams is None or site.scope or site.role == "bias":
            continue
        rows: list[dict[str, Any]] = [
            {"quant_type": type_name(site.spec), "scale": float(scale), "zero_point": int(zero)}
            for scale, zero in zip(np.ravel(qparams.scale), np.ravel(qparams.zero_point), strict=True)
        ]
        if site.spec.axis is not None:
            rows[0]["axis"] = site.spec.axis
        if site.after is not None:
            nodes = sorted({reader.node for reader in site.readers})
            rows_by_tensor[site.tensor][0]["convert"] = {**rows[0], "recv_nodes": nodes}
        elif site.tensor not in rows_by_tensor:
            rows_by_tensor[site.tensor] = rows
    return rows_by_tensor
