"""Conversion of a float32 graph, with or without Q/DQ, to a strongly typed graph in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.graph import Graph, Tensor, query
from sbonnx.plan.magnitudes import KINDS, Magnitudes
from sbonnx.precision.decide import decide
from sbonnx.precision.ranges import Ranges
from sbonnx.precision.slots import is_float32
from sbonnx.precision.write import drop_idle_casts, write
from sbonnx.report import Refusal

OPSET: Final = {"fp32": 13, "fp16": 13, "bf16": 22}
"""First opset in which common ops support the type: convolutions and pools have bfloat16 since 22. Q/DQ needs 19."""


@dataclass(frozen=True)
class Converted:
    """Result of `convert`.

    Attributes:
        notes: number of converted nodes, and constants that were changed to fit, one sentence each.
        refusals: what stays float32 with the direct reason; nodes that stay float32 because of these are only counted.
    """

    notes: tuple[str, ...]
    refusals: tuple[Refusal, ...]


def convert(graph: Graph, magnitudes: Mapping[str, Magnitudes], kind: str, keep_io: bool = True) -> Converted:
    """Convert float32 tensors to `kind` in place, except those that it cannot represent, with Casts between the two.

    The result is strongly typed: every node has one float type, shared by its inputs (except fixed types of its
    schema), as TensorRT's strongly typed networks require. The following stay float32: tensors whose values in
    calibration overflow (with a margin of 2) or underflow; constants, ops and bodies that cannot be converted
    (`decide`); arithmetic on shapes. Q/DQ pairs are converted if their scales are exact in the type; scales were
    rounded to it before codes were computed (`Plan.float_type`).

    Args:
        graph: sorted; opset 19 or newer with Q/DQ, 22 for most of bf16.
        magnitudes: of the float32 variables by name, before Q/DQ insertion; tensors without an entry stay float32.
        kind: "fp16" or "bf16".
        keep_io: keep the types of graph inputs and outputs.

    Raises:
        KeyError: unknown kind.
    """
    chosen = KINDS[kind]
    decision = decide(graph, Ranges(magnitudes, chosen), keep_io=keep_io)
    edges = [*graph.inputs, *graph.outputs]
    wide_edges = [tensor.name for tensor in edges if is_float32(tensor) and id(tensor) in decision.tensors]
    casts = write(graph, decision, chosen, keep_io=keep_io)
    casts -= drop_idle_casts(graph)
    floats = [
        node for node in query.all_nodes(graph) if any(_is(x, chosen.dtype) or is_float32(x) for x in node.outputs)
    ]
    floats = [node for node in floats if node.op != "Cast"]
    narrow = sum(any(_is(tensor, chosen.dtype) for tensor in node.outputs) for node in floats)
    notes = [f"{kind}: {narrow} of {len(floats)} float nodes converted, {len(floats) - narrow} stay float32"]
    notes[0] += f", {max(casts, 0)} Casts between them and at the model's inputs and outputs"
    if not keep_io and wide_edges:
        notes.append(f"inputs and outputs that stay float32 for their values: {', '.join(wide_edges)}")
    notes.extend(decision.notes)
    return Converted(tuple(notes), tuple(decision.refusals))


def _is(tensor: Tensor, dtype: np.dtype[Any]) -> bool:
    return bool(query.dtype(tensor) == dtype)
