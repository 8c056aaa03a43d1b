"""`PruningReport`: what was removed, what it reaches of its goal, and the comparison with the original."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

import onnx

from sbonnx.report.codes import PROBLEMS, Note, Problem, Refusal, WithProblems
from sbonnx.report.comparison import Comparison
from sbonnx.report.notebook import Result
from sbonnx.report.verdict import Verdict, verdict_of
from sbonnx.values import INTERNAL, OBJECT

BUDGETS: Final = {"macs": "multiplications", "size": "bytes of constants", "latency": "estimated time"}
"""Units of the budgets by their names, which are attributes of `PruningReport` as well."""


@dataclass(frozen=True)
class PrunedDimension:
    """Outcome for one dimension.

    Attributes:
        writers, readers: its layers.
        before, after: number of groups.
        error: of the outputs if this dimension alone is pruned so, by its curve; None without curves.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    before: int
    after: int
    error: float | None

    @property
    def name(self) -> str:
        """The first layer that writes it, else the first that reads it."""
        return (self.writers or self.readers)[0]


@dataclass(frozen=True)
class SparseLayer:
    """Outcome for one sparse layer.

    Attributes:
        layer: name of the node.
        pattern: such as "2:4".
        values, zeros: of its weight.
        tensorrt: what TensorRT is expected to do with it.
    """

    layer: str
    pattern: str
    values: int
    zeros: int
    tensorrt: str


@dataclass(frozen=True)
class LayerRefit:
    """Outcome of the refit of one layer.

    Attributes:
        layer: name of the node.
        columns, removed: columns of its weight, and how many are removed.
        zeros: values of its weight that are zero.
        strength: lambda, relative; infinite if the old weight was better.
        before, after: see `RefitWeight`.
    """

    layer: str
    columns: int
    removed: int
    strength: float
    before: float
    after: float
    zeros: int = 0


@dataclass(frozen=True)
class FineTuneRow:
    """Outcome of fine-tuning, for the report.

    Attributes:
        epochs: number of completed epochs.
        epoch: the weights are those after this epoch; 0: the weights before, because no epoch was better.
        before, after: relative squared error of the outputs on hold-out samples, before and after.
        augment: names of the augmentations.
        masked: number of weights whose zeros were kept.
        stopped: reason why the training ended early, or "".
    """

    epochs: int
    epoch: int
    before: float
    after: float
    augment: tuple[str, ...]
    masked: int
    stopped: str

    @property
    def note(self) -> Note | None:
        """A note for the report, if the weights before were kept or the training ended early, else None."""
        if self.stopped:
            return Note("tuning-ended", f"fine-tuning ended after {self.epochs} epochs: {self.stopped}")
        if self.epoch:
            return None
        return Note(
            "tuning-without-gain",
            f"fine-tuning did not reduce the error on hold-out samples ({self.before:.4f}) in {self.epochs} epochs: "
            "the weights before were kept; try a smaller learning rate, more epochs or more samples",
        )


@dataclass(frozen=True)
class RemovedSide:
    """Removed channels of a layer.

    Attributes:
        layer: name of the node.
        side: input or output channels.
        channels: their indices.
    """

    layer: str
    side: Literal["in", "out"]
    channels: tuple[int, ...]


@dataclass(frozen=True)
class RemovedChannels:
    """The pruning plan.

    Attributes:
        version: version of its form.
        removed: removed channels by layer.
    """

    version: int = 1
    removed: tuple[RemovedSide, ...] = ()


@dataclass(frozen=True, repr=False)
class PruningReport(WithProblems, Result):
    """Outcome of `prune`.

    Attributes:
        model, output: the float model and the path of the result.
        macs, size: remaining share of the multiplications, and of the bytes of all constants.
        latency: remaining share of the time of a sample in float by the table of kernel costs; None without a table.
            `metrics` has the measured one, `latency_ratio`.
        kernel_costs: kind of CPU of that table, or its digest (`Plan.kernel_costs`); "" without one.
        asked, reached: the budget or MAX_LOSS, by its name, and what the file has; empty with a ratio.
        dimensions: one row per dimension: layers that write and read it, groups before and after, error alone.
        sparse: one row per layer whose weight became sparse: pattern, values, zeros, and what TensorRT does with it.
        layers: one row per refitted layer: columns, strength, error on hold-out samples without and with the refit.
        refusals: pinned channels and layers that were not refitted, with the reason.
        tuned: outcome of fine-tuning, see `FineTuneRow`; None without.
        metrics: comparison with the original, None without data.
        plan: removed channels, as `PruningPlan.from_dict` reads them.
        notes: changes and findings of loading and verification.
        problems: reasons why the result is unusable or below a limit.
        pruned: the model itself if no output path was given (left out of `to_dict`).
    """

    json_keys: ClassVar = ("ok", "problems", "verdict", ..., "problem_codes")
    frame_of: ClassVar = "dimensions"
    model: str
    output: str | None
    macs: float
    size: float
    latency: float | None = None
    kernel_costs: str = ""
    asked: dict[str, float] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)
    dimensions: tuple[PrunedDimension, ...] = ()
    sparse: tuple[SparseLayer, ...] = ()
    layers: tuple[LayerRefit, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    tuned: FineTuneRow | None = None
    metrics: Comparison | None = field(default=None, metadata=OBJECT)
    plan: RemovedChannels = RemovedChannels()
    notes: tuple[Note, ...] = ()
    problems: tuple[Problem, ...] = field(default=(), metadata=PROBLEMS)
    pruned: onnx.ModelProto | None = field(default=None, repr=False, compare=False, metadata=INTERNAL)

    @property
    def remaining(self) -> dict[str, float]:
        """Remaining shares by what they are shares of: ``{"multiplications": 0.5}``."""
        shares = {text: getattr(self, name) for name, text in BUDGETS.items()}
        return {text: share for text, share in shares.items() if share is not None}

    @property
    def verdict(self) -> Verdict:
        """Accuracy, speed and size against the original in one sentence."""
        return verdict_of(self.metrics, problems=self.problems)
