"""Finds batch norms that can be tuned, folded or not, and computes the changes of their layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from sbonnx.calib.qparams.safe_scales import limits_for
from sbonnx.calib.qparams.solve import scale_type
from sbonnx.correct import biases_of
from sbonnx.correct.normals import CHANNELS, normal_of
from sbonnx.graph import Constant, Graph, Node, Normal
from sbonnx.graph.query import constant, rank, readers, scopes
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array, QParams, ScaleLimits

WHAT: Final = "tune batch norm"
MEAN_ALONE: Final = "tune the variance of a batch norm"


@dataclass(frozen=True)
class Change:
    """Change of a solution by batch-norm tuning.

    Attributes:
        constants: new values by tensor name.
        qparams: new scales by site key.
    """

    constants: Mapping[str, Array]
    qparams: Mapping[str, QParams]


@final
@dataclass(frozen=True)
class NormalizedLayer:
    """A linear layer with a folded batch norm.

    Attributes:
        tensor: its output, normalized along axis 1.
        normal: statistics of the output according to the batch norm.
        rank: of the tensor.
        bias: the constant that compensates the mean.
        weight: the weight constant.
        out_axis: axis of output channels in the weight; None if channels have no separate slices.
        site: of the weight; None if it stays float.
        limits: smallest and largest allowed scale of the weight.
        scale_type: storage type of its scales.
        why_fixed: why its variance cannot be tuned, or None.
    """

    tensor: str
    normal: Normal
    rank: int
    bias: Constant
    weight: Constant
    out_axis: int | None
    site: Site | None
    limits: ScaleLimits
    scale_type: Any
    why_fixed: Reason | None

    def allowed(self, factor: Array, solution: Solution) -> Array:
        """Limit `factor` (C,) to what the scales of the weight can represent."""
        if self.why_fixed is not None or self.out_axis is None:
            return np.ones_like(factor)
        if self.site is None:
            return factor
        scale = solution.qparams[self.site.key].scale.astype(np.float64)
        others = tuple(axis for axis in range(scale.ndim) if scale.ndim > 1 and axis != self.out_axis)
        least, most = self.limits.least / scale.min(axis=others), self.limits.most / scale.max(axis=others)
        return np.asarray(np.clip(factor, np.minimum(least, 1.0), np.maximum(most, 1.0)))

    def change(self, factor: Array, shift: Array, solution: Solution) -> Change:
        """Return the change that makes the output ``factor * output + shift``, each (C,), for an allowed factor.

        The codes of the weight are unchanged: with one scale per output channel the factor is applied to the scale.
        """
        old = solution.constants.get(self.bias.name)
        bias = _values(self.bias) if old is None else old
        wide = factor * bias.astype(np.float64).reshape(-1) + shift
        constants = {self.bias.name: wide.reshape(bias.shape).astype(bias.dtype)}
        if self.why_fixed is not None or (factor == 1).all() or self.out_axis is None:
            return Change(constants, {})
        along = factor.reshape([-1 if axis == self.out_axis else 1 for axis in range(len(self.weight.shape))])
        if self.site is not None:
            qparams = solution.qparams[self.site.key]
            scale = qparams.scale.astype(np.float64) * (along if qparams.spec.block_size is not None else factor)
            stored = scale.astype(self.scale_type).astype(qparams.scale.dtype)
            return Change(constants, {self.site.key: replace(qparams, scale=stored)})
        corrected = solution.constants.get(self.weight.name)
        weight = _values(self.weight) if corrected is None else corrected
        constants[self.weight.name] = (weight.astype(np.float64) * along).astype(weight.dtype)
        return Change(constants, {})


@final
@dataclass(frozen=True)
class Norm:
    """A batch norm that is not folded.

    Attributes:
        tensor: its output, normalized along axis 1.
        normal: its statistics of the output.
        rank: of the tensor.
        node: the node; nothing else reads its mean and variance.
    """

    tensor: str
    normal: Normal
    rank: int
    node: Node

    why_fixed = None

    def allowed(self, factor: Array, solution: Solution) -> Array:
        """Return `factor` unchanged; there is no limit."""
        del solution
        return factor

    def change(self, factor: Array, shift: Array, solution: Solution) -> Change:
        """Return mean and variance that make the output ``factor * output + shift``, each (C,).

        With ``g = gamma / sqrt(variance + eps)`` and output ``g (x - mean) + beta``: ``variance' + eps = (variance +
        eps) / factor^2`` and ``mean' = mean - (shift + (factor - 1) beta) / (factor g)``. Channels with gamma 0 are
        unchanged.
        """
        del solution
        gamma, beta, mean, variance = (_values(tensor).astype(np.float64) for tensor in self.node.inputs[1:5])
        epsilon = float(self.node.attrs.get("epsilon", 1e-5))
        g = gamma / np.sqrt(variance + epsilon)
        moves = (g != 0) & (factor > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.where(moves, (variance + epsilon) / factor**2 - epsilon, variance)
            centre = np.where(moves, mean - (shift + (factor - 1) * beta) / (factor * g), mean)
        tensors = {}
        for tensor, values in zip(self.node.inputs[3:5], (centre, np.maximum(spread, 0.0)), strict=True):
            tensors[tensor.name] = values.astype(_values(tensor).dtype)
        return Change(tensors, {})


Tunable = NormalizedLayer | Norm


def tunables(graph: Graph, plan: Plan, solution: Solution) -> tuple[list[Tunable], list[Refusal]]:
    """Return the tunable tensors of the main graph, in order, and refusals for batch norms that cannot be tuned."""
    normals = graph.info.normals
    sites = {reader: site for site in plan.of_role("weight") for reader in site.readers if site.key in solution.codes}
    members = Counter(site.group for site in plan.sites)
    shared = {group for group, count in members.items() if count > 1}
    biases = biases_of(graph)
    norms: list[Tunable] = []
    refusals: list[Refusal] = []
    said = set()
    for scope, body in scopes(graph):
        for node in body.nodes:
            normal = normals.get(node.outputs[0].name) if node.outputs else None
            if normal is None or not (node.op in LINEAR or node.op == "BatchNormalization"):
                continue
            said.add(normal.node)
            tunable = (
                _tunable(node, normal, biases, sites, shared, plan)
                if scope == ""
                else Reason("in-branch", "it is in a branch")
            )
            if isinstance(tunable, Reason):
                refusals.append(Refusal(WHAT, normal.node, tunable))
                continue
            norms.append(tunable)
            if tunable.why_fixed is not None:
                refusals.append(Refusal(MEAN_ALONE, normal.node, tunable.why_fixed))
    why = Reason("norm-was-folded", "it was folded into the layer after it, whose inputs have no scales of their own")
    lost = dict.fromkeys(normal.node for normal in normals.values() if normal.node not in said)
    return norms, [*refusals, *(Refusal(WHAT, name, why) for name in lost)]


def _tunable(
    node: Node,
    normal: Normal,
    biases: Mapping[str, Constant],
    sites: Mapping[Reader, Site],
    shared: Collection[str],
    plan: Plan,
) -> Tunable | Reason:
    """Return the tunable of one batch norm, or why it cannot be tuned."""
    tensor = node.outputs[0]
    dims = rank(tensor)
    if dims is None:
        return Reason("rank-not-known", "the rank of its output is not known")
    if node.op not in LINEAR:
        own = normal_of(node) is not None and all(len(readers(read)) == 1 for read in node.inputs[3:5])
        return (
            Norm(tensor.name, normal, dims, node)
            if own
            else Reason("statistics-computed", "its mean or variance is computed, or read elsewhere")
        )
    kind = LINEAR[node.op]
    weight, bias = node.inputs[kind.weight], biases.get(node.name)
    if bias is None or not isinstance(weight, Constant):
        return Reason("no-bias-for-mean", f"'{node.name}' has no separate bias for the mean")
    if tuple(bias.shape)[-1] != len(normal.mean):
        return Reason(
            "outputs-do-not-fit-channels",
            f"'{node.name}' has {tuple(bias.shape)[-1]} outputs for {len(normal.mean)} channels",
        )
    site = sites.get(Reader(node.name, kind.weight))
    layer = LinearLayer.of(node)
    assert isinstance(layer, LinearLayer)
    axis = None if node.op == "ConvTranspose" and layer.group != 1 else layer.out_axis
    limits, kind_of_scale = limits_for(plan, weight), scale_type(weight, plan)
    why = _why_fixed(node, weight, axis, site, shared)
    return NormalizedLayer(tensor.name, normal, dims, bias, weight, axis, site, limits, kind_of_scale, why)


def _why_fixed(
    node: Node, weight: Constant, axis: int | None, site: Site | None, shared: Collection[str]
) -> Reason | None:
    """Return why the outputs of a layer cannot be scaled separately, or None."""
    if axis is None:
        return Reason("groups-share-weight", f"groups of '{node.name}' share the slices of its weight along outputs")
    if len(readers(weight)) > 1:
        return Reason("weight-is-shared", f"'{weight.name}' is read by several nodes")
    if site is None:
        return None
    if site.group in shared:
        return Reason("shares-scales", f"'{weight.name}' shares its scales")
    spec = site.spec
    along = spec.axis is not None and spec.axis % len(weight.shape) == axis
    if along != (spec.block_size is None):
        return Reason("one-scale-for-outputs", f"'{weight.name}' has one scale for several outputs")
    return None


def _values(tensor: object) -> Array:
    """Return the values of a tensor that is known to be constant."""
    assert isinstance(tensor, Constant)
    values = constant(tensor)
    assert values is not None
    return values


__all__ = ["CHANNELS", "Change", "Norm", "NormalizedLayer", "Tunable", "tunables"]
