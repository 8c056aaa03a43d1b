"""What a profile holds: a row a layer, and how to read its figures."""

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
    """One node that reads something quantized.

    Attributes:
        node, op: its name and type.
        tensor: its first output.
        scope: "" or the path of the branch it lies in.
        label: what it reads, such as ``int8 axis 0, uint8``.
        alone: its inputs and weights quantized and nothing else, measured at its outputs.
        weights, activations: only those; None where it has none, or where they were not asked for.
        gathered: everything in the network quantized; None where that was not asked for.
        feeds: on how many it was measured; fewer than the profile's where a branch was not taken.
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
        """One of the figures."""
        found: float | None = getattr(self, column)
        return found


@dataclass(frozen=True)
class Profile:
    """What every layer loses.

    Attributes:
        checker: what was measured.
        layers: in the order in which they run.
        outputs: the same measure at each output of the network, quantized as a whole; empty where not asked for.
        feeds: how many were used.
        notes: what is to be known of the figures, one sentence each.
    """

    checker: Checker
    layers: tuple[LayerLoss, ...]
    outputs: Mapping[str, float]
    feeds: int
    notes: tuple[str, ...] = ()

    def worst_first(self, column: Column = "alone") -> tuple[LayerLoss, ...]:
        """Layers by what they lose in a column; those without a figure last."""
        return tuple(sorted(self.layers, key=lambda row: -self._loss(row, column)))

    def losses(self, column: Column = "alone") -> dict[str, float]:
        """What is lost by the name of the node, of those that have a figure: 0 is nothing, more is worse."""
        found = {row.node: self._loss(row, column) for row in self.layers}
        return {name: loss for name, loss in found.items() if loss >= 0}

    def _loss(self, row: LayerLoss, column: Column) -> float:
        """A figure as a loss; -1 where there is none."""
        value = row.value(column)
        if value is None:
            return -1.0
        loss = kind_of(self.checker).loss(value)
        return math.inf if math.isnan(loss) else loss

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
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
