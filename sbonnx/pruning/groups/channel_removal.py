"""Removes the channels of a plan from a graph, or masks them: the same function with unchanged shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from sbonnx.channels.ids import varies
from sbonnx.graph import Graph, Normal, Variable, set_node_metadata
from sbonnx.graph.edit import Names, set_constant
from sbonnx.graph.query import constant, shape, tensors_by_name
from sbonnx.ops import LINEAR
from sbonnx.pruning.groups.dimensions import Dependencies, along_axis, dependencies
from sbonnx.pruning.groups.pruning_plan import PruningPlan
from sbonnx.pruning.groups.size_constants import SIZES, Remaining
from sbonnx.spec import Array

PRUNED: Final = "sbonnx.pruned"
"""Key of the node metadata that says what was removed."""


def remove(graph: Graph, plan: PruningPlan) -> None:
    """Remove the channels of a plan, in place.

    Weights, biases and other constants are sliced, ``group`` and constants that hold sizes are rewritten, and the
    shapes of tensors are set. What is left computes the same as the masked graph (`mask`), but for the order of sums.

    Raises:
        ModelError: the plan does not fit the graph, see `Dependencies.kept`.
    """
    found = dependencies(graph)
    keep, names = found.kept(plan), Names(graph)
    left = Remaining({name: keep[ids] for name, ids in found.ids.items() if not keep[ids].all()}, names, graph)
    if not left.masks:
        return
    for node in graph.nodes:
        if node.op in SIZES:
            SIZES[node.op](left, node)
    _slice_constants(found, keep, names)
    for linear in found.linears:
        if linear.is_depthwise:
            linear.node.attrs["group"] = int(keep[linear.inputs].sum())
        texts = [
            f"{int((~keep[ids]).sum())} of {len(ids)} {side} channels"
            for side, ids in (("input", linear.inputs), ("output", linear.outputs))
            if not keep[ids].all()
        ]
        if texts:
            set_node_metadata(graph, linear.node.name, PRUNED, ", ".join(texts))
    _reshape_tensors(graph, left)


def mask(graph: Graph, plan: PruningPlan) -> None:
    """Set the weights that read removed channels to zero, in place. All shapes stay.

    This defines what a pruned model computes: every path from a removed channel ends in these weights.

    Raises:
        ModelError: the plan does not fit the graph, see `Dependencies.kept`.
    """
    found = dependencies(graph)
    apply_mask(found, found.kept(plan), Names(graph))


def apply_mask(found: Dependencies, keep: Array, names: Names) -> None:
    """Set the weights that read removed ids to zero, in place. `keep`: bool (ids,)."""
    for linear in found.linears:
        if linear.is_depthwise or keep[linear.inputs].all():
            continue
        index = LINEAR[linear.node.op].weight
        weight = constant(linear.node.inputs[index])
        assert weight is not None
        set_constant(linear.node, index, linear.layer.scale_inputs(weight, keep[linear.inputs].astype(float)), names)


def _slice_constants(found: Dependencies, keep: Array, names: Names) -> None:
    """Slice each constant along all its axes at once, in place."""
    chosen: dict[tuple[int, int], list[tuple[int, Array]]] = {}
    nodes = {}
    for cut in found.cuts:
        if not keep[cut.ids].all():
            key = (id(cut.node), cut.index)
            chosen.setdefault(key, []).append((cut.axis, keep[cut.ids]))
            nodes[key] = cut.node
    for key, axes in chosen.items():
        values = constant(nodes[key].inputs[key[1]])
        assert values is not None
        set_constant(nodes[key], key[1], _sliced(values, axes), names)


def _sliced(values: Array, axes: Sequence[tuple[int, Array]]) -> Array:
    for axis, line in axes:
        values = np.compress(line, values, axis)
    return np.ascontiguousarray(values)


def _reshape_tensors(graph: Graph, left: Remaining) -> None:
    """Set the shapes of tensors that lost channels, and drop their entries in batch-norm statistics, in place."""
    tensors = tensors_by_name(graph)
    for name in left.masks:
        tensor = tensors[name]
        counts = left.counts(tensor)
        if isinstance(tensor, Variable) and counts:
            tensor.shape = [counts.get(axis, dim) for axis, dim in enumerate(shape(tensor) or ())]
        normal, whole = graph.info.normals.get(name), left.masks[name]
        if normal is None:
            continue
        line = along_axis(whole, 1) if varies(whole) == (1,) else None
        if line is None or len(line) != len(normal.mean):
            del graph.info.normals[name]
        else:
            graph.info.normals[name] = Normal(normal.node, normal.mean[line], normal.std[line], normal.epsilon[line])
