"""Origin of NaN and Inf in activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.sample_splitter import Unit
from sbonnx.calib.engine.segments import Segment, needed
from sbonnx.errors import DataError, ModelError, NumericError
from sbonnx.graph import Graph
from sbonnx.graph.extract import extract
from sbonnx.graph.query import dtype, scopes
from sbonnx.spec import Array


def blame(graph: Graph, segment: Segment, tensor: str, known: Mapping[str, Any], unit: Unit) -> NumericError:
    """Build the error for an observed tensor with NaN or Inf: the sample, the counts, and the first layer with any.

    Args:
        segment: the piece that computed `tensor`.
        known: its inputs and outputs for this sample.
    """
    x = known[tensor]
    nan, inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    text = f"activation '{tensor}' holds {nan} NaN and {inf} infinite values at {unit.where}"
    first = first_nonfinite(graph, segment, tensor, known)
    if first:
        text += f"; the first layer with any is {first}"
    return NumericError(f"{text}: mend the model or the data, or exclude that part from quantization")


def first_nonfinite(graph: Graph, segment: Segment, tensor: str, known: Mapping[str, Any]) -> str | None:
    """Find the topologically first node upstream of `tensor` in its segment with a non-finite output, or None.

    The segment is run again without optimisation, in one session with all intermediate tensors as outputs.
    """
    body = next(scope for where, scope in scopes(graph) if where == segment.scope)
    inside = set(segment.nodes)
    nodes = [node for node in needed(body, [tensor]) if node.name in inside]
    makers = {
        out.name: node for node in nodes for out in node.outputs if out.name and getattr(dtype(out), "kind", "") == "f"
    }
    if not makers:
        return None
    try:
        piece = extract(graph, segment.inputs, list(makers), scope=segment.scope)
        with LayerRunner(piece, optimisation="off", threads=1) as run:
            values = run({spec.name: known[spec.name] for spec in run.input_specs if spec.name in known})
    except (ModelError, DataError):  # only the origin is unknown; the NaN or Inf is still reported
        return None
    for name, node in makers.items():
        value: Array = values[name]
        if not np.isfinite(value).all():
            return f"'{node.name}' ({node.op}), output '{name}'"
    return None
