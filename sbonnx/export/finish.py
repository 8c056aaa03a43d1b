"""Last step before saving: conversion to the operators of the recipe's mode and format."""

from __future__ import annotations

import sbonnx.export.dynamic as dynamic
import sbonnx.export.nbits as nbits
import sbonnx.export.packed as packed
import sbonnx.export.qoperator as qoperator
from sbonnx.export.read import Converted
from sbonnx.graph import Graph
from sbonnx.recipe import Recipe


def finish(graph: Graph, recipe: Recipe) -> Converted | None:
    """Convert Q/DQ to the operators of the recipe's mode and format. In place; return None if Q/DQ stay."""
    converted = _converted(graph, recipe)
    if recipe.backend == "onnxruntime" and recipe.weights == "codes":
        packed.pack(graph)
    return converted


def _converted(graph: Graph, recipe: Recipe) -> Converted | None:
    if recipe.mode == "dynamic":
        return dynamic.convert(graph)
    if recipe.mode == "weight_only" and recipe.backend == "onnxruntime":
        return nbits.convert(graph, accuracy_level=recipe.accuracy_level)
    return qoperator.convert(graph) if recipe.format == "qoperator" else None
