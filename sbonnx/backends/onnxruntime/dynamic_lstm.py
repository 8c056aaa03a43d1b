"""LSTM layers as onnxruntime's DynamicQuantizeLSTM, which quantizes its input and its state at run time.

Its weights are transposed, (directions, inputs, gates), with one scale a column. It sums uint8 x int8 products as
matrix products do: on x86 CPUs without 8-bit dot products they saturate, and the layer stays in float there.

Time over float, one thread, onnxruntime 1.32, AVX-512 VNNI, by hidden size and (steps, batch):

| hidden | (1, 1) | (20, 1) | (100, 1) | (20, 16) |
|---|---|---|---|---|
| 32 | 1.12 | 1.16 | 1.12 | 0.83 |
| 64 | 1.06 | 0.77 | 0.66 | 0.60 |
| 128 | 0.79 | 0.60 | 0.51 | 0.49 |
| 256 | 0.55 | 0.39 | 0.40 | 0.38 |
| 512 | 0.42 | 0.35 | 0.31 | 0.33 |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from sbonnx.backends.base import in_every_scope
from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import CONTRIB, DEQUANTIZE, DYNAMIC_LSTM
from sbonnx.spec import Array

HIDDEN: Final = {"LSTM": 128}
"""Smallest hidden size from which the integer kernel is faster than float for any number of steps and batch size."""

FLOAT_INPUTS: Final = 8
"""Number of inputs of an LSTM; scales and zero points follow them."""


def quantize_recurrent(graph: Graph, nodes: Collection[str]) -> list[str]:
    """Write the named LSTM nodes as DynamicQuantizeLSTM, if both weights are dequantized from codes. In place."""

    @in_every_scope()
    def rewrite(body: Body, names: edit.Names) -> Iterator[str]:
        turned: dict[int, list[Tensor]] = {}
        for node in body.nodes:
            if node.name not in nodes or node.op not in HIDDEN:
                continue
            pairs = [query.producer(tensor) for tensor in node.inputs[1:3]]
            if not all(_is_convertible(pair) for pair in pairs):
                continue
            operands = [turned.setdefault(id(pair), _operand(body, pair, names)) for pair in pairs if pair is not None]
            for index, (codes, _, _) in enumerate(operands, start=1):
                edit.replace_input(node, index, codes)
            node.inputs.extend(Variable("") for _ in range(FLOAT_INPUTS - len(node.inputs)))
            node.inputs.extend(tensor for _, *numbers in operands for tensor in numbers)
            node.attrs.pop("layout", None)
            node.op, node.domain = DYNAMIC_LSTM, CONTRIB
            yield f"{node.name}: {DYNAMIC_LSTM}"

    return rewrite(graph)


def _is_convertible(pair: Node | None) -> bool:
    """Return whether a node dequantizes constant int8 codes with float32 scales, one or one a row of the gates."""
    if pair is None or pair.op not in DEQUANTIZE or pair.attrs.get("block_size"):
        return False
    codes, scale, zero = query.constant(pair.inputs[0]), query.constant(pair.inputs[1]), query.optional_input(pair, 2)
    centred = zero is None or not np.any(query.constant(zero))
    if codes is None or scale is None or codes.dtype != np.int8 or scale.dtype != np.float32:
        return False
    return centred and (scale.size == 1 or pair.attrs.get("axis", 1) == 1)


def _operand(body: Body, pair: Node, names: edit.Names) -> list[Tensor]:
    """Return codes (directions, inputs, gates), scales and zero points (directions, gates) of a weight."""
    codes, scale = (np.asarray(query.constant(tensor)) for tensor in pair.inputs[:2])
    stem = str(pair.inputs[0].name)
    scales = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1), codes.shape[:2]))
    values: dict[str, Array] = {
        "columns": np.ascontiguousarray(codes.transpose(0, 2, 1)),
        "column_scales": scales,
        "column_zero_points": np.zeros(scales.shape, np.int8),
    }
    return [edit.add_constant(body, f"{stem}_{part}", array, names) for part, array in values.items()]
