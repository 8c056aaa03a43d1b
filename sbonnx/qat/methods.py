"""Selection of the training method of each fake-quant module: by argument, else layer by layer from the recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sbonnx.graph.query import node_by_name
from sbonnx.plan import Site
from sbonnx.qat.fakequant import METHODS
from sbonnx.recipe import Settings
from sbonnx.recipe.names import LEARNED, SideName
from sbonnx.recipe.schemes import UNIFORM
from sbonnx.report import Refusal
from sbonnx.stages.state import Prepared

DEFAULT: Final = "lsq"
"""Default method, if neither the call nor the recipe names one."""


@dataclass(frozen=True)
class LearningMethod:
    """A key of `METHODS`, and the initial clipping level of PACT (None: from the calibration)."""

    name: str
    alpha: float | None = None


@dataclass
class Methods:
    """Selects the method of each site.

    Attributes:
        prepared: graph, plan and recipe.
        weights, activations: method of every site of that role; None: from the recipe.
        refusals: methods that were not used because layers that share a fake-quant module ask for different ones.
    """

    prepared: Prepared
    weights: str | None = None
    activations: str | None = None
    refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nodes = node_by_name(self.prepared.graph)
        recipe = self.prepared.recipe
        self._trained = {"w": recipe.w.quantizer.type in LEARNED, "a": recipe.a.quantizer.type in LEARNED}

    def of(self, site: Site) -> LearningMethod:
        """Return the method of one site; if the recipe has different ones for its readers, that of the first reader."""
        side: SideName = "w" if site.role == "weight" else "a"
        given = self.weights if side == "w" else self.activations
        if given is not None:
            return LearningMethod(given)
        asked: dict[LearningMethod, str] = {}
        for reader in site.readers:
            node = self._nodes[reader.node]
            settings = self.prepared.recipe.settings(side, node=node.name, op=node.op, tensor=site.tensor)
            asked.setdefault(self._named(side, settings), node.name)
        first, *others = asked or {LearningMethod(DEFAULT): ""}
        for other in others:
            why = f"'{asked[other]}' reads the same tensor as '{asked[first]}', which asks for {first.name}"
            self.refusals.append(Refusal(f"train with {other.name}", site.tensor, why))
        return first

    def _named(self, side: SideName, settings: Settings) -> LearningMethod:
        """Return the method of these settings; `uniform` only if the recipe's type for this side is a learned one."""
        if settings.quantizer not in METHODS or (settings.quantizer == UNIFORM and not self._trained[side]):
            return LearningMethod(DEFAULT)
        alpha = settings.quantizer_arguments.get("alpha")
        return LearningMethod(settings.quantizer, None if alpha is None else float(alpha))
