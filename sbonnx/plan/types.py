"""The values that pass between planning, calibration and insertion. All frozen, all printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sbonnx.plan.magnitudes import Magnitudes
from sbonnx.report import Refusal
from sbonnx.spec import ANY_SCALE, Array, Bounds, QParams, QuantSpec, ScaleLimits, ScaleRule

Role = Literal["activation", "weight", "bias"]
FloatName = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, order=True)
class Reader:
    """One use of a tensor: input `index` of the node called `node`."""

    node: str
    index: int


@dataclass(frozen=True)
class ObserverChoice:
    """Which observer watches a tensor: a name of `OBSERVERS` and its keyword arguments."""

    name: str = "minmax"
    arguments: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundingChoice:
    """How a weight becomes codes: a name of `ROUNDERS` and its keyword arguments.

    Attributes:
        scale: "observer": the range is what the observer says; "search": that of least output error by the moments.
    """

    name: str = "nearest"
    arguments: Mapping[str, float | str | bool] = field(default_factory=dict)
    scale: Literal["observer", "search", "hqq"] = "observer"


@dataclass(frozen=True)
class Site:
    """One Q/DQ pair to place.

    Attributes:
        key: unique in the plan; the tensor's name, with a suffix where one tensor has several sites.
        tensor: name of the tensor in the simplified and fused graph, unique over all scopes.
        role: activation (observed on data), weight (constant) or bias (scale follows from `follows`).
        spec: the integers it becomes.
        readers: the uses that get the dequantized tensor; every other use keeps the float one.
        why: the rule that put it here, for people.
        group: sites of one group have one scale and zero point, that of the union of their ranges.
        observer: how the range is measured.
        rounding: how a weight becomes codes.
        fixed: a range fixed by hand, instead of a measured one.
        follows: for a bias, the keys of the activation and weight whose scales it multiplies.
        scope: "" for the main graph, else the path of the branch: "node/attribute[/node/attribute]".
        rule: name of the backend's rule that put it here, or "linear", "linear output", "weight", "bias".
    """

    key: str
    tensor: str
    role: Role
    spec: QuantSpec
    readers: tuple[Reader, ...]
    why: str
    group: str
    observer: ObserverChoice = ObserverChoice()
    rounding: RoundingChoice = RoundingChoice()
    fixed: tuple[float, float] | None = None
    follows: tuple[str, str] | None = None
    scope: str = ""
    rule: str = ""


@dataclass(frozen=True)
class Plan:
    """What will be quantized, and what not.

    Attributes:
        sites: in topological order of the tensors.
        refusals: what was wished for or usual and is not done.
        backend: name of the backend the plan was made for.
        scale_rule: see `sbonnx.spec.params_from_bounds`.
        weights_alone: a weight may be quantized where the input beside it stays float.
        float_type: what the float32 tensors of the file become; scales are rounded to it.
        weights: how weights are stored: integer codes + DQ, or float + Q + DQ.
        scales: how small and how large they may be for the runtime.
    """

    sites: tuple[Site, ...]
    refusals: tuple[Refusal, ...] = ()
    backend: str = "virtual"
    scale_rule: ScaleRule = "exact"
    weights: Literal["codes", "qdq"] = "codes"
    weights_alone: bool = True
    float_type: FloatName = "fp32"
    scales: ScaleLimits = ANY_SCALE

    def of_role(self, role: Role) -> tuple[Site, ...]:
        """The sites of one role, in order."""
        return tuple(site for site in self.sites if site.role == role)

    def by_key(self) -> dict[str, Site]:
        """Sites by their key."""
        return {site.key: site for site in self.sites}


@dataclass(frozen=True)
class Gain:
    """What the rounding of one weight left of the error of its layer.

    Attributes:
        rounding: its name in `ROUNDERS`.
        loss: mean squared error of the layer's output, summed over its channels.
        nearest: that of the nearest codes on the same inputs.
    """

    rounding: str
    loss: float
    nearest: float


@dataclass(frozen=True)
class Solution:
    """What calibration found.

    Attributes:
        qparams: scale and zero point by site key.
        codes: integer codes of weights and biases by site key.
        bias_scales: float32 scales of biases by site key, () or (C,): product of those that the site follows.
        bounds: observed range of activations by site key, before rounding to scales.
        refusals: sites that could not be solved (a branch that never ran, ...): they stay float.
        samples: how many samples were seen.
        notes: what calibration has to say, one sentence each.
        unread: uses that keep the float tensor although the plan has them quantized: the weight beside them stays
            float for want of a safe scale.
        magnitudes: of the float tensors by name, where the plan asks for a narrower float type.
        constants: new values of float constants by tensor name, such as corrected biases.
        gains: by site key of the weights whose rounding looked at inputs.
    """

    qparams: Mapping[str, QParams]
    codes: Mapping[str, Array]
    bounds: Mapping[str, Bounds]
    refusals: tuple[Refusal, ...] = ()
    samples: int = 0
    bias_scales: Mapping[str, Array] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unread: frozenset[Reader] = frozenset()
    magnitudes: Mapping[str, Magnitudes] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    gains: Mapping[str, Gain] = field(default_factory=dict)
