"""Values passed between planning, calibration and insertion. All frozen and printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from sbonnx.planning.magnitudes import Magnitudes
from sbonnx.report import Note, Refusal
from sbonnx.report.notebook import Result
from sbonnx.spec import ANY_SCALE, Array, Bounds, QParams, QuantSpec, ScaleLimits, ScaleRule
from sbonnx.system.cpu import CPUS

Role = Literal["activation", "weight", "bias"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
FloatName = Literal["fp32", "fp16", "bf16"]

INTEGER_RECURRENT: Final = "recurrent integer"
"""Rule of the weights of recurrent ops that compute in integers."""

STORED: Final = "stored"
"""Rule of the weights of linear ops that compute in float, stored in integers."""

PLAN_FORMAT: Final = 1
"""Version of the JSON form of plans."""


@dataclass(frozen=True, order=True)
class Reader:
    """One use of a tensor: input `index` of the node named `node`."""

    node: str
    index: int


@dataclass(frozen=True)
class ObserverChoice:
    """Observer of a tensor: a name in `OBSERVERS` and its keyword arguments."""

    name: str = "minmax"
    arguments: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundingChoice:
    """Rounding method of a weight: a name in `ROUNDERS` and its keyword arguments.

    Attributes:
        scale: source of the scale. "observer": the observer's range; "search": the scale of least output error by the
            second moments; "hqq": the scale and zero point found by HQQ.
    """

    name: str = "nearest"
    arguments: Mapping[str, float | str | bool] = field(default_factory=dict)
    scale: Literal["observer", "search", "hqq"] = "observer"


@dataclass(frozen=True)
class GivenParams:
    """Scales and zero points that are set, not computed: one, or one for each channel."""

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]

    def covered(self, spec: QuantSpec) -> tuple[float, float]:
        """Return the lowest and highest value that a type represents with them, over all channels."""
        pairs = list(zip(self.scale, self.zero_point, strict=True))
        return min((spec.qmin - zero) * scale for scale, zero in pairs), max(
            (spec.qmax - zero) * scale for scale, zero in pairs
        )


@dataclass(frozen=True)
class Site:
    """One planned Q/DQ pair.

    Attributes:
        key: unique in the plan; the tensor's name, with a suffix if one tensor has several sites.
        tensor: name of the tensor in the simplified and fused graph, unique over all scopes.
        role: activation (observed on data), weight (constant) or bias (scale derived from `follows`).
        spec: the integer type.
        readers: uses that get the dequantized tensor; every other use keeps the float one.
        why: description of the rule that placed it, for people.
        group: sites of one group share one scale and zero point, computed from the union of their ranges.
        observer: how the range is measured.
        rounding: how a weight is rounded.
        fixed: a range fixed by hand, or prescribed by the backend, instead of a measured one.
        follows: for a bias, the keys of the activation and weight whose scales are multiplied.
        scope: "" for the main graph, else the path of the branch: "node/attribute[/node/attribute]".
        rule: name of the backend's rule that placed it, or "linear", "linear output", "weight", "bias".
        leaves: the tensor is an output of the graph, which gets the dequantized tensor as well.
        given: scales and zero points that are set; `fixed` is the range that they cover.
        after: key of the site of the same tensor whose dequantized values this one quantizes; None: the float values.
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
    leaves: bool = False
    given: GivenParams | None = None
    after: str | None = None


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """Sites to quantize, and refusals.

    Attributes:
        sites: in topological order of the tensors.
        refusals: requested or usual quantizations that are not done.
        backend: name of the backend that the plan was made for.
        scale_rule: see `sbonnx.spec.params_from_bounds`.
        weights_alone: a weight may be quantized while the data input of the same op stays float.
        float_type: type that the file's float32 tensors are converted to; scales are rounded to it.
        weights: how weights are stored: integer codes + DQ, or float + Q + DQ.
        scales: smallest and largest scale that the runtime supports.
        cpu: key of `sbonnx.system.cpu.CPUS`, the kind of CPU that the file is for; "" if kernels of the backend
            compute the same on all.
        kernel_costs: kind of CPU whose bundled table of kernel costs decided what stays float, or the digest of another
            table; "" without one, and for other modes than static.
    """

    json_keys: ClassVar = ("format", ...)
    frame_of: ClassVar = "sites"

    sites: tuple[Site, ...]
    refusals: tuple[Refusal, ...] = ()
    backend: str = "virtual"
    scale_rule: ScaleRule = "exact"
    weights: Literal["codes", "qdq"] = "codes"
    weights_alone: bool = True
    float_type: FloatName = "fp32"
    scales: ScaleLimits = ANY_SCALE
    cpu: str = ""
    kernel_costs: str = ""

    @property
    def format(self) -> int:
        """Version of the plan's form in JSON."""
        return PLAN_FORMAT

    @property
    def exact_products(self) -> bool:
        """Whether the kernels that the file is for add 8-bit products without saturation."""
        return not self.cpu or CPUS[self.cpu].exact

    def of_role(self, role: Role) -> tuple[Site, ...]:
        """Return the sites of one role, in order."""
        return tuple(site for site in self.sites if site.role == role)

    def by_key(self) -> dict[str, Site]:
        """Return the sites by key."""
        return {site.key: site for site in self.sites}


@dataclass(frozen=True)
class Gain:
    """Layer output error after rounding one weight.

    Attributes:
        rounding: name in `ROUNDERS`.
        loss: mean squared error of the layer's output, summed over its channels.
        nearest: that of round-to-nearest on the same inputs.
    """

    rounding: str
    loss: float
    nearest: float


@dataclass(frozen=True)
class Solution:
    """Calibration result: scales, zero points, quantized weights and ranges.

    Attributes:
        qparams: scale and zero point by site key.
        codes: integer codes of weights and biases by site key.
        bias_scales: float32 scales of biases by site key, () or (C,): product of the two scales that `follows` names.
        bounds: observed range of activations by site key, before it is converted to scales.
        refusals: sites that could not be solved (for example in a branch that never ran); they stay float.
        samples: number of calibration samples.
        notes: messages of the calibration, one sentence each.
        unread: uses that keep the float tensor although the plan quantizes them, because the weight of the same op
            stays float for lack of a safe scale.
        magnitudes: magnitude statistics of float tensors by name, if the plan asks for a narrower float type.
        constants: new values of float constants by tensor name, such as corrected biases.
        gains: by site key of the weights whose rounding used input activations.
        levels: accuracy level by node name, of block-wise products that must not have the recipe's.
    """

    qparams: Mapping[str, QParams]
    codes: Mapping[str, Array]
    bounds: Mapping[str, Bounds]
    refusals: tuple[Refusal, ...] = ()
    samples: int = 0
    bias_scales: Mapping[str, Array] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    unread: frozenset[Reader] = frozenset()
    magnitudes: Mapping[str, Magnitudes] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    gains: Mapping[str, Gain] = field(default_factory=dict)
    levels: Mapping[str, int] = field(default_factory=dict)

    def dequantized(self, site: Site, kind: Any) -> Array | None:
        """Return the dequantized weight or bias of `site` as an array of dtype `kind`; None if it has no codes.

        The product of a bias is rounded to float32 as DequantizeLinear does.
        """
        codes = self.codes.get(site.key)
        if codes is None:
            return None
        if site.role == "bias":
            return (codes.astype(np.float32) * self.bias_scales[site.key]).astype(kind)
        return self.qparams[site.key].dequantize(codes).astype(kind)

    def params(self, site: Site) -> QParams | None:
        """Return scale and zero point of an activation or weight; None if it stays float."""
        return self.qparams.get(site.key)
