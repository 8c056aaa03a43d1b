"""Which training method each fake-quant module gets: by argument, else by the recipe, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sbonnx.graph.query import node_by_name
from sbonnx.plan import Site
from sbonnx.prepare import Prepared
from sbonnx.qat.fakequant import METHODS
from sbonnx.recipe import Settings
from sbonnx.recipe.names import LEARNED, SideName
from sbonnx.recipe.schemes import UNIFORM
from sbonnx.report import Refusal

DEFAULT: Final = "lsq"
"""The method where neither the call nor the recipe names one."""


@dataclass(frozen=True)
class LearningMethod:
    """A key of `METHODS`, and the clipping bound that PACT starts from (None: that of the calibration)."""

    name: str
    alpha: float | None = None


@dataclass
class Methods:
    """Chooses the method of each site.

    Attributes:
        prepared: graph, plan and recipe.
        weights, activations: the method of every site of that role; None: by the recipe.
        refusals: where the layers that share a fake-quant module ask for different methods.
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
        """The method of one site: that of its first reader, where the recipe says different things of them."""
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
        """The method for these settings; `uniform` is one only beside others that learn."""
        if settings.quantizer not in METHODS or (settings.quantizer == UNIFORM and not self._trained[side]):
            return LearningMethod(DEFAULT)
        alpha = settings.quantizer_arguments.get("alpha")
        return LearningMethod(settings.quantizer, None if alpha is None else float(alpha))
