"""View model of the graph of a network: blocks, nodes and tensors as JSON, which `graph.js` draws.

The browser computes the layout of a block when it is opened, so that large models are shown in seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Final

from sbonnx.ops import CONVOLUTIONS, RESIZES, WINDOWED_POOLS
from sbonnx.present.html.charts import SHADES, histogram_chart
from sbonnx.present.html.formatting import decibel, plain, text
from sbonnx.present.html.graph_blocks import GraphNode, blocks_of
from sbonnx.report.details import Details, LayerLoss, NodeRow, QuantizedRead, TensorRow
from sbonnx.values import plain as plain_values

SPATIAL: Final = 2
"""Number of axes before the spatial ones of a feature map: batch and channels."""

RESIZING: Final = CONVOLUTIONS | WINDOWED_POOLS | RESIZES
"""Operators whose outputs are feature maps; stages begin where these change their resolution."""

SAME_KERNEL: Final = "in-kernel-before"
"""Code of the reason that a node is computed in the kernel of the one before."""


@dataclass(frozen=True)
class GraphView:
    """View model of a graph.

    Attributes:
        total: number of nodes, those of branches included.
        quantized: number of nodes with a quantized input, and of those that their kernels compute too.
        refused: number of nodes with a refusal.
        floats: number of other nodes that compute floats.
        measured: whether any node has a loss.
        data: values for the script, see `graph_data`.
    """

    total: int
    quantized: int
    refused: int
    floats: int
    measured: bool
    data: Mapping[str, Any]


def graph_view(details: Details) -> GraphView | None:
    """Build the view of the nodes; None without nodes."""
    if not details.nodes:
        return None
    kinds = [kind_of(node) for node in details.nodes]
    return GraphView(
        total=len(kinds),
        quantized=kinds.count("quantized"),
        refused=sum(bool(node.refusals) and kind == "float" for node, kind in zip(details.nodes, kinds, strict=True)),
        floats=kinds.count("float"),
        measured=details.profile is not None and bool(details.profile.layers),
        data=graph_data(details),
    )


def kind_of(node: NodeRow) -> str:
    """Return "quantized", "float", or "other" for a node that computes no floats, such as sizes."""
    if node.reads or SAME_KERNEL in node.codes:
        return "quantized"
    floats = not node.outputs or any("float" in tensor.dtype or not tensor.dtype for tensor in node.outputs)
    return "float" if floats else "other"


def graph_data(details: Details) -> dict[str, Any]:
    """Return blocks, nodes and tensors for the script. Nodes and tensors refer to each other by position.

    Returns:
        ``nodes``, ``blocks`` and ``tensors`` (see the functions below), ``inputs`` and ``outputs`` of the model
        (positions of tensors), ``reasons`` as [refusal, code], ``histograms`` by role and tensor, and ``shades``: dB
        at which the shade changes.
    """
    rows = list(_after_branches(details.nodes))
    tensors, position = _tensors(details, rows)
    maker = {tensor: index for index, row in enumerate(rows) for tensor in _names(row)}
    losses: dict[str, dict[str, Any]] = defaultdict(dict)
    losses |= {} if details.profile is None else {row.node: _loss(row) for row in details.profile.layers}
    paths = _paths(details.nodes)
    blocks, block_of = blocks_of([_to_divide(index, row, maker, paths[row.name]) for index, row in enumerate(rows)])
    whys = [_why(row) for row in rows]
    reasons = {reason: index for index, reason in enumerate(dict.fromkeys(chain.from_iterable(whys)))}
    nodes = [
        {
            **_node(row, position),
            **losses[row.name],
            "block": block,
            "why": [reasons[reason] for reason in why],
        }
        for row, block, why in zip(rows, block_of, whys, strict=True)
    ]
    charts = {(row.role, text(row.tensor)): histogram_chart(row) for row in details.histograms}
    return {
        "nodes": nodes,
        "blocks": [[text(block.title), block.parent] for block in blocks],
        "tensors": tensors,
        "inputs": [position[tensor.name] for tensor in details.inputs],
        "outputs": [position[name] for name in details.outputs if name in position],
        "reasons": list(reasons),
        "histograms": {" ".join(key): plain_values(chart) for key, chart in charts.items() if chart is not None},
        "shades": SHADES,
    }


def _after_branches(nodes: Sequence[NodeRow]) -> Iterator[NodeRow]:
    """Yield nodes in an order in which each follows all that it depends on: after those of its branches."""
    owners: list[NodeRow] = []
    for node in nodes:
        while owners and not node.scope.startswith(_scope(owners[-1])):
            yield owners.pop()
        owners.append(node)
    yield from reversed(owners)


def _scope(node: NodeRow) -> str:
    return f"{node.scope}/{node.name}/" if node.scope else f"{node.name}/"


def _names(row: NodeRow) -> Sequence[str]:
    """Return the names of the tensors that a node computes; its own name where a report has none."""
    return [tensor.name for tensor in row.outputs] or [row.name]


def _tensors(details: Details, rows: Sequence[NodeRow]) -> tuple[list[list[str]], dict[str, int]]:
    """Return [name, type and shape] of all tensors, and their positions by name."""
    computed = (tensor for row in rows for tensor in row.outputs)
    tensors = {tensor.name: tensor for tensor in (*details.inputs, *computed)}
    for row in rows:
        if not row.outputs:
            tensors[row.name] = TensorRow(row.name, "", row.shape)
    listed = [
        [text(tensor.name), " ".join(filter(None, (tensor.dtype, _shape(tensor.shape))))] for tensor in tensors.values()
    ]
    return listed, {name: index for index, name in enumerate(tensors)}


def _paths(nodes: Sequence[NodeRow]) -> dict[str, tuple[str, ...]]:
    """Return the modules that contain each node. A node with branches, and each branch, count as modules."""
    scopes = {node.scope for node in nodes}
    owners = {scope.rpartition("/")[0] for scope in scopes}
    inside: dict[str, tuple[str, ...]] = defaultdict(tuple)  # by scope
    paths = {}
    modules = {module: tuple(map(text, filter(None, module.split("/")))) for module in {node.module for node in nodes}}
    for node in nodes:
        path = (*inside[node.scope], *modules[node.module])
        start = _scope(node)
        if start[:-1] in owners:
            path = (*path, text(node.name))
            inside.update({scope: (*path, text(scope[len(start) :])) for scope in scopes if scope.startswith(start)})
        paths[node.name] = path
    return paths


def _to_divide(index: int, row: NodeRow, maker: Mapping[str, int], path: tuple[str, ...]) -> GraphNode:
    makers = sorted({maker[name] for name in _reads(row) if name in maker and maker[name] < index})
    sizes = row.shape[SPATIAL:] if row.shape is not None and row.op in RESIZING else ()
    return GraphNode(text(row.name), path, tuple(makers), _shape(sizes))


def _why(row: NodeRow) -> list[tuple[str, str]]:
    return [(text(why), text(code)) for why, code in zip_longest(row.refusals, row.codes, fillvalue="")]


def _reads(row: NodeRow) -> Sequence[str]:
    return row.tensors if row.outputs else row.inputs


def _node(row: NodeRow, position: Mapping[str, int]) -> dict[str, Any]:
    """Return the values of one node; empty ones are left out.

    Returns:
        ``name``, ``op``, ``kind`` (see `kind_of`), ``module``, ``in`` and ``out`` (positions of tensors), ``reads``
        (see `_read`).
    """
    values: dict[str, Any] = {
        "name": text(row.name),
        "op": text(row.op),
        "kind": kind_of(row),
        "module": text(row.module),
        "in": [position[name] for name in _reads(row) if name in position],
        "out": [position[name] for name in _names(row)],
        "reads": [_read(read) for read in row.reads],
    }
    return {key: value for key, value in values.items() if value not in ("", [])}


def _loss(row: LayerLoss) -> dict[str, Any]:
    """Return ``loss`` ([title, text] of each figure of a node) and, if it was measured, ``db`` (isolated SQNR)."""
    values: dict[str, Any] = {"loss": list(_figures(row))}
    if row.alone is not None and not math.isnan(row.alone):
        values["db"] = round(min(max(row.alone, -999.0), 999.0), 2)
    return values


def _figures(loss: LayerLoss) -> Iterator[tuple[str, str]]:
    """Yield title and text of the figures that were measured."""
    titles = {
        "isolated": loss.alone,
        "by weights": loss.weights,
        "by inputs": loss.activations,
        "accumulated": loss.gathered,
    }
    yield from ((title, f"{decibel(value)} dB") for title, value in titles.items() if value is not None)


def _read(row: QuantizedRead) -> dict[str, Any]:
    """Return a quantized input: ``role``, ``tensor``, ``type``, ``bits``, and ``scale`` and ``range`` as texts."""
    values = {"role": row.role, "tensor": text(row.tensor), "type": text(row.label), "bits": row.bits}
    if row.low is not None and row.high is not None:
        values["range"] = f"{plain(row.low, 3)} to {plain(row.high, 3)}"
    if row.scales == 1:
        values["scale"] = plain(row.largest_scale, 4)
    elif row.scales:
        values["scale"] = f"{plain(row.smallest_scale, 3)} to {plain(row.largest_scale, 3)} ({row.scales} scales)"
    return values


def _shape(shape: Sequence[Any] | None) -> str:
    return "" if shape is None else " × ".join("?" if size is None else text(size) for size in shape)
