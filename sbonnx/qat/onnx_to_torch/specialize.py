"""Inputs with a known value or shape put into a graph, so that its branches are decided."""

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


def settle(
    graph: Graph,
    *,
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Graph:
    """The graph for some inputs only, simplified: branches whose condition is known then stand in the main graph.

    A plan for such a model is made of the settled graph. The given graph stays as it is; where there is nothing to
    settle (no value, no shape, no If) it is what is returned.

    Args:
        fixed: value by name of inputs that become constants (a sampling rate, a flag).
        shapes: shape by name of inputs: sizes, and names or None for axes that stay dynamic.

    Raises:
        ModelError: there is no such input, or the value or shape does not fit it.
    """
    values, wanted = dict(fixed or {}), dict(shapes or {})
    if not values and not wanted and not any(_branches(graph)):
        return graph
    made = copy(graph)
    inputs = {tensor.name: tensor for tensor in made.inputs}
    for name in [*values, *wanted]:
        if name not in inputs:
            raise ModelError(f"the model has no input '{name}' to settle; its inputs are {', '.join(inputs)}")
    for name, dims in wanted.items():
        _check(name, shape(inputs[name]), tuple(dims))
        inputs[name].shape = tuple(dims)
    for name, value in values.items():
        _fix(made, inputs[name], value)
    apply(made, SIMPLIFY)
    return made


def require_settled(graph: Graph) -> None:
    """Nothing, where no branch is left.

    Raises:
        ModelError: the condition of an If is not known; names it.
    """
    for node in _branches(graph):
        raise ModelError(
            f"the condition '{node.inputs[0].name}' of node '{node.name}' (If) is not constant: torch cannot be told "
            "which branch to train. Fix the inputs that it depends on (fixed={'name': value}, or shapes=...)"
        )


def _branches(graph: Graph) -> list[Any]:
    return [node for node in all_nodes(graph) if node.op == BRANCH and (node.domain or "") in STANDARD_DOMAINS]


def _check(name: str, known: tuple[Any, ...] | None, dims: tuple[Any, ...]) -> None:
    """Whether a shape fits what the file says.

    Raises:
        ModelError: it does not.
    """
    sizes = zip(known or dims, dims, strict=False)
    clash = any(isinstance(size, int) and isinstance(dim, int) and size != dim for size, dim in sizes)
    if clash or (known is not None and len(known) != len(dims)):
        raise ModelError(f"input '{name}' has the shape {list(known or ())}: it cannot be {list(dims)}")


def _fix(graph: Graph, tensor: Any, value: Any) -> None:
    """In place: an input becomes a constant."""
    kind = dtype(tensor)
    array = np.asarray(value, kind)
    _check(tensor.name, shape(tensor), array.shape)
    if any(output is tensor for output in graph.outputs):
        raise ModelError(f"input '{tensor.name}' is an output of the model as well: it cannot be fixed")
    held = Constant(tensor.name, array)
    for node, index in readers(tensor):
        replace_input(node, index, held)
    graph.inputs = [one for one in graph.inputs if one is not tensor]
