"""T14: conversion of a model to the opset that its Q/DQ nodes require."""

from __future__ import annotations

from collections.abc import Iterable

from sbonnx import graph as graphs
from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.errors import ModelError
from sbonnx.graph import Graph
from sbonnx.lint.fix.bench import Bench
from sbonnx.lint.fix.types import Fixed
from sbonnx.lint.tensorrt_codes import opset_wanted
from sbonnx.lint.view import View


def lifted(graph: Graph, target: str) -> tuple[Graph, tuple[Fixed, ...]]:
    """Convert the graph to the opset that its Q/DQ need, and report it; return the same graph if not needed."""
    view = View(graph, target)
    if view.family != "tensorrt":
        return graph, ()
    needed, newest = opset_wanted(view), PROFILES[view.release].newest_opset
    if needed <= view.opset:
        return graph, ()
    if needed > newest:
        why = f"opset {needed} is newer than {target} reads: use other types or another version"
        return graph, (Fixed("T14", "", "", why, done=False),)
    try:
        made = graphs.load(graphs.to_proto(graph), opset=needed)
    except ModelError as error:
        return graph, (Fixed("T14", "", "", f"cannot be converted to opset {needed}: {error}", done=False),)
    made.info.path, made.info.files = graph.info.path, graph.info.files
    what = f"converted from opset {view.opset} to {made.opset}"
    return made, (Fixed("T14", "", "", what, exact=True),)


def before(bench: Bench) -> Iterable[Fixed]:
    """T14: Do nothing; `lifted` creates a new graph, and runs before all other fixes."""
    return ()
