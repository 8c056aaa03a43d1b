"""Error measures between quantized and float tensors, named or user functions, and profiles of their figures."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import numpy as np

from sbonnx.errors import RecipeError
from sbonnx.metrics import IMAGE_RANK, CosineSum, ErrorSum
from sbonnx.report.codes import Note
from sbonnx.report.details import Column, LayerLoss, ProfileFigures
from sbonnx.report.notebook import Result
from sbonnx.report.plots import TOP, bar_chart
from sbonnx.spec import Array
from sbonnx.torchnet import torch_module

Checker = str | Callable[[Any, Any], Any]
"""A name in `MEASURES`, or a function of (quantized, float) arrays or torch tensors that returns a number."""

EQUAL: Final = 0.0
"""Loss of a tensor that is equal to the float one."""


class Measure(ABC):
    """Error measure that accumulates pairs of tensors over feeds and returns one number.

    The named measures sum over values, so neither batch size nor order matters.
    """

    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    @abstractmethod
    def add(self, quantized: Array, reference: Array) -> None:
        """Add one tensor of one feed; both arrays have the same shape and any float or integer type."""

    @abstractmethod
    def result(self) -> float:
        """Return the value over all added tensors; NaN before the first."""

    @classmethod
    def loss(cls, value: float) -> float:
        """Convert `value` to a loss for charts and sorting: EQUAL without error, larger for larger errors."""
        return value


@final
class MeanSquaredError(Measure):
    """Mean squared error, in squared units of the tensor."""

    def __init__(self) -> None:
        self._sums = ErrorSum()

    def add(self, quantized: Array, reference: Array) -> None:
        self._sums.add(reference, quantized)

    def result(self) -> float:
        if self._sums.lost:
            return math.inf
        return self._sums.noise / self._sums.count if self._sums.count else math.nan


@final
class Sqnr(Measure):
    """Signal-to-quantization-noise ratio in dB: 10 log10(sum ref^2 / sum (ref - q)^2); inf if they are equal."""

    higher_is_better = True
    unit = "dB"

    def __init__(self) -> None:
        self._sums = ErrorSum()

    def add(self, quantized: Array, reference: Array) -> None:
        self._sums.add(reference, quantized)

    def result(self) -> float:
        return self._sums.sqnr_db

    @classmethod
    def loss(cls, value: float) -> float:
        """Convert to noise over signal as amplitudes: 10^(-dB / 20)."""
        return float(10.0 ** (-value / 20)) if value > -math.inf else math.inf


@final
class Cosine(Measure):
    """Cosine similarity of both tensors as one vector over all feeds; 1 if they have the same direction.

    NaN after a total loss, see `sbonnx.metrics.ErrorSum`.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self._sums = CosineSum()

    def add(self, quantized: Array, reference: Array) -> None:
        self._sums.add(reference, quantized)

    def result(self) -> float:
        return self._sums.cosine if self._sums.parts and not self._sums.lost else math.nan

    @classmethod
    def loss(cls, value: float) -> float:
        """Convert to 1 - cosine."""
        return 1.0 - value


@final
class Largest(Measure):
    """Largest absolute difference, in units of the tensor."""

    def __init__(self) -> None:
        self._sums, self._largest = ErrorSum(), 0.0

    def add(self, quantized: Array, reference: Array) -> None:
        compared = self._sums.add(reference, quantized)
        if compared is not None:
            self._largest = max(self._largest, float(np.abs(compared[0] - compared[1]).max(initial=0.0)))

    def result(self) -> float:
        if self._sums.lost:
            return math.inf
        return self._largest if self._sums.parts else math.nan


@final
class Kl(Measure):
    """Kullback-Leibler divergence of softmax(quantized) from softmax(float) in nats, mean over rows.

        sum over classes p log(p / q),  p = softmax(ref), q = softmax(quantized)

    The class axis is 1 for 4 dimensions and more, else the last; a tensor without axes is one class.
    Source: Hinton et al. 2015 (temperature 1).
    """

    unit = "nats"

    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0

    def add(self, quantized: Array, reference: Array) -> None:
        if not reference.size:
            return
        axis = 1 if reference.ndim >= IMAGE_RANK else -1
        ref, q = (_log_softmax(np.atleast_1d(x).astype(np.float64), axis) for x in (reference, quantized))
        p = np.exp(ref)
        with np.errstate(invalid="ignore"):  # 0 log 0 is 0
            rows = np.where(p != 0, p * (ref - q), 0).sum(axis)
        self._sum += max(float(rows.sum()), 0.0)
        self._rows += rows.size

    def result(self) -> float:
        return self._sum / self._rows if self._rows else math.nan


@final
class Averaged(Measure):
    """Mean of a user function, called once per tensor and feed.

    A function that fails on arrays, such as torch.nn.functional.mse_loss, is called with torch tensors if torch is
    loaded.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function, self._values = function, list[float]()
        self._on_tensors = False

    def add(self, quantized: Array, reference: Array) -> None:
        self._values.append(float(self._called(quantized, reference)))

    def _called(self, quantized: Array, reference: Array) -> Any:
        if self._on_tensors:
            return self._function(_tensor(quantized), _tensor(reference))
        try:
            return self._function(quantized, reference)
        except (AttributeError, TypeError):
            if "torch" not in sys.modules:
                raise
            loss = self._function(_tensor(quantized), _tensor(reference))
        self._on_tensors = True
        return loss

    def result(self) -> float:
        return float(np.mean(self._values)) if self._values else math.nan


def _tensor(values: Array) -> Any:
    """Copy an array to a torch tensor; bfloat16 as float32."""
    wide = values.astype(np.float32) if values.dtype.kind == "V" else values
    return torch_module().from_numpy(np.array(wide))


MEASURES: Final[dict[str, type[Measure]]] = {
    "mse": MeanSquaredError,
    "sqnr": Sqnr,
    "cosine": Cosine,
    "max": Largest,
    "kl": Kl,
}


def make_measure(checker: Checker) -> Measure:
    """Create a measure.

    Raises:
        RecipeError: there is no measure of that name.
    """
    return kind_of(checker)() if isinstance(checker, str) else Averaged(checker)


def name_of(checker: Checker) -> str:
    """Return the display name of a checker: its name, or that of the function."""
    return checker if isinstance(checker, str) else str(getattr(checker, "__name__", "checker"))


def kind_of(checker: Checker) -> type[Measure]:
    """Return the class of a checker's measure, which defines how to read its values.

    A user function is treated as a loss.

    Raises:
        RecipeError: there is no measure of that name.
    """
    if not isinstance(checker, str):
        return Averaged
    if checker not in MEASURES:
        raise RecipeError(f"there is no measure '{checker}': there are {', '.join(MEASURES)}, or give a function")
    return MEASURES[checker]


def _log_softmax(x: Array, axis: int) -> Array:
    shifted = x - x.max(axis, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis, keepdims=True)))


COLUMNS: Final[tuple[Column, ...]] = ("alone", "weights", "activations", "gathered")
TITLES: Final[dict[Column, str]] = {
    "alone": "isolated",
    "weights": "weights",
    "activations": "inputs",
    "gathered": "accumulated",
}
"""Names of the figures in tables and charts."""


@dataclass(frozen=True, repr=False)
class Profile(Result):
    """Losses of all layers.

    Attributes:
        checker: the error measure.
        layers: in execution order.
        outputs: the measure at each output of the fully quantized network; empty if not requested.
        feeds: number of feeds.
        notes: messages about the figures, one sentence each.
    """

    json_keys: ClassVar = ("measure", "unit", "higher_is_better", "feeds", "outputs", "layers", "notes")
    frame_of: ClassVar = "layers"

    checker: Checker
    layers: tuple[LayerLoss, ...]
    outputs: Mapping[str, float]
    feeds: int
    notes: tuple[Note, ...] = ()

    def worst_first(self, column: Column = "alone") -> tuple[LayerLoss, ...]:
        """Sort the layers by their loss in a column, worst first; those without a figure last."""
        return tuple(sorted(self.layers, key=lambda row: -self._loss(row, column)))

    def losses(self, column: Column = "alone") -> dict[str, float]:
        """Return the losses by node name, for nodes with a figure: 0 is no loss, larger is worse."""
        by_node = {row.node: self._loss(row, column) for row in self.layers}
        return {name: loss for name, loss in by_node.items() if loss >= 0}

    def _loss(self, row: LayerLoss, column: Column) -> float:
        value = row.value(column)
        if value is None:
            return -1.0
        loss = kind_of(self.checker).loss(value)
        return math.inf if math.isnan(loss) else loss

    def plot(self, column: Column | None = None, top: int = TOP, ax: Any = None) -> Any:
        """Draw the figures of the layers with the largest isolated loss.

        Args:
            column: one figure; None: all that were measured.
            top: number of layers.
            ax: matplotlib axes to draw into; None: new ones.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        rows = self.worst_first(column or "alone")[:top]
        wanted = COLUMNS if column is None else (column,)
        series: dict[str, list[float | None]] = {TITLES[name]: [row.value(name) for row in rows] for name in wanted}
        measured = {name: values for name, values in series.items() if any(value is not None for value in values)}
        name, unit = self.measure, self.unit
        title = f"worst {len(rows)} of {len(self.layers)} layers"
        return bar_chart(
            [row.node for row in rows],
            measured,
            title=title,
            unit=f"{name}, {unit}" if unit else name,
            higher_is_better=self.higher_is_better,
            ax=ax,
        )

    @property
    def measure(self) -> str:
        """Name of the error measure."""
        return name_of(self.checker)

    @property
    def unit(self) -> str:
        """Unit of the measure, or ""."""
        return kind_of(self.checker).unit

    @property
    def higher_is_better(self) -> bool:
        """Direction of the measure."""
        return kind_of(self.checker).higher_is_better

    @property
    def figures(self) -> ProfileFigures:
        """The losses and their measure, for reports."""
        own = self.measure, self.unit, self.higher_is_better
        return ProfileFigures(*own, self.feeds, self.outputs, self.layers, self.notes)
