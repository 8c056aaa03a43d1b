"""Fixes of zero points and quantized types, signed for TensorRT and unsigned for onnxruntime; one scale at a Concat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from sbonnx.graph import Node, Tensor, edit, query
from sbonnx.linting.fix.edit_context import Bench, Fixed, code_type
from sbonnx.linting.model_view import Quantizer
from sbonnx.linting.ort import numbers as ort_numbers
from sbonnx.linting.ort import read as ort_read
from sbonnx.linting.tensorrt import pair_placement
from sbonnx.ops import DEQUANTIZE
from sbonnx.qdq.arithmetic import QDQParams, is_integer, limits
from sbonnx.spec import PAIR_SUM, Array

SIGNED: Final = {"uint8": "int8", "int8": "int8", "uint4": "int4", "int4": "int4"}
"""Signed type of the same bit width, for types whose signed form runtimes support."""


@dataclass(frozen=True)
class PairNodes:
    """A QuantizeLinear and the DequantizeLinear nodes that read it, all with the same parameters."""

    quantize: Quantizer
    backs: tuple[Quantizer, ...]

    @property
    def nodes(self) -> tuple[Quantizer, ...]:
        """The QuantizeLinear and all DequantizeLinear nodes."""
        return (self.quantize, *self.backs)


def pair_of(bench: Bench, quantizer: Quantizer) -> PairNodes | str:
    """Return the pair that starts with a QuantizeLinear, or the reason why its parameters cannot be changed."""
    backs = bench.view.dequantizers_of(quantizer)
    for node, index in query.readers(quantizer.output):
        if node.op not in DEQUANTIZE or index != 0:
            return f"{node.op} '{node.name}' reads the codes themselves"
    if bench.view.leaves(quantizer.output):
        return f"the codes '{quantizer.output.name}' are an output"
    other = next((back for back in backs if not back.same_numbers(quantizer)), None)
    if other is not None:
        return f"'{other.name}' has other numbers than its QuantizeLinear: calibrate again to determine which are right"
    return PairNodes(quantizer, tuple(backs))


def symmetric(bench: Bench) -> Iterator[Fixed]:
    """T02, T03: Convert codes to signed types with zero point 0."""
    for quantizer in bench.view.distinct:
        kind = quantizer.codes or ""
        if kind == "int32" or (kind == SIGNED.get(kind) and (quantizer.zero is None or not np.any(quantizer.zero))):
            if quantizer.has_zero and quantizer.zero is None:
                yield Fixed("T02", quantizer.name, quantizer.zero_name, "the zero point is computed", done=False)
            continue
        if not is_integer(code_type(kind)) if kind else True:
            continue
        rule = "T02" if quantizer.zero is not None and np.any(quantizer.zero) else "T03"
        if kind not in SIGNED:
            why = f"{kind} does not fit 8 bits: quantize the tensor again"
            yield Fixed(rule, quantizer.name, str(quantizer.data.name), why, done=False)
        elif quantizer.quantizes and bench.view.is_activation_pair(quantizer):
            yield _activation(bench, rule, quantizer)
        elif bench.view.is_constant(quantizer.data):
            yield constant(bench, rule, quantizer)
        elif bench.view.quantizer_of(quantizer.data) is None:
            why = f"the codes '{quantizer.data.name}' are computed without a QuantizeLinear"
            yield Fixed(rule, quantizer.name, str(quantizer.data.name), why, done=False)


def _activation(bench: Bench, rule: str, quantizer: Quantizer) -> Fixed:
    """Fix one pair on a computed tensor: shift codes with a central zero point, else re-centre with a larger scale."""
    tensor = str(quantizer.data.name)
    pair, old = pair_of(bench, quantizer), bench.numbers(quantizer)
    if isinstance(pair, str) or old is None:
        why = pair if isinstance(pair, str) else "scale or zero point is computed"
        return Fixed(rule, quantizer.name, tensor, why, done=False)
    new, exact = _about_zero(old)
    floats = bench.rectified(quantizer.node)
    was = f"{old.zero.dtype} zero point {_first(old.zero)}"
    if exact:
        what = f"{was} -> {new.zero.dtype} zero point 0, the codes shifted"
    else:
        what = f"{was} -> {new.zero.dtype} zero point 0, scale {_first(old.scale):.4g} -> {_first(new.scale):.4g}"
    if floats is not quantizer.data:
        node = query.producer(floats)
        what += f"; {'' if node is None else node.op} restored, which saturation had replaced"
        edit.replace_input(quantizer.node, 0, floats)
        exact = False
    for member in pair.nodes:
        renumber(bench, member, new, tensor)
    return Fixed(rule, quantizer.name, tensor, what, exact=exact)


def _about_zero(old: QDQParams) -> tuple[QDQParams, bool]:
    """Compute signed parameters with zero point 0 that cover the old range, and whether the scale is unchanged.

    scale' = scale * max((qmax - zero) / qmax', (zero - qmin) / -qmin')
    """
    low, high = limits(old.zero.dtype)
    kind = code_type(SIGNED[str(old.zero.dtype)])
    new_low, new_high = limits(kind)
    zero = old.zero.astype(np.int64)
    ratio = np.maximum((high - zero) / new_high, (zero - low) / -new_low)
    scale = np.asarray((old.scale.astype(np.float64) * ratio).astype(old.scale.dtype))
    shifted = bool((high - zero == new_high).all())
    return replace(old, scale=old.scale if shifted else scale, zero=np.zeros(old.zero.shape, kind)), shifted


def renumber(bench: Bench, quantizer: Quantizer, new: QDQParams, stem: str) -> None:
    """Set new parameters on a node of a pair, and their type on its codes. In place."""
    bench.set_numbers(quantizer.node, new, stem)
    codes: Tensor = quantizer.output if quantizer.quantizes else quantizer.data
    if query.constant(codes) is None:
        codes.dtype = new.zero.dtype


def _first(values: Array) -> Any:
    return values.reshape(-1)[0].item()


def constant(bench: Bench, rule: str, quantizer: Quantizer) -> Fixed:
    """Fix a stored tensor: subtract the zero point if the codes fit the signed type, else round to a larger scale."""
    tensor = str(quantizer.data.name)
    old, stored = bench.numbers(quantizer), query.constant(quantizer.data)
    if old is None or stored is None:
        return Fixed(rule, quantizer.name, tensor, "its codes, scale or zero point are computed", done=False)
    try:
        steps = old.steps(old.quantize(stored) if quantizer.quantizes else stored)
        new, codes = _narrowed(old, steps)
    except ValueError as error:  # scales that do not match
        return Fixed(rule, quantizer.name, tensor, str(error), done=False)
    exact = bool(np.array_equal(old.scale, new.scale))
    what = f"{old.zero.dtype} zero point {_first(old.zero)} -> {new.zero.dtype} zero point 0"
    what += "" if exact else ", the scale raised where the codes do not fit"
    if quantizer.quantizes:
        pair = pair_of(bench, quantizer)
        if isinstance(pair, str):
            return Fixed(rule, quantizer.name, tensor, pair, done=False)
        exact = exact and bool(np.array_equal(new.steps(new.quantize(stored)), steps))
        for member in pair.nodes:
            renumber(bench, member, new, tensor)
    else:
        bench.set_numbers(quantizer.node, new, tensor)
        edit.replace_input(quantizer.node, 0, bench.constant(f"{tensor}_signed", codes))
    return Fixed(rule, quantizer.name, tensor, what, exact=exact)


def _narrowed(old: QDQParams, steps: Array) -> tuple[QDQParams, Array]:
    """Compute signed parameters with zero point 0 for codes minus their zero point, and the new codes.

    Scales grow only if codes exceed the limits: ``scale' = scale * max(max / qmax, min / qmin, 1)``.
    """
    kind = code_type(SIGNED[str(old.zero.dtype)])
    low, high = limits(kind)
    most = np.maximum(grouped(old, steps, np.maximum) / high, grouped(old, steps, np.minimum) / low)
    ratio = np.maximum(most, 1.0)
    scale = np.where(ratio > 1, old.scale.astype(np.float64) * ratio, old.scale).astype(old.scale.dtype)
    new = replace(old, scale=np.asarray(scale), zero=np.zeros(old.scale.shape, kind))
    codes = np.rint(steps / new.spread(ratio.reshape(old.scale.shape), steps.shape))
    return new, np.asarray(np.clip(codes, low, high).astype(np.int64).astype(kind))


def grouped(old: QDQParams, values: Array, reduce: np.ufunc) -> Array:
    """Return the largest or smallest value under each scale, in the shape of the scale."""
    extremes = np.zeros(old.scale.shape, np.float64)
    if old.scale.size == 1:
        return np.full(old.scale.shape, reduce.reduce(values, axis=None, initial=0), np.float64)
    places = np.arange(old.scale.size).reshape(old.scale.shape)
    reduce.at(extremes.reshape(-1), np.broadcast_to(old.spread(places, values.shape), values.shape), values)
    return extremes


# --- onnxruntime ------------------------------------------------------------------------------------------------------


def unsigned_activations(bench: Bench) -> Iterator[Fixed]:
    """O11: Convert pairs on computed tensors from int8 to uint8, with the codes shifted by 128."""
    for quantizer in bench.view.quantizers:
        if not quantizer.quantizes or quantizer.codes != "int8" or not bench.view.is_activation_pair(quantizer):
            continue
        if not bench.view.dequantizers_of(quantizer):
            continue  # not a pair: integer operators or the caller read the codes
        pair, old = pair_of(bench, quantizer), bench.numbers(quantizer)
        if isinstance(pair, str) or old is None:
            why = pair if isinstance(pair, str) else "scale or zero point is computed"
            yield Fixed("O11", quantizer.name, str(quantizer.data.name), why, done=False)
            continue
        zero = np.asarray((old.zero.astype(np.int16) + 128).astype(np.uint8))
        for member in pair.nodes:
            renumber(bench, member, replace(old, zero=zero), str(quantizer.data.name))
        what = f"int8 zero point {_first(old.zero)} -> uint8 zero point {_first(zero)}, the codes shifted"
        yield Fixed("O11", quantizer.name, str(quantizer.data.name), what, exact=True)


def signed_weights(bench: Bench) -> Iterator[Fixed]:
    """O12, O13: Convert stored weights to int8 with zero point 0."""
    named: dict[int, str] = {}
    readers: dict[int, list[Node]] = {}
    for rule, weight, node in _weights(bench):
        if weight.codes == "uint8" or (weight.zero is not None and np.any(weight.zero)):
            named[id(weight.node)] = rule
            readers.setdefault(id(weight.node), []).append(node)
    for quantizer in bench.view.distinct:
        kind = named.get(id(quantizer.node))
        if kind is None:
            continue
        if bench.view.saturates and _would_saturate(bench, quantizer, readers[id(quantizer.node)]):
            why = "int8 codes of that size saturate on this kind of CPU, these do not: quantize again with --cpu"
            yield Fixed(kind, quantizer.name, str(quantizer.data.name), why, done=False)
        else:
            yield constant(bench, kind, quantizer)


def _would_saturate(bench: Bench, quantizer: Quantizer, nodes: Sequence[Node]) -> bool:
    """Return whether sums of two products saturate with zero point 0 that do not now: never with uint8 weights."""
    steps = ort_read.steps(bench.view, quantizer)
    if steps is None:
        return quantizer.codes == "uint8"
    before = np.zeros(steps.shape) if quantizer.codes == "uint8" else ort_read.stored_codes(bench.view, quantizer)
    after = (ort_numbers.largest_pair(node, np.clip(np.rint(steps), -128, 127)) for node in nodes)
    own = (PAIR_SUM + 1 if before is None else ort_numbers.largest_pair(node, before) for node in nodes)
    return any(new > PAIR_SUM >= old for new, old in zip(after, own, strict=True))


def _weights(bench: Bench) -> Iterator[tuple[str, Quantizer, Node]]:
    """Yield for the quantized weight of each linear op the rule, the node to change, and the op."""
    for node in bench.view.weighted:
        tensor = bench.view.weight(node)
        back = None if tensor is None else bench.view.dequantizer(tensor)
        if back is not None and back.codes in SIGNED:
            before = bench.view.quantizer_of(back.data)
            yield "O12" if back.codes == "uint8" else "O13", back if before is None else before, node


def concats(bench: Bench) -> Iterator[Fixed]:
    """P06: Set the largest scale on all pairs around a Concat: nothing saturates, small inputs round coarser."""
    named = {name for name, _, _ in pair_placement.concat_scales(bench.view)}
    for node in bench.view.nodes:
        if str(node.name) not in named:
            continue
        around = _around(bench, node)
        if isinstance(around, str):
            yield Fixed("P06", str(node.name), str(node.outputs[0].name), around, done=False)
            continue
        scale = max((numbers.scale for _, numbers in around), key=lambda scale: float(scale.reshape(())))
        for pair, numbers in around:
            for member in pair.nodes:
                renumber(bench, member, replace(numbers, scale=scale), str(node.name))
        what = f"scale {float(scale.reshape(())):.4g} for the {len(around)} pairs around it"
        yield Fixed("P06", str(node.name), str(node.outputs[0].name), what)


def _around(bench: Bench, node: Node) -> list[tuple[PairNodes, QDQParams]] | str:
    """Return the pairs at inputs and output, including those beyond data movement, or why they cannot share a scale."""
    sides = [back for tensor in node.inputs if (back := bench.view.dequantizer(tensor)) is not None]
    waiting = list(bench.view.quantized_readers(node.outputs[0]))
    for back in sides:
        before = bench.view.quantizer_of(back.data)
        if before is None:
            return f"'{back.name}' has no QuantizeLinear whose scale could be changed"
        waiting.append(before)
    opens: dict[int, Quantizer] = {}
    while waiting:
        quantizer = waiting.pop()
        if id(quantizer.node) not in opens:
            opens[id(quantizer.node)] = quantizer
            waiting += _beyond_movers(bench, quantizer)
    around: list[tuple[PairNodes, QDQParams]] = []
    for quantizer in opens.values():
        pair, numbers = pair_of(bench, quantizer), bench.numbers(quantizer)
        if isinstance(pair, str) or numbers is None:
            return pair if isinstance(pair, str) else f"the numbers of '{quantizer.name}' are computed"
        if numbers.scale.size != 1 or np.any(numbers.zero) or str(numbers.zero.dtype) != "int8":
            return f"'{quantizer.name}' is not int8 with one scale and the zero point 0"
        around.append((pair, replace(numbers, scale=numbers.scale.reshape(()), zero=numbers.zero.reshape(()))))
    return around


def _beyond_movers(bench: Bench, quantizer: Quantizer) -> list[Quantizer]:
    """Return the pairs before and after a quantizer, with only data movement in between: P07 requires one scale."""
    beyond = [
        other for back in bench.view.dequantizers_of(quantizer) for other in bench.view.quantized_readers(back.output)
    ]
    before = bench.view.dequantizer(quantizer.data)
    opening = None if before is None else bench.view.quantizer_of(before.data)
    return beyond if opening is None else [*beyond, opening]
