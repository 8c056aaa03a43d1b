"""`Details`: values that pages show beside the figures of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sbonnx.report.codes import Note
from sbonnx.values import OBJECT, JsonValue

Column = Literal["alone", "weights", "activations", "gathered"]
Unit = Literal["value", "step"]


@dataclass(frozen=True)
class QuantizedRead:
    """A quantized input of a node.

    Attributes:
        tensor, role, label, bits: the tensor, "activation", "weight" or "bias", its quantized type and width.
        low, high: smallest and largest value that is represented, over all channels; None if the scale is not known:
            a plan without a solution, or the scale of a bias.
        scales: number of scales; 0 if they are not known.
        smallest_scale, largest_scale: of them.
    """

    tensor: str
    role: Literal["activation", "weight", "bias"]
    label: str
    bits: int
    low: float | None
    high: float | None
    scales: int = 0
    smallest_scale: float | None = None
    largest_scale: float | None = None


@dataclass(frozen=True)
class TensorRow:
    """A tensor that a node computes, or an input of the model.

    Attributes:
        name, dtype: its name and element type, such as "float32"; "" if unknown.
        shape: None if unknown. Symbolic sizes are texts.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class NodeRow:
    """One node.

    Attributes:
        name, op: its name and operator.
        scope: "" or the path of the branch that contains it: "node/attribute".
        inputs: names of the nodes whose outputs it reads, each once; also those outside its branch.
        shape: of its first output; None if unknown. Symbolic sizes are texts.
        reads: quantized inputs.
        refusals: what was not done at the node or at one of its tensors: "what: why".
        codes: their codes, in the same order.
        module: path of its module, such as "layer1/layer1.0/conv1"; "" if its name and metadata have none.
        tensors: names of the tensors that it reads, and of those that its branches return; no constants.
        outputs: tensors that it computes.
    """

    name: str
    op: str
    scope: str
    inputs: tuple[str, ...]
    shape: tuple[int | str | None, ...] | None
    reads: tuple[QuantizedRead, ...]
    refusals: tuple[str, ...]
    codes: tuple[str, ...] = ()
    module: str = ""
    tensors: tuple[str, ...] = ()
    outputs: tuple[TensorRow, ...] = ()


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
        figure: float | None = getattr(self, column)
        return figure


@dataclass(frozen=True)
class ProfileFigures(JsonValue):
    """Losses of all layers, by one error measure.

    Attributes:
        measure: the error measure.
        unit: its unit, or "".
        higher_is_better: direction.
        feeds: number of feeds.
        outputs: the measure at each output of the quantized network.
        layers: figures by layer.
        notes: messages about the figures.
    """

    measure: str
    unit: str
    higher_is_better: bool
    feeds: int
    outputs: Mapping[str, float]
    layers: tuple[LayerLoss, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class TensorHistogram:
    """Distribution of the float values of a tensor that is quantized.

    Attributes:
        tensor, role, label: the tensor, "activation" or "weight", and the quantized type.
        unit: unit of `low`, `high`, `covered`. "value": that of the tensor; "step": quantized values before rounding
            and clipping, value / scale + zero point, if channels or blocks have scales of their own.
        low, high: smallest and largest value.
        counts: number of values in each of `BINS` bins of equal width from `low` to `high`.
        covered: smallest and largest value that the quantized type represents.
        step: distance of neighbouring quantized values; 1 in steps. 8-bit floats: that of the smallest values.
        clipped: share of values, 0 to 1, more than half a step outside `covered`.
    """

    tensor: str
    role: str
    label: str
    unit: Unit
    low: float
    high: float
    counts: tuple[int, ...]
    covered: tuple[float, float]
    step: float
    clipped: float


@dataclass(frozen=True)
class Details(JsonValue):
    """Values that a page shows beside the figures of a report; see `details`.

    Attributes:
        nodes: all nodes of the prepared float graph.
        profile: losses of the layers as SQNR at their outputs; None if they were not measured.
        histograms: of the tensors whose quantization alone costs most, worst first.
        notes: what was not measured and why.
        inputs: of the model.
        outputs: names of the tensors that the model returns.
    """

    json_keys: ClassVar = (..., "note_codes")
    nodes: tuple[NodeRow, ...] = ()
    profile: ProfileFigures | None = field(default=None, metadata=OBJECT)
    histograms: tuple[TensorHistogram, ...] = ()
    notes: tuple[Note, ...] = field(default=(), metadata={"codes": "note_codes"})
    inputs: tuple[TensorRow, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def note_codes(self) -> tuple[str, ...]:
        """Codes of the notes."""
        return tuple(note.code for note in self.notes)
