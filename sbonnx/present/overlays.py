"""Overlays of the nodes of a model for other viewers: node data of Model Explorer, and metadata for Netron."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from sbonnx import graph as graphs
from sbonnx.graph.model import set_node_metadata
from sbonnx.present.html.charts import shade
from sbonnx.present.html.formatting import decibel, plain
from sbonnx.present.html.graph_view import kind_of
from sbonnx.present.model_description import ModelView
from sbonnx.report.details import LayerLoss, NodeRow

COLOURS: Final = ("#f4b9b4", "#f7cdb2", "#f8e0b5", "#f3ecbf", "#dcefc4", "#c3e8c9", "#aaddc0")
"""Backgrounds by shade of loss, as on the pages; the text is black."""

STATES: Final = {"quantized": "#d3e4fb", "float": "#ffffff", "other": "#eceef1"}
"""Backgrounds by `kind_of`."""

NODE_METADATA: Final = 10
"""First IR version in which nodes have metadata."""


def model_explorer(view: ModelView) -> str:
    """Return node data of Model Explorer: JSON with a value and a colour for each node, by its name.

    The value is the isolated SQNR in dB where losses were measured, and else the quantized types, or the code of the
    reason why the node stays float.
    """
    losses = _losses(view)
    measured = {
        name: {"value": round(loss.alone, 2), "bgColor": COLOURS[step], "textColor": "#000000"}
        for name, loss in losses.items()
        if loss.alone is not None and abs(loss.alone) < float("inf") and (step := shade(loss.alone)) is not None
    }
    states = {
        row.name: {"value": _types(row) or _state(row), "bgColor": STATES[kind_of(row)], "textColor": "#000000"}
        for row in view.details.nodes
    }
    return json.dumps({"results": measured or states}, indent=1) + "\n"


def write_netron(view: ModelView, output: Path, *, force: bool = False) -> None:
    """Write a copy of the file with what is known of each node in its metadata, which Netron shows beside attributes.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    graph = graphs.load(view.file, opset=1)
    entries = [(row.name, entry) for row in view.details.nodes for entry in _entries(row)]
    entries += [(name, entry) for name, loss in _losses(view).items() for entry in _figures(loss)]
    for name, (key, value) in entries:
        set_node_metadata(graph, name, f"sbonnx.{key}", value)
    graph.info.ir_version = max(graph.info.ir_version, NODE_METADATA)
    graphs.save(graph, output, force=force)


def _losses(view: ModelView) -> Mapping[str, LayerLoss]:
    profile = view.details.profile
    return {} if profile is None else {row.node: row for row in profile.layers}


def _types(row: NodeRow) -> str:
    return " × ".join(dict.fromkeys(read.label for read in row.reads if read.role != "bias"))


def _state(row: NodeRow) -> str:
    return f"{kind_of(row)}: {row.codes[0]}" if row.codes else kind_of(row)


def _figures(loss: LayerLoss) -> Iterator[tuple[str, str]]:
    figures = {"isolated": loss.alone, "accumulated": loss.gathered}
    yield from ((title, f"{decibel(value)} dB") for title, value in figures.items() if value is not None)


def _entries(row: NodeRow) -> Iterator[tuple[str, str]]:
    """Yield metadata of a node: state, types, ranges and reasons."""
    yield "state", _types(row) or kind_of(row)
    for read in row.reads:
        if read.low is not None and read.high is not None:
            yield f"{read.role} {read.tensor}", f"{read.label}, {plain(read.low, 3)} to {plain(read.high, 3)}"
    if row.refusals:
        yield "why", "; ".join(f"{why} ({code})" for why, code in zip(row.refusals, row.codes, strict=False))
