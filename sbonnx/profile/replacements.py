"""Replacement values for the float inputs of a node: from a solution, from parts of it, or at other bit widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, final

from sbonnx.calib.qparams.solve import Solve, fixed_bounds, qparams_of, weight_bounds, weight_of
from sbonnx.errors import RecipeError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import dtype, tensors_by_name
from sbonnx.plan.types import Plan, Reader, Role, Site, Solution
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


class Replacements(Protocol):
    """Source of quantized replacements for float values."""

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """Return the replacement of a constant, with its type and shape; None keeps the float value."""

    def params(self, reader: Reader) -> QParams | None:
        """Return scale and zero point of an activation; None keeps it in float."""


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


@final
class Solved:
    """Quantized values of a solution, or of only its weights or activations."""

    def __init__(self, plan: Plan, solution: Solution, part: Part = "both") -> None:
        self.uses = uses_of(plan, solution, PARTS[part])
        self._solution = solution
        self._corrected = part != "activations"

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """Return the quantized or corrected constant; corrections count as part of the weights."""
        site, solution = self.uses.get(reader), self._solution
        corrected = solution.constants.get(tensor.name) if self._corrected else None
        if site is None or site.role == "activation":
            return None if corrected is None else corrected.astype(dtype(tensor))
        values = solution.dequantized(site, dtype(tensor))
        if values is None:  # a solution without codes: rounded to nearest
            values = solution.qparams[site.key].fake_quant(weight_of(site, tensor)).astype(dtype(tensor))
        return values

    def params(self, reader: Reader) -> QParams | None:
        """Return scale and zero point of an activation, or None."""
        site = self.uses.get(reader)
        return None if site is None or site.role != "activation" else self._solution.qparams[site.key]


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
    """Quantized values of a solution's sites at other bit widths.

    Ranges of activations are those of the solution. A weight's range is measured at its new width by its observer, and
    the weight is rounded by `solve`. At its width in the solution, a weight has the solution's codes. Biases stay
    float, including those corrected for the rounding at another width.

    Args:
        solve: rounds a weight; None: round to nearest.
    """

    def __init__(
        self, graph: Graph, plan: Plan, solution: Solution, candidate: Candidate, solve: Solve | None = None
    ) -> None:
        self.uses = uses_of(plan, solution, frozenset({"weight", "activation"}))
        self._plan, self._solution, self._candidate, self._solve = plan, solution, candidate, solve
        self._tensors = tensors_by_name(graph)
        self._params: dict[str, QParams] = {}

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """Return a weight rounded at the candidate's width, or None."""
        site, bits = self.uses.get(reader), self._candidate.weight
        if site is None or site.role != "weight" or bits is None:
            return None
        if bits == site.spec.bits and site.key in self._solution.codes:
            return self._solution.dequantized(site, dtype(tensor))
        site, weight = self._site(site, bits), weight_of(site, tensor)
        bounds = weight_bounds(site, weight, self._plan.scale_rule)
        if site.fixed is not None:
            bounds = fixed_bounds(site, tensor)
        qparams = qparams_of(site, bounds, tensor, self._plan)
        codes = qparams.quantize(weight) if self._solve is None else self._solve(site, weight, qparams)
        return qparams.dequantize(codes).astype(dtype(tensor))

    def params(self, reader: Reader) -> QParams | None:
        """Return scale and zero point of an activation at the candidate's width, or None."""
        site, bits = self.uses.get(reader), self._candidate.activation
        if site is None or site.role != "activation" or bits is None:
            return None
        if site.key not in self._params:
            known = self._solution.qparams[site.key]
            if bits != known.spec.bits:
                bounds = self._solution.bounds.get(site.key, known.limits)
                known = qparams_of(self._site(site, bits), bounds, self._tensors[site.tensor], self._plan)
            self._params[site.key] = known
        return self._params[site.key]

    @staticmethod
    def _site(site: Site, bits: int) -> Site:
        """Return the site at another width, as integer type if it was fp8."""
        return replace(site, spec=replace(site.spec, bits=bits, kind="int"))


@final
class ByCandidate:
    """Quantized values of one candidate, from a solution for the whole network at that candidate."""

    def __init__(self, plan: Plan, solution: Solution, candidate: Candidate) -> None:
        parts: dict[tuple[bool, bool], Part] = {(True, False): "weights", (False, True): "activations"}
        wanted = (candidate.weight is not None, candidate.activation is not None)
        self._solved = Solved(plan, solution, parts.get(wanted, "both"))
        self.uses: Mapping[Reader, Site] = self._solved.uses if any(wanted) else {}

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """Return the quantized or corrected constant, or None."""
        return self._solved.constant(reader, tensor) if self.uses else None

    def params(self, reader: Reader) -> QParams | None:
        """Return scale and zero point of an activation, or None."""
        return self._solved.params(reader) if self.uses else None
