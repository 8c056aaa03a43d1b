"""Result types of a profile: one row per layer, and the interpretation of its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sbonnx.profile.checkers import Checker, kind_of, name_of

Column = Literal["alone", "weights", "activations", "gathered"]
COLUMNS: Final[tuple[Column, ...]] = ("alone", "weights", "activations", "gathered")


@dataclass(frozen=True)
class LayerLoss:
    """Figures of one node with a quantized input.

    Attributes:
        node, op: its name and type.
        tensor: its first output.
        scope: "" or the path of the branch that contains it.
        label: quantized types of its inputs, such as ``int8 axis 0, uint8``.
        alone: isolated error at its outputs, with only its inputs and weights quantized.
        weights, activations: isolated error of only those; None if it has none, or if not requested.
        gathered: accumulated error with the whole network quantized; None if not requested.
        feeds: number of feeds it was measured on; less than the profile's if a branch was not taken.
    """

    node: str
    op: str
    tensor: str
    scope: str
    label: str
    alone: float | None = None
    weights: float | None = None
    activations: float | None = None
    gathered: float | None = None
    feeds: int = 0

    def value(self, column: Column) -> float | None:
        """Return the figure of a column."""
        found: float | None = getattr(self, column)
        return found


@dataclass(frozen=True)
class Profile:
    """Losses of all layers.

    Attributes:
        checker: the error measure.
        layers: in execution order.
        outputs: the measure at each output of the fully quantized network; empty if not requested.
        feeds: number of feeds.
        notes: messages about the figures, one sentence each.
    """

    checker: Checker
    layers: tuple[LayerLoss, ...]
    outputs: Mapping[str, float]
    feeds: int
    notes: tuple[str, ...] = ()

    def worst_first(self, column: Column = "alone") -> tuple[LayerLoss, ...]:
        """Sort the layers by their loss in a column, worst first; those without a figure last."""
        return tuple(sorted(self.layers, key=lambda row: -self._loss(row, column)))

    def losses(self, column: Column = "alone") -> dict[str, float]:
        """Return the losses by node name, for nodes with a figure: 0 is no loss, larger is worse."""
        found = {row.node: self._loss(row, column) for row in self.layers}
        return {name: loss for name, loss in found.items() if loss >= 0}

    def _loss(self, row: LayerLoss, column: Column) -> float:
        """Convert a figure to a loss; -1 if there is none."""
        value = row.value(column)
        if value is None:
            return -1.0
        loss = kind_of(self.checker).loss(value)
        return math.inf if math.isnan(loss) else loss

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        kind = kind_of(self.checker)
        return {
            "measure": name_of(self.checker),
            "unit": kind.unit,
            "higher_is_better": kind.higher_is_better,
            "feeds": self.feeds,
            "outputs": dict(self.outputs),
            "layers": [asdict(row) for row in self.layers],
            "notes": list(self.notes),
        }
