"""Specialization of a graph to known input values and shapes, so that the conditions of its Ifs become constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, copy
from sbonnx.graph.edit import replace_input
from sbonnx.graph.query import all_nodes, dtype, readers, shape
from sbonnx.ops import STANDARD_DOMAINS
from sbonnx.patterns import SIMPLIFY, apply

BRANCH: Final = "If"


def specialize(
    graph: Graph,
    *,
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Graph:
    """Specialize a graph to input values and shapes and simplify it; Ifs with a constant condition are inlined.

    A plan for such a model must be made from the specialized graph. The given graph is not changed; it is returned as
    is if there is nothing to do (no value, no shape, no If).

    Args:
        graph: graph to specialize.
        fixed: inputs that become constants (a sampling rate, a flag): value by name.
        shapes: shapes of inputs by name: sizes, and names or None for axes that stay dynamic.

    Raises:
        ModelError: there is no such input, or the value or shape does not match it.
    """
    values, wanted = dict(fixed or {}), dict(shapes or {})
    if not values and not wanted and not any(_branches(graph)):
        return graph
    specialized = copy(graph)
    inputs = {tensor.name: tensor for tensor in specialized.inputs}
    for name in [*values, *wanted]:
        if name not in inputs:
            raise ModelError(f"the model has no input '{name}' to fix; its inputs are {', '.join(inputs)}")
    for name, dims in wanted.items():
        _check(name, shape(inputs[name]), tuple(dims))
        inputs[name].shape = tuple(dims)
    for name, value in values.items():
        tensor = inputs[name]
        array = np.asarray(value, dtype(tensor))
        _check(name, shape(tensor), array.shape)
        if any(output is tensor for output in specialized.outputs):
            raise ModelError(f"input '{name}' is also an output of the model and cannot be fixed")
        fixed_value = Constant(name, array)
        for node, index in readers(tensor):
            replace_input(node, index, fixed_value)
        specialized.inputs = [other for other in specialized.inputs if other is not tensor]
    apply(specialized, SIMPLIFY)
    return specialized


def require_no_branches(graph: Graph) -> None:
    """Check that the graph has no If left.

    Raises:
        ModelError: the condition of an If is not constant; the message names it.
    """
    for node in _branches(graph):
        raise ModelError(
            f"the condition '{node.inputs[0].name}' of node '{node.name}' (If) is not constant, so the "
            "branch to train is not known. Fix the inputs that it depends on (fixed={'name': value}, or shapes=...)"
        )


def _branches(graph: Graph) -> list[Any]:
    return [node for node in all_nodes(graph) if node.op == BRANCH and (node.domain or "") in STANDARD_DOMAINS]


def _check(name: str, known: tuple[Any, ...] | None, dims: tuple[Any, ...]) -> None:
    """Check that a shape is compatible with the shape in the model.

    Raises:
        ModelError: the shapes are not compatible.
    """
    sizes = zip(known or dims, dims, strict=False)
    clash = any(isinstance(size, int) and isinstance(dim, int) and size != dim for size, dim in sizes)
    if clash or (known is not None and len(known) != len(dims)):
        raise ModelError(f"input '{name}' has shape {list(known or ())}, which does not match {list(dims)}")
