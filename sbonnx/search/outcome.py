"""Result of a mixed precision search: the recipe and all measured choices."""

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
    """A choice of bit widths.

    Attributes:
        what: display name.
        choices: (side, names, bits) for each layer or tensor group.
        cost: total cost of the chosen layers, in the unit of `Costs.of`.
        predicted: sum of the layers' losses: energy of the error divided by that of the outputs. None: unknown.
    """

    what: str
    choices: tuple[Choice, ...]
    cost: float
    predicted: float | None


@dataclass(frozen=True)
class Measured:
    """A choice of bit widths as a recipe, measured end to end on the hold-out set."""

    what: str
    recipe: Recipe
    choices: tuple[Choice, ...]
    cost: float
    predicted: float | None
    score: Score

    @property
    def widths(self) -> dict[str, int]:
        """Number of layers by weight width and of tensors by activation width, such as ``{"w4": 12}``."""
        counts = Counter(f"{side.lower()}{bits or 'f'}" for side, names, bits in self.choices for _ in names)
        return dict(sorted(counts.items()))


@dataclass(frozen=True)
class Outcome:
    """The best choice and the alternatives.

    Attributes:
        recipe: the recipe with the chosen widths.
        best: the choice in the recipe; one of `tried`.
        unit: unit of costs: "bits", "size", "bit_operations" or "latency".
        target: the budget in that unit, or the text of the requested loss.
        met: whether the target was reached.
        figures: cost of each of `tried` in the unit of the budget.
        front: (cost, predicted loss) of the Pareto-optimal choices.
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
        """Return plain values for JSON."""
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
