"""W.ROUNDING: methods of weight rounding, with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, final, get_args

from pydantic import BeforeValidator

from sbonnx.recipe import values
from sbonnx.recipe.sections.keys import Section, key

ScaleName = Literal["observer", "search", "hqq"]
ScaleWish = Literal["auto", "observer", "search", "hqq"]
Order = Literal["pivot", "activation", "none"]
Start = Literal["gptq", "nearest"]
Ramp = Literal["linear", "cosine"]
Loss = Literal["moments", "batches"]
Scope = Literal["block", "layer"]

AUTO: Final = "auto"
"""The rounding chosen by bit width and by whether there are data."""


SCALES: Final[tuple[str, ...]] = get_args(ScaleWish)
ORDERS: Final[tuple[str, ...]] = get_args(Order)
STARTS: Final[tuple[str, ...]] = get_args(Start)
RAMPS: Final[tuple[str, ...]] = get_args(Ramp)
LOSSES: Final[tuple[str, ...]] = get_args(Loss)
SCOPES: Final[tuple[str, ...]] = get_args(Scope)

BLOCKS: Final = "blocks"
"""Name of ADAROUND with LOSS: batches in a plan: a separate rounding, with the same arguments and more."""

ScaleChoice = Annotated[ScaleWish, BeforeValidator(values.choice(SCALES)), values.schema(SCALES)]
OrderChoice = Annotated[Order, BeforeValidator(values.choice(ORDERS)), values.schema(ORDERS)]
StartChoice = Annotated[Start, BeforeValidator(values.choice(STARTS)), values.schema(STARTS)]
RampChoice = Annotated[Ramp, BeforeValidator(values.choice(RAMPS)), values.schema(RAMPS)]
LossChoice = Annotated[Loss, BeforeValidator(values.choice(LOSSES)), values.schema(LOSSES)]
ScopeChoice = Annotated[Scope, BeforeValidator(values.choice(SCOPES)), values.schema(SCOPES)]


@final
class Gptq(Section):
    """W.ROUNDING.GPTQ: rounding by second moments (Hessian), with error compensation."""

    damping: values.AboveZero = key(
        0.01, "share of the mean second moment that is added to all of them", "above 0", "new"
    )
    order: OrderChoice = key(
        "pivot",
        "inputs in the order of least error, by falling second moment, or as they come",
        "pivot, activation, none",
        "new",
    )
    beams: values.Count = key(
        16, "choices of codes that each output keeps in play; 1 is plain GPTQ", "1 or more", "new"
    )
    steps: values.CountOrNone = key(
        8, "steps of tabu search afterwards, of one code each, for each input of an output", "0 or more", "new"
    )
    sweeps: values.CountOrNone = key(
        20, "passes of coordinate descent over the codes afterwards, while any changes", "0 or more", "new"
    )


@final
class AdaRound(Section):
    """W.ROUNDING.ADAROUND: rounding up or down, learned by gradient descent."""

    iterations: values.Count = key(1000, "steps of Adam", "1 or more", "new")
    lr: values.AboveZero = key(0.1, "its learning rate", "above 0", "new")
    warmup: values.Ratio = key(0.2, "share of the steps before the pull to whole codes begins", "0 to below 1", "new")
    weight: values.AboveZero = key(
        0.2, "weight of that pull, against the error of one code in one weight", "above 0", "new"
    )
    beta_start: values.AboveZero = key(20.0, "its exponent at the beginning", "above 0", "new")
    beta_end: values.AboveZero = key(2.0, "and at the end", "above 0", "new")
    schedule: RampChoice = key("cosine", "how the exponent goes from one to the other", "cosine, linear", "new")
    start: StartChoice = key("gptq", "the codes to begin with", "gptq, nearest", "new")
    sweeps: values.CountOrNone = key(
        20, "passes of coordinate descent between the two codes afterwards, while any changes", "0 or more", "new"
    )
    loss: LossChoice = key(
        "moments",
        "the error of the layer by second moments, or of what follows it on batches of samples (with torch)",
        "moments, batches",
        "new",
    )
    scope: ScopeChoice = key(
        "block",
        "with LOSS: batches, whose output has its error taken: of all layers between two places where one tensor "
        "carries everything (a residual block), or of each layer with what follows it",
        "block, layer",
        "new",
    )
    drop: values.Share = key(
        0.5, "with LOSS: batches, share of activations that a step takes from the float network", "0 to 1", "new"
    )
    scale_lr: values.Share = key(
        0.01,
        "with LOSS: batches, learning rate of the scales of activations, relative; 0: they stay as observed",
        "0 to 1",
        "new",
    )

    def named(self) -> tuple[str, dict[str, float | str | bool]]:
        """Return the rounding method and its keyword arguments."""
        chosen = dict(self)
        by_batches = chosen.pop("loss") == "batches"
        for name in ("sweeps",) if by_batches else ("scope", "drop", "scale_lr"):
            del chosen[name]
        return BLOCKS if by_batches else "adaround", chosen


@final
class AdaQuant(Section):
    """W.ROUNDING.ADAQUANT: weights and scales learned by gradient descent."""

    iterations: values.Count = key(500, "steps of Adam", "1 or more", "new")
    lr: values.AboveZero = key(0.01, "its learning rate for weights, in codes", "above 0", "new")
    scale_lr: values.AboveZero = key(0.003, "its learning rate for scales, relative", "above 0", "new")
    start: StartChoice = key("gptq", "the codes to begin with", "gptq, nearest", "new")
    sweeps: values.CountOrNone = key(
        20, "passes of coordinate descent each time codes and scales are fitted to each other", "0 or more", "new"
    )


@final
class Rounding(Section):
    """W.ROUNDING: method of weight rounding; a name stands for ``{TYPE: name}``."""

    type: values.RoundingName = key(
        AUTO,
        "how a weight becomes codes",
        "auto (gptq below 8 bits where there are data, else nearest), nearest, gptq, adaround, adaquant",
        "new",
    )
    scale: ScaleChoice = key(
        AUTO,
        "where scales of weights come from: W.OBSERVER, least error of the layer's output, or W.OBSERVER with "
        "half-quadratic zero points (affine weights only)",
        "auto (search below 8 bits where the rounding looks at inputs, but for blocks, else observer), observer, "
        "search, hqq",
        "new",
    )
    gptq: Gptq = Gptq()
    adaround: AdaRound = AdaRound()
    adaquant: AdaQuant = AdaQuant()

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return data if data is None or isinstance(data, Mapping) else {"TYPE": data}

    def named(self, name: str) -> tuple[str, dict[str, float | str | bool]]:
        """Return the rounding method for `name`, and its keyword arguments."""
        if name == "adaround":
            return self.adaround.named()
        chosen = {"gptq": self.gptq, "adaquant": self.adaquant}.get(name)
        return name, {} if chosen is None else dict(chosen)
