"""What came of choosing widths: the recipe, and all that was measured on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from sbonnx.recipe import Recipe
from sbonnx.report import Refusal
from sbonnx.search.bit_groups import WEIGHT, Choice
from sbonnx.search.evaluation import Score


@dataclass(frozen=True)
class Tried:
    """A choice of widths.

    Attributes:
        what: its name, for people.
        choices: side, names, bits.
        cost: of the layers that were chosen for, in the unit of the budget's sums.
        predicted: sum of the losses of layers: energy of the error over that of the outputs. None: not known.
    """

    what: str
    choices: tuple[Choice, ...]
    cost: float
    predicted: float | None


@dataclass(frozen=True)
class Measured:
    """A choice of widths as a recipe, measured end to end on the feeds held out."""

    what: str
    recipe: Recipe
    choices: tuple[Choice, ...]
    cost: float
    predicted: float | None
    score: Score

    @property
    def widths(self) -> dict[str, int]:
        """How many layers have how many bits for their weights, and tensors for activations: ``{"w4": 12}``."""
        counts = Counter(f"{side.lower()}{bits or 'f'}" for side, names, bits in self.choices for _ in names)
        return dict(sorted(counts.items()))


@dataclass(frozen=True)
class Outcome:
    """The best choice, beside the others.

    Attributes:
        recipe: with the widths, to be run and saved.
        best: the choice that it holds; one of `tried`.
        unit: what costs are counted in: "bits", "size", "bit_operations" or "latency".
        target: the budget in that unit, or the loss that was asked for.
        met: whether the target was reached.
        figures: cost of each of `tried` in the unit of the budget.
        front: (cost, predicted loss) of choices that no other beats in both.
    """

    recipe: Recipe
    best: Measured
    tried: tuple[Measured, ...]
    unit: str
    target: float | str
    met: bool
    figures: tuple[float, ...]
    front: tuple[tuple[float, float], ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [
            {
                "what": one.what,
                "cost": figure,
                "predicted": one.predicted,
                "widths": one.widths,
                "kept": one is self.best,
                **one.score.to_dict(),
            }
            for one, figure in zip(self.tried, self.figures, strict=True)
        ]
        layers = {name: bits for side, names, bits in self.best.choices if side == WEIGHT for name in names}
        tensors = {name: bits for side, names, bits in self.best.choices if side != WEIGHT for name in names}
        return {
            "unit": self.unit,
            "target": self.target,
            "met": self.met,
            "tried": rows,
            "weights": layers,
            "activations": tensors,
            "front": [list(point) for point in self.front],
        }


__all__ = ["Measured", "Outcome", "Tried"]
