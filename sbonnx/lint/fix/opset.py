"""T14: a model whose Q/DQ are newer than its opset is converted to the opset that has them."""

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
    """The graph at the opset that its Q/DQ need, and the row that says so; the same graph where it has that."""
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
    """T14's place in the table: `lifted` makes another graph, and is done before all others."""
    return ()
