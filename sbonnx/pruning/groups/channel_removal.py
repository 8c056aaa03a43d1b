"""Removes the channels of a plan from a graph, or masks them: the same function with unchanged shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from sbonnx.channels.ids import varies
from sbonnx.graph import Graph, Node, Normal, Tensor, Variable, copy, set_node_metadata
from sbonnx.graph.edit import Names, replace_input, set_constant
from sbonnx.graph.query import constant, node_by_name, shape, tensors_by_name
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
    traced = dependencies(graph)
    keep, names = traced.kept(plan), Names(graph)
    left = Remaining({name: keep[ids] for name, ids in traced.ids.items() if not keep[ids].all()}, names, graph)
    if not left.masks:
        return
    for node in graph.nodes:
        if node.op in SIZES:
            SIZES[node.op](left, node)
    _slice_constants(traced, keep, names)
    for linear in traced.linears:
        if linear.passes_on:
            linear.node.attrs["group"] = int(keep[linear.inputs].reshape(linear.layer.group, -1).any(axis=1).sum())
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
    traced = dependencies(graph)
    apply_mask(traced, traced.kept(plan), Names(graph))


def apply_mask(found: Dependencies, keep: Array, names: Names) -> None:
    """Set the weights that read removed ids to zero, in place. `keep`: bool (ids,)."""
    editor = _ConstantEditor(names)
    for linear in found.linears:
        if linear.passes_on or keep[linear.inputs].all():
            continue
        line = keep[linear.inputs]
        masked = partial(linear.layer.scale_inputs, scale=line.astype(float))
        editor.set(linear.node, LINEAR[linear.node.op].weight, line.tobytes(), masked)


class _ConstantEditor:
    """Replaces constants; nodes that share one share the new one if it is edited in the same way for each.

    Args:
        names: allocator of names.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._made: dict[tuple[int, bytes], Tensor] = {}
        self._old: list[Tensor] = []  # keeps the ids of replaced tensors

    def set(self, node: Node, index: int, key: bytes, edit: Callable[[Array], Array]) -> None:
        """Replace a constant input by ``edit(values)``; edits with equal keys are equal."""
        old = node.inputs[index]
        copied = self._made.get((id(old), key))
        if copied is not None:
            replace_input(node, index, copied)
            return
        values = constant(old)
        assert values is not None
        set_constant(node, index, edit(values), self._names)
        self._made[id(old), key] = node.inputs[index]
        self._old.append(old)


def restore(graph: Graph, plan: PruningPlan, before: Graph, after: Graph) -> None:
    """Set constants of a masked graph to changed values of its pruned graph, in place: `remove` backwards.

    Args:
        graph: the masked graph.
        plan: what was removed from it.
        before: the pruned graph: `graph` after `remove`.
        after: a copy of `before` with other values in some constants. Equal constants stay as they are.

    Raises:
        ModelError: the plan does not fit the graph, see `Dependencies.kept`.
    """
    changed = _changed_constants(before, after)
    nodes, places = node_by_name(graph), copy(graph)
    own = Names(places)
    for name, node in node_by_name(places).items():
        for index in (index for owner, index in changed if owner == name):
            size = np.asarray(constant(node.inputs[index])).shape
            set_constant(node, index, np.arange(np.prod(size, dtype=np.int64), dtype=np.float64).reshape(size), own)
    remove(places, plan)  # what remains are the positions of the remaining values
    located = node_by_name(places)
    editor = _ConstantEditor(Names(graph))
    for (name, index), values in changed.items():
        at = np.asarray(constant(located[name].inputs[index])).astype(np.int64)
        editor.set(nodes[name], index, at.tobytes() + values.tobytes(), partial(_with_values, at=at, values=values))


def _with_values(whole: Array, at: Array, values: Array) -> Array:
    """Return a copy of `whole` with other values at flat positions."""
    edited = np.array(whole)
    edited.reshape(-1)[at] = values
    return edited


def _changed_constants(before: Graph, after: Graph) -> dict[tuple[str, int], Array]:
    """Return the constants of `after` that differ from those of `before`, by node and input."""
    changed, old = {}, node_by_name(before)
    for name, node in node_by_name(after).items():
        for index, tensor in enumerate(node.inputs):
            values = constant(tensor)
            if values is not None and not np.array_equal(values, np.asarray(constant(old[name].inputs[index]))):
                changed[name, index] = np.asarray(values)
    return changed


def _slice_constants(found: Dependencies, keep: Array, names: Names) -> None:
    """Slice each constant along all its axes at once, in place."""
    chosen: dict[tuple[int, int], list[tuple[int, Array]]] = {}
    nodes = {}
    for cut in found.cuts:
        line = np.asarray(keep[cut.ids].any(axis=1))
        if not line.all():
            key = (id(cut.node), cut.index)
            chosen.setdefault(key, []).append((cut.axis, line))
            nodes[key] = cut.node
    editor = _ConstantEditor(names)
    for key, axes in chosen.items():
        digest = repr([(axis, line.tobytes()) for axis, line in axes]).encode()
        editor.set(nodes[key], key[1], digest, partial(_sliced, axes=axes))


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
