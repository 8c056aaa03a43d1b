"""Variants of quantization: a solution, parts of it, or its sites at other bit widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

from sbonnx.calib.qparams.solve import Solve, fixed_bounds, qparams_of, weight_bounds, weight_of
from sbonnx.calib.quantized.fake_quant import QuantView
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.planning.types import Plan, Reader, Role, Site, Solution
from sbonnx.spec import Array, QParams

Part = Literal["both", "weights", "activations"]
PARTS: Final[dict[Part, frozenset[Role]]] = {
    "both": frozenset({"weight", "activation", "bias"}),
    "weights": frozenset({"weight"}),
    "activations": frozenset({"activation"}),
}
"""Roles that are quantized in each part. A bias is quantized only if both scales of its product are used."""

WIDTHS: Final = (2, 16)
"""Smallest and largest bit width."""


@dataclass(frozen=True, eq=False)
class Variant:
    """Uses that are quantized, and their numbers.

    Attributes:
        uses: the site of each use that is quantized.
        view: scales and quantized constants.
    """

    uses: Mapping[Reader, Site]
    view: QuantView


def uses_of(plan: Plan, solution: Solution, roles: frozenset[Role] = PARTS["both"]) -> dict[Reader, Site]:
    """Return the site of each use, for the sites that were solved."""
    solved = solution.qparams.keys() | solution.bias_scales.keys()
    return {
        reader: site
        for site in plan.sites
        if site.role in roles and site.key in solved
        for reader in site.readers
        if reader not in solution.unread
    }


def sites_by_layer(plan: Plan, solution: Solution) -> dict[tuple[str, Role], list[Site]]:
    """Return the sites of the main graph that a node reads, by node and role, those with fewest bits first."""
    sites: dict[tuple[str, Role], list[Site]] = {}
    for reader, site in sorted(uses_of(plan, solution).items(), key=lambda pair: pair[1].spec.bits):
        if not site.scope and site.key in solution.qparams:
            sites.setdefault((reader.node, site.role), []).append(site)
    return sites


def solved(plan: Plan, solution: Solution, part: Part = "both") -> Variant:
    """Return a solution, or a part of it. New values of constants, such as corrected biases, are of the weights."""
    view = replace(solution, constants={}) if part == "activations" else solution
    return Variant(uses_of(plan, solution, PARTS[part]), view)


@dataclass(frozen=True, order=True)
class Candidate:
    """Bit widths of a layer's weights and activations, None for float.

    Raises:
        RecipeError: a width is not supported.
    """

    weight: int | None
    activation: int | None

    def __post_init__(self) -> None:
        for bits in (self.weight, self.activation):
            if bits is not None and not WIDTHS[0] <= bits <= WIDTHS[1]:
                raise RecipeError(
                    f"there are no codes of {bits} bits: use {WIDTHS[0]} to {WIDTHS[1]}, or None for float"
                )

    @property
    def label(self) -> str:
        """Short name such as ``w4a8``, with ``f`` for float: ``w4af``."""
        return f"w{self.weight or 'f'}a{self.activation or 'f'}"


@final
class AtBits:
    """Numbers of a solution's sites at other bit widths.

    Ranges of activations are those of the solution. A weight's range is measured at its new width by its observer, and
    the weight is rounded by `solve`. At its width in the solution, a weight has the solution's codes. Biases stay
    float, including those corrected for the rounding at another width.

    Args:
        solve: rounds a weight; None: round to nearest.
    """

    constants: Mapping[str, Array] = {}

    def __init__(
        self, graph: Graph, plan: Plan, solution: Solution, candidate: Candidate, solve: Solve | None = None
    ) -> None:
        self._plan, self._solution, self._candidate, self._solve = plan, solution, candidate, solve
        self._tensors = tensors_by_name(graph)
        self._params: dict[str, QParams] = {}

    def dequantized(self, site: Site, kind: Any) -> Array | None:
        """Return a weight rounded at the candidate's width."""
        bits, tensor = self._candidate.weight, self._tensors[site.tensor]
        if bits is None:
            return None
        if bits == site.spec.bits and site.key in self._solution.codes:
            return self._solution.dequantized(site, kind)
        site, weight = self._site(site, bits), weight_of(site, tensor)
        bounds = weight_bounds(site, weight, self._plan.scale_rule)
        if site.fixed is not None:
            bounds = fixed_bounds(site, tensor)
        qparams = qparams_of(site, bounds, tensor, self._plan)
        codes = qparams.quantize(weight) if self._solve is None else self._solve(site, weight, qparams)
        return qparams.dequantize(codes).astype(kind)

    def params(self, site: Site) -> QParams | None:
        """Return scale and zero point of an activation at the candidate's width."""
        bits = self._candidate.activation
        if bits is not None and site.key not in self._params:
            qparams = self._solution.qparams[site.key]
            if bits != qparams.spec.bits:
                bounds = self._solution.bounds.get(site.key, qparams.limits)
                qparams = qparams_of(self._site(site, bits), bounds, self._tensors[site.tensor], self._plan)
            self._params[site.key] = qparams
        return None if bits is None else self._params[site.key]

    @staticmethod
    def _site(site: Site, bits: int) -> Site:
        """Return the site at another width, as integer type if it was fp8."""
        return replace(site, spec=replace(site.spec, bits=bits, kind="int"))


def at_bits(graph: Graph, plan: Plan, solution: Solution, candidate: Candidate, solve: Solve | None = None) -> Variant:
    """Return the sites of a solution at other bit widths, see `AtBits`."""
    uses = uses_of(plan, solution, PARTS["weights"] | PARTS["activations"])
    return Variant(uses, AtBits(graph, plan, solution, candidate, solve))


def by_candidate(plan: Plan, solution: Solution, candidate: Candidate) -> Variant:
    """Return what one candidate quantizes, from a solution for the whole network at that candidate."""
    if candidate.weight is None and candidate.activation is None:
        return Variant({}, replace(solution, constants={}))
    if candidate.activation is None:
        return solved(plan, solution, "weights")
    return solved(plan, solution, "both" if candidate.weight is not None else "activations")
