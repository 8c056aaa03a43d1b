"""AUTO and MIXED: recipe search and mixed precision, evaluated on a hold-out set before the final quantization."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, final, get_args

from pydantic import BeforeValidator, WithJsonSchema

from sbonnx.recipe import values
from sbonnx.recipe.problem import Wrong
from sbonnx.recipe.sections.keys import Section, key

Solver = Literal["exact", "greedy"]
LossName = Literal["auto", "top1", "relative"]
SOLVERS: Final[tuple[str, ...]] = get_args(Solver)
LOSSES: Final[tuple[str, ...]] = get_args(LossName)

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*")


def share(value: object) -> float:
    """Read a share as a number from 0 to 1, or in percent: ``0.005`` or ``0.5%``."""
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    found = float(match[1]) / 100 if match else values.number(value)
    if found is None or not 0 <= found <= 1:
        raise Wrong("must be a share, 0 to 1 or in percent such as 0.5%", value=value)
    return found


def _widths(value: object) -> tuple[int, ...]:
    """Read bit widths: unique, ascending, float (0) last."""
    if isinstance(value, str):
        value = [part for part in re.split(r"[\s,/]+", value) if part]
    if not isinstance(value, list | tuple):
        raise Wrong("must be a list of widths", value=value)
    named = [0 if one == "float" else one for one in value]
    found = {0 if values.integer(one) == values.FLOAT_BITS else values.bits(one) for one in named}
    return tuple(sorted(found, key=lambda bits: bits or values.FLOAT_BITS))


_NUMBER_OR_TEXT: dict[str, Any] = {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "string"}]}
_WIDTH_LIST: dict[str, Any] = {
    "anyOf": [{"type": "array", "items": {"anyOf": [{"type": "integer"}, {"const": "float"}]}}, {"type": "string"}]
}

Loss = Annotated[float, BeforeValidator(share), WithJsonSchema(_NUMBER_OR_TEXT)]
Widths = Annotated[tuple[int, ...], BeforeValidator(_widths), WithJsonSchema(_WIDTH_LIST)]
SolverName = Annotated[Solver, BeforeValidator(values.choice(SOLVERS)), values.schema(SOLVERS)]
Measure = Annotated[LossName, BeforeValidator(values.choice(LOSSES)), values.schema(LOSSES)]


@final
class Auto(Section):
    """AUTO: recipe search; ``true`` and ``false`` stand for ``{ENABLE: ...}``."""

    enable: values.Flag = key(
        False,
        "try what may help at these widths, one thing after another, and keep what does on samples held out",
        "true, false",
        "new",
        shown="false; true with --recipe auto",
    )
    held_out: values.Ratio = key(
        0.25,
        "share of the feeds that is held out to judge trials by; the last run calibrates on it too",
        "0 to below 1",
        "new",
    )
    samples: values.Count = key(128, "feeds that trials calibrate on at most", "1 or more", "new")

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return data if data is None or isinstance(data, Mapping) else {"ENABLE": data}


@final
class Budget(Section):
    """MIXED.BUDGET: limit of size or cost for mixed precision."""

    bits: values.AboveZero | None = key(None, "bits of a weight, on average", "above 0", "new", shown="none")
    size: values.AboveZero | None = key(
        None, "bytes of all constants over those of the float model", "above 0", "new", shown="none"
    )
    bit_operations: values.AboveZero | None = key(
        None,
        "multiplications times the bits of both factors, over those of w8a8",
        "above 0",
        "new",
        shown="none",
    )
    latency: values.AboveZero | None = key(
        None,
        "time of the ops with weights over that in float, by KERNEL_COSTS; onnxruntime",
        "above 0",
        "new",
        shown="none",
    )


@final
class Mixed(Section):
    """MIXED: mixed precision, a bit width for each layer."""

    budget: Budget = Budget()
    max_loss: Loss | None = key(
        None,
        "what may be lost on samples held out: layers get more bits until it is kept",
        "0 to 1, or in percent: 0.5%",
        "new",
        shown="none",
    )
    loss: Measure = key(
        "auto",
        "what MAX_LOSS is of: samples whose largest class is another than in float, or the norm of the error of the "
        "outputs over that of the outputs",
        "auto (top1 for one output of classes), top1, relative",
        "new",
    )
    weights: Widths = key(
        (), "widths of weights to choose from", "list of 2 to 16 and float", "new", shown="2, 3, 4, 8 and that of W"
    )
    activations: Widths = key(
        (), "widths of activations to choose from", "list of 2 to 16 and float", "new", shown="that of A"
    )
    solver: SolverName = key(
        "exact",
        "how widths are chosen: the best of all choices by the losses measured, or step by step",
        "exact, greedy",
        "new",
    )
    feeds: values.Count = key(32, "feeds that the loss of each layer at each width is measured on", "1 or more", "new")

    @property
    def wanted(self) -> bool:
        """Whether bit widths are to be chosen for each layer."""
        return self.max_loss is not None or any(value is not None for _, value in self.budget)

    @property
    def contradiction(self) -> str | None:
        """Error text if more than one goal is set, else None."""
        given = [f"BUDGET.{name.upper()}" for name, value in self.budget if value is not None]
        given += [] if self.max_loss is None else ["MAX_LOSS"]
        if len(given) < 2:
            return None
        return f"MIXED has {len(given)} goals, {', '.join(given)}: widths are chosen for one of them. Drop the others"
