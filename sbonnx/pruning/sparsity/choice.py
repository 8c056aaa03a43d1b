"""Layers that become sparse, and the reasons why others stay dense; which of them TensorRT runs faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.backends.tensorrt.sparse_kernels import expected
from sbonnx.errors import RecipeError
from sbonnx.linear.layer import LinearLayer
from sbonnx.linear.zero_patterns import SparsityPattern, Unstructured
from sbonnx.pruning.groups.dimensions import WHAT, Dependencies
from sbonnx.pruning.groups.removal_trace import LinearSides
from sbonnx.pruning.settings import LayerPruning
from sbonnx.report import Reason, Refusal

FEW: Final = 4
"""Input channels up to which a convolution stays dense: first layers, whose zeros cost much and save little."""


@dataclass(frozen=True)
class SparseChoice:
    """Decision for one linear layer.

    Attributes:
        layer: name of the node.
        layout: of its weight.
        pattern: of its zeros; None: it stays dense.
        why: reason why it stays dense.
        tensorrt: what TensorRT is expected to do with the sparse weight; "" if it stays dense.
    """

    layer: str
    layout: LinearLayer
    pattern: SparsityPattern | None
    why: Reason | None = None
    tensorrt: str = ""

    @property
    def values(self) -> int:
        """Number of weights."""
        return self.layout.groups * self.layout.outputs * self.layout.inputs

    @property
    def plan(self) -> SparsePlan:
        """The decision as it is printed."""
        pattern = None if self.pattern is None else str(self.pattern)
        return SparsePlan(self.layer, self.values, pattern, self.why, self.tensorrt)


@dataclass(frozen=True)
class SparsePlan:
    """A layer and the pattern that its weight gets.

    Attributes:
        layer: name of the node.
        values: number of values of its weight.
        pattern: such as "2:4"; None: it stays dense.
        why: reason why it stays dense; None if it does not.
        tensorrt: what TensorRT is expected to do with it.
    """

    layer: str
    values: int
    pattern: str | None
    why: Reason | None
    tensorrt: str


@dataclass(frozen=True)
class SparseLayers:
    """Layers of a model that can become sparse.

    Attributes:
        model: the model.
        sparse: layers with weights.
    """

    model: str
    sparse: tuple[SparsePlan, ...]


def choose_sparse(
    found: Dependencies, pattern: SparsityPattern, layers: Mapping[str, LayerPruning] | None = None
) -> list[SparseChoice]:
    """Return one decision for each linear layer of the main graph, in order. `layers`: settings of single layers.

    Raises:
        RecipeError: a share of zeros leaves nothing, or is set for a layer with an N:M pattern.
    """
    chosen = []
    for sides in found.linears:
        name, layout = sides.node.name, sides.layer
        change = (layers or {}).get(name, LayerPruning())
        own = pattern
        if change.ratio is not None:
            if not isinstance(pattern, Unstructured):
                raise RecipeError(f"pruning: {change.why}.RATIO is for unstructured zeros, and TYPE is {pattern}")
            own = Unstructured(change.ratio)
        if isinstance(own, Unstructured) and own.share >= 1:
            raise RecipeError(f"pruning: all weights of '{name}' would be zero; write a share below 1")
        why = Reason("skipped", f"skipped by {change.why}") if change.skip else dense_reason(sides, own)
        if why is None:
            chosen.append(SparseChoice(name, layout, own, None, expected(layout, own)))
        else:
            chosen.append(SparseChoice(name, layout, None, why))
    return chosen


def dense_reason(sides: LinearSides, pattern: SparsityPattern) -> Reason | None:
    """Return the reason why a layer stays dense, or None."""
    layer = sides.layer
    if layer.index != 1 or 0 in layer.shape:
        return Reason("weight-empty-or-left", "its weight is empty or on the left")
    if sides.shared:
        return Reason("weight-is-shared", "another layer reads the same weight")
    if sides.is_depthwise:
        return Reason("depthwise", "depthwise: each output reads one channel")
    if not sides.node.inputs[0].inputs:
        return Reason("first-layer", "reads an input of the model: first layers stay dense")
    if layer.kernel and layer.in_channels // layer.group <= FEW:
        return Reason("first-layer", f"has {layer.in_channels // layer.group} input channels: first layers stay dense")
    if pattern.share == 0:
        return Reason("no-zeros-wanted", "its share of zeros is 0")
    return pattern.misfit(layer)


def dense_refusals(chosen: Sequence[SparseChoice]) -> list[Refusal]:
    """Return one refusal for each layer that stays dense."""
    return [
        Refusal(WHAT, choice.layer, Reason(choice.why.code, f"stays dense: {choice.why}"))
        for choice in chosen
        if choice.why is not None
    ]
