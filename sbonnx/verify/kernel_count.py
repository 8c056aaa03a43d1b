"""Count of the integer kernels in the optimized graphs of a quantized file, with reasons for ops computed in float."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import onnx

from sbonnx.backends.onnxruntime.float_kernels import (
    after_pairs,
    before_quantize,
    data_inputs,
    quantized_outputs,
    reason,
    weight_of,
    weight_pair,
)
from sbonnx.backends.onnxruntime.graph_transformers import original_name
from sbonnx.backends.onnxruntime.model_index import Body, bodies
from sbonnx.backends.runtime_types import ExecutedLayer, layers_by_name
from sbonnx.ops import (
    CONTROL_FLOW,
    DECODES,
    DEQUANTIZE,
    INTEGER_ON_CPU,
    LINEAR,
    MATRIX_PRODUCTS,
    QDQ,
    QUANTIZE,
)
from sbonnx.report import Reason
from sbonnx.report.figures import FloatOp, Kernels

FLOAT_TYPES: Final = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)

Place = tuple[Body, onnx.NodeProto]
"""A node, and the body that contains it."""


def count(quantized: onnx.ModelProto, chosen: onnx.ModelProto, executed: onnx.ModelProto | None = None) -> Kernels:
    """Count the kernels of a quantized file.

    Args:
        quantized: the file. External data is not needed, here and below.
        chosen: the graph that onnxruntime creates from it at level "extended", where kernels are chosen and names kept.
        executed: the graph at level "all", whose kernels are executed; it also contains layout conversions.
    """
    within = [(body, node) for body in bodies(quantized) for node in body.nodes]
    planned = [(body, node) for body, node in within if _is_planned(body, node)]
    optimised = _Optimised(chosen)
    places = [optimised.place_of(body, node) for body, node in planned]
    weighted: list[FloatOp] = []
    others: list[FloatOp] = []
    kept = {id(node) for _, node in planned}
    for (body, node), place in zip(planned, places, strict=True):
        if place is None or place[0].reads_codes(place[1]):
            continue
        kept.remove(id(node))
        row = FloatOp(node.name or str(node.output[0]), node.op_type, reason(body, node, place[1]))
        (others if weight_of(body, node) is None else weighted).append(row)
    return Kernels(
        **_kernels(chosen if executed is None else executed),
        planned=len(planned),
        folded=sum(place is None for place in places),
        float_weighted=tuple(weighted),
        float_planned=tuple(others),
        stranded=tuple(optimised.stranded({id(place[1]) for place in places if place is not None})),
        **_weights(quantized, kept),
    )


def count_layers(quantized: onnx.ModelProto, layers: Iterable[ExecutedLayer], title: str) -> Kernels:
    """Count the kernels that a runtime other than onnxruntime executes for a quantized file.

    Args:
        quantized: the file; external data is not needed.
        layers: the executed kernels.
        title: name of the runtime, for reasons.
    """
    layers = list(layers)
    layer_of = layers_by_name(layers)
    counts = {kind: Counter(layer.kind for layer in layers if layer.integer is kind) for kind in (True, False)}
    planned = [(body, node) for body in bodies(quantized) for node in body.nodes if _is_planned(body, node)]
    rows: dict[bool, list[FloatOp]] = {True: [], False: []}
    folded = 0
    kept: set[int] = set()
    for body, node in planned:
        names = (node.name, *node.output)
        own = next((layer_of[name] for name in names if name in layer_of), None)
        if own is None:
            folded += 1
        if own is None or own.integer:
            kept.add(id(node))
            continue
        why = next(_bad_pairs(body, node), Reason("executed-in-float", f"{title} executes it as {own.kind} in float"))
        rows[weight_of(body, node) is not None].append(FloatOp(node.name or str(node.output[0]), node.op_type, why))
    return Kernels(
        integer=dict(counts[True].most_common()),
        floating=dict(counts[False].most_common()),
        planned=len(planned),
        folded=folded,
        float_weighted=tuple(rows[True]),
        float_planned=tuple(rows[False]),
        **_weights(quantized, kept),
    )


def _weights(model: onnx.ModelProto, integer: Collection[int]) -> dict[str, Any]:
    """Count the weight values, each constant once: the figures of `Kernels` about weights.

    Of a weight that several nodes read, the share of nodes counts that read it in integers.

    Args:
        integer: ids of the nodes that run in integers.
    """
    sizes: dict[str, tuple[str, int]] = {}  # by constant: the op that reads it, and its values
    uses: dict[str, list[bool]] = {}  # by constant: whether each linear node reads it in integers
    for body in bodies(model):
        scales = {name for node in body.nodes if body.reads_codes(node) or node.op_type in QDQ for name in node.input}
        for node in body.nodes:
            weight = weight_of(body, node)
            if weight is not None:
                sizes[weight.name] = (node.op_type, _values(weight, node))
                uses.setdefault(weight.name, []).append(id(node) in integer)
        for name, readers in body.readers.items():
            behind = _behind_codes(body, name)
            constant, users = body.constants.get(name), behind or readers
            if constant is None or constant.name in sizes or (name in scales and not behind):
                continue
            if (behind or constant.data_type in FLOAT_TYPES) and sum(dim > 1 for dim in constant.dims) > 1:
                sizes[constant.name] = (users[0].op_type, math.prod(constant.dims))
                if all(map(body.reads_codes, users)):  # further weights of one op: both of a DynamicQuantizeLSTM
                    uses[constant.name] = [id(user) in integer for user in users]
    total = sum(size for _, size in sizes.values())
    left: Counter[str] = Counter()
    for name, (op, size) in sizes.items():
        kept = uses.get(name, [False])
        left[op] += size - size * sum(kept) // len(kept)
    left += Counter()  # without zeros
    share = 1 - sum(left.values()) / total if total else 1.0
    return {"weights_in_integers": share, "float_weights": dict(left.most_common())}


def _behind_codes(body: Body, name: str) -> list[onnx.NodeProto]:
    """Return the nodes that read a constant of codes as floats; none if it holds no codes."""
    readers: list[onnx.NodeProto] = []
    names = [name] if name in body.codes and name in body.constants else []
    while names:
        for node in body.readers.get(names.pop(), ()):
            if node.op_type in DECODES | DEQUANTIZE:
                names += node.output
            else:
                readers.append(node)
    return readers


def _values(weight: onnx.TensorProto, node: onnx.NodeProto) -> int:
    """Return the number of values of a weight, of which a byte holds several if the op says so."""
    bits = next((attribute.i for attribute in node.attribute if attribute.name == "bits"), 8)
    packed = weight.data_type == onnx.TensorProto.UINT8 and 0 < bits < 8
    return math.prod(weight.dims) * 8 // bits if packed else math.prod(weight.dims)


def _bad_pairs(body: Body, node: onnx.NodeProto) -> Iterator[Reason]:
    """Yield the inputs of a node that are float."""
    for name in node.input[:2] if node.op_type in LINEAR else data_inputs(body, node):
        if name and body.pair(name) is None:
            yield Reason("input-float", f"its input '{name}' is float")


def _is_planned(body: Body, node: onnx.NodeProto) -> bool:
    if node.op_type in QDQ | CONTROL_FLOW:
        return False
    if body.reads_codes(node) or weight_pair(body, node) is not None:
        return True
    data = data_inputs(body, node) if node.op_type in INTEGER_ON_CPU else []
    if not data or any(body.pair(name) is None for name in data) or not any(map(body.activation, data)):
        return False
    return node.op_type in MATRIX_PRODUCTS or bool(quantized_outputs(body, node))


class _Optimised:
    """Index of an optimized graph by the names of the file that onnxruntime created it from."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.bodies = tuple(bodies(model))
        self.by_name: dict[str, Place] = {}
        self.by_output: dict[str, Place] = {}
        self.by_weight: dict[str, list[Place]] = {}
        for body in self.bodies:
            for node in body.nodes:
                if node.op_type not in QDQ:
                    self.by_output.update((name, (body, node)) for name in node.output if name)
                    self.by_name.setdefault(original_name(node.name), (body, node))
                    weight = weight_of(body, node)
                    if weight is not None:
                        self.by_weight.setdefault(weight.name, []).append((body, node))
        for body in self.bodies:  # an unchanged name takes precedence over one that onnxruntime extended
            self.by_name.update((node.name, (body, node)) for node in body.nodes if node.op_type not in QDQ)

    def place_of(self, body: Body, node: onnx.NodeProto) -> Place | None:
        """Return the kernel that computes a node of the file, or None if it has no separate kernel."""
        if node.name in self.by_name and node.name:
            return self.by_name[node.name]
        for name in (*node.output, *quantized_outputs(body, node)):
            if name in self.by_output:
                return self.by_output[name]
        weight = weight_of(body, node)
        readers = [] if weight is None else self.by_weight.get(weight.name, [])
        return readers[0] if len(readers) == 1 else None

    def stranded(self, known: set[int]) -> Iterator[FloatOp]:
        """Yield float ops, without known ids, that read a dequantized activation and a weight, or write to a Q."""
        for body, node in after_pairs(self.bodies):
            if id(node) not in known and (weight_pair(body, node) is not None or before_quantize(body, node)):
                yield FloatOp(original_name(node.name) or str(node.output[0]), node.op_type, reason(body, node, node))


def _kernels(model: onnx.ModelProto) -> dict[str, Any]:
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    pairs: Counter[bool] = Counter()
    for body in bodies(model):
        for node in body.nodes:
            if node.op_type in QDQ:
                pairs[node.op_type in QUANTIZE] += 1
            elif node.op_type not in CONTROL_FLOW:
                counts[body.reads_codes(node)][node.op_type] += 1
    integer, floating = (dict(counts[which].most_common()) for which in (True, False))
    return {"integer": integer, "floating": floating, "quantize": pairs[True], "dequantize": pairs[False]}
