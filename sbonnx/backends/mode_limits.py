"""Modes of a backend: what a recipe may ask for in each of them, and its defaults there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from sbonnx.schemes import Scheme, WeightScheme

SCHEMES: Final[tuple[Scheme, ...]] = get_args(Scheme)
WEIGHT_SCHEMES: Final[tuple[WeightScheme, ...]] = (*SCHEMES, "auto")

PER_TENSOR: Final[tuple[Scheme, ...]] = ("per-tensor-affine", "per-tensor-symmetric")
PER_CHANNEL: Final[tuple[Scheme, ...]] = ("per-channel-symmetric", "per-channel-affine")
SYMMETRIC: Final[tuple[Scheme, ...]] = ("per-channel-symmetric", "per-tensor-symmetric")

ANY_BITS: Final = tuple(range(2, 16 + 1))
BYTES: Final = tuple(range(2, 8 + 1))

STATIC: Final = "static"
"""Mode in which scales of activations are calibrated."""


@dataclass(frozen=True)
class SideLimits:
    """Bit widths and schemes of one side (weights or activations).

    Attributes:
        bits, schemes: allowed.
        scheme: default.
        width: default bit width.
        observer: default observer.
    """

    bits: tuple[int, ...]
    schemes: tuple[WeightScheme, ...]
    scheme: WeightScheme
    width: int = 8
    observer: str = "minmax"


FREE: Final = SideLimits(ANY_BITS, SCHEMES, "per-tensor-affine", observer="mse")
"""Activations that stay float, so that none of their settings can be invalid."""


@dataclass(frozen=True)
class ModeLimits:
    """Limits and defaults of one mode of a backend.

    Attributes:
        weights, activations: limits of both sides.
        defaults: other keys of a recipe with defaults that differ from those of `sbonnx.recipe.sections`.
        smallest: for modes other than static: minimum number of weights for which a product is quantized, if the recipe
            gives none.
        block: for those modes: block size along the reduction axis, if the recipe gives none; None: the largest of
            `Numbers.block_sizes` that divides the axis, or no blocks.
        why: for those modes: reason given for the sites, for people.
        below: for those modes: reason given for smaller weights.
        experts: weights of mixtures of experts (MoE) are quantized.
    """

    weights: SideLimits
    activations: SideLimits
    defaults: Mapping[str, Any] = field(default_factory=dict)
    smallest: int = 0
    block: int | None = None
    why: str = "weights alone are rounded"
    below: str = "next to no bytes are saved"
    experts: bool = False

    @property
    def sides(self) -> dict[str, SideLimits]:
        """Limits by side: "W" and "A"."""
        return {"W": self.weights, "A": self.activations}


ANY_STATIC: Final = ModeLimits(
    weights=SideLimits(ANY_BITS, SCHEMES, "per-channel-symmetric"),
    activations=SideLimits(ANY_BITS, SCHEMES, "per-tensor-affine"),
)
"""Static quantization to any width in any scheme."""
