"""What a node reads in place of its float inputs: by a solution, by parts of it, or by other widths."""

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
"""What is quantized in each part. A bias has codes only where both scales that it multiplies are used."""

WIDTHS: Final = (2, 16)
"""Fewest and most bits of a code."""


class Numbers(Protocol):
    """What stands in the place of float values."""

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """What a constant means there, of its type and shape; None: what it is in float."""

    def params(self, reader: Reader) -> QParams | None:
        """Scale and zero point that an activation is read through; None: it is read in float."""


def uses_of(plan: Plan, solution: Solution, roles: frozenset[Role] = PARTS["both"]) -> dict[Reader, Site]:
    """The site that each use reads through, of those that were solved."""
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
    """A solution, or the weights or activations of it."""

    def __init__(self, plan: Plan, solution: Solution, part: Part = "both") -> None:
        self.uses = uses_of(plan, solution, PARTS[part])
        self._solution = solution
        self._corrected = part != "activations"

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """See `Numbers.constant`. What was corrected for the rounding of weights counts to the weights."""
        site, solution = self.uses.get(reader), self._solution
        corrected = solution.constants.get(tensor.name) if self._corrected else None
        if site is None or site.role == "activation":
            return None if corrected is None else corrected.astype(dtype(tensor))
        if site.role == "bias":
            return (solution.codes[site.key].astype("float32") * solution.bias_scales[site.key]).astype(dtype(tensor))
        codes, qparams = solution.codes.get(site.key), solution.qparams[site.key]
        values = qparams.fake_quant(weight_of(site, tensor)) if codes is None else qparams.dequantize(codes)
        return values.astype(dtype(tensor))

    def params(self, reader: Reader) -> QParams | None:
        """See `Numbers.params`."""
        site = self.uses.get(reader)
        return None if site is None or site.role != "activation" else self._solution.qparams[site.key]


@dataclass(frozen=True, order=True)
class Candidate:
    """Widths that a layer may have: bits of its weights and activations, None for float.

    Raises:
        RecipeError: a width that no code has.
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
        """Such as ``w4a8``; ``f`` stands for float: ``w4af``."""
        return f"w{self.weight or 'f'}a{self.activation or 'f'}"


@final
class AtBits:
    """The sites of a solution at other widths.

    Ranges of activations are those of the solution; a weight's range is measured at its new width, by its observer,
    and it is rounded by `solve`. At the width that a weight has in the solution, it has its codes. Biases stay float,
    those corrected for the rounding of another width as well.

    Args:
        solve: rounds a weight; None: to the nearest code.
    """

    def __init__(
        self, graph: Graph, plan: Plan, solution: Solution, candidate: Candidate, solve: Solve | None = None
    ) -> None:
        self.uses = uses_of(plan, solution, frozenset({"weight", "activation"}))
        self._plan, self._solution, self._candidate, self._solve = plan, solution, candidate, solve
        self._tensors = tensors_by_name(graph)
        self._params: dict[str, QParams] = {}

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """See `Numbers.constant`."""
        site, bits = self.uses.get(reader), self._candidate.weight
        if site is None or site.role != "weight" or bits is None:
            return None
        if bits == site.spec.bits and site.key in self._solution.codes:
            return self._solution.qparams[site.key].dequantize(self._solution.codes[site.key]).astype(dtype(tensor))
        site, weight = self._site(site, bits), weight_of(site, tensor)
        bounds = weight_bounds(site, weight, self._plan.scale_rule)
        if site.fixed is not None:
            bounds = fixed_bounds(site, tensor)
        qparams = qparams_of(site, bounds, tensor, self._plan)
        codes = qparams.quantize(weight) if self._solve is None else self._solve(site, weight, qparams)
        return qparams.dequantize(codes).astype(dtype(tensor))

    def params(self, reader: Reader) -> QParams | None:
        """See `Numbers.params`."""
        site, bits = self.uses.get(reader), self._candidate.activation
        if site is None or site.role != "activation" or bits is None:
            return None
        if site.key not in self._params:
            self._params[site.key] = self._at(site, bits)
        return self._params[site.key]

    def _at(self, site: Site, bits: int) -> QParams:
        """An activation's numbers at another width."""
        known = self._solution.qparams[site.key]
        if bits == known.spec.bits:
            return known
        tensor = self._tensors[site.tensor]
        bounds = self._solution.bounds.get(site.key, known.limits)
        return qparams_of(self._site(site, bits), bounds, tensor, self._plan)

    @staticmethod
    def _site(site: Site, bits: int) -> Site:
        """The site at another width; in integers where it had floats of 8 bits."""
        return replace(site, spec=replace(site.spec, bits=bits, kind="int"))


@final
class ByCandidate:
    """Solutions of whole networks, one for each candidate, each read for itself."""

    def __init__(self, plan: Plan, solution: Solution, candidate: Candidate) -> None:
        parts: dict[tuple[bool, bool], Part] = {(True, False): "weights", (False, True): "activations"}
        wanted = (candidate.weight is not None, candidate.activation is not None)
        self._solved = Solved(plan, solution, parts.get(wanted, "both"))
        self.uses: Mapping[Reader, Site] = self._solved.uses if any(wanted) else {}

    def constant(self, reader: Reader, tensor: Constant) -> Array | None:
        """See `Numbers.constant`."""
        return self._solved.constant(reader, tensor) if self.uses else None

    def params(self, reader: Reader) -> QParams | None:
        """See `Numbers.params`."""
        return self._solved.params(reader) if self.uses else None
