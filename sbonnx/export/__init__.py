"""Conversion of Q/DQ to other operators of a runtime: integer ops, block-wise weights, dynamic quantization."""

from __future__ import annotations

from collections.abc import Mapping

from sbonnx.backends import BACKENDS
from sbonnx.export import dynamic, nbits, packed, qoperator
from sbonnx.export.conversion import Converted
from sbonnx.graph import Graph
from sbonnx.recipe import Recipe


def finish(graph: Graph, recipe: Recipe, levels: Mapping[str, int] | None = None) -> Converted | None:
    """Convert Q/DQ to the operators of the recipe's mode and format. In place; return None if Q/DQ stay.

    Args:
        levels: see `Solution.levels`.
    """
    backend, converted = BACKENDS[recipe.backend], None
    if recipe.mode == "dynamic":
        converted = dynamic.convert(graph)
    elif recipe.mode == "weight_only" and backend.files.integer_operators:
        converted = nbits.convert(graph, accuracy_level=recipe.usual_level, levels=levels)
    elif recipe.format == "qoperator":
        converted = qoperator.convert(graph)
    if backend.files.packs_weights and recipe.weights == "codes":
        packed.pack(graph)
    return converted


__all__ = ["Converted", "finish"]
