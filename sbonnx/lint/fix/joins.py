"""P06: one common scale around a Concat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sbonnx.graph import Node
from sbonnx.lint import tensorrt_fusion as fusion
from sbonnx.lint.fix.bench import Bench
from sbonnx.lint.fix.recentre import Pair, pair_of, renumber
from sbonnx.lint.fix.types import Fixed
from sbonnx.lint.view import Quantizer
from sbonnx.qdq.values import Numbers


def concats(bench: Bench) -> Iterator[Fixed]:
    """P06: Set the largest scale on all pairs around a Concat: nothing saturates, small inputs round coarser."""
    named = {name for name, _, _ in fusion.concat_scales(bench.view)}
    for node in bench.view.nodes:
        if str(node.name) not in named:
            continue
        found = _around(bench, node)
        if isinstance(found, str):
            yield Fixed("P06", str(node.name), str(node.outputs[0].name), found, done=False)
            continue
        scale = max((numbers.scale for _, numbers in found), key=lambda scale: float(scale.reshape(())))
        for pair, numbers in found:
            for each in pair.nodes:
                renumber(bench, each, replace(numbers, scale=scale), str(node.name))
        what = f"scale {float(scale.reshape(())):.4g} for the {len(found)} pairs around it"
        yield Fixed("P06", str(node.name), str(node.outputs[0].name), what)


def _around(bench: Bench, node: Node) -> list[tuple[Pair, Numbers]] | str:
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
        one = waiting.pop()
        if id(one.node) not in opens:
            opens[id(one.node)] = one
            waiting += _beyond_movers(bench, one)
    found: list[tuple[Pair, Numbers]] = []
    for one in opens.values():
        pair, numbers = pair_of(bench, one), bench.numbers(one)
        if isinstance(pair, str) or numbers is None:
            return pair if isinstance(pair, str) else f"the numbers of '{one.name}' are computed"
        if numbers.scale.size != 1 or np.any(numbers.zero) or str(numbers.zero.dtype) != "int8":
            return f"'{one.name}' is not int8 with one scale and the zero point 0"
        found.append((pair, replace(numbers, scale=numbers.scale.reshape(()), zero=numbers.zero.reshape(()))))
    return found


def _beyond_movers(bench: Bench, one: Quantizer) -> list[Quantizer]:
    """Return the pairs before and after `one` with only data movement in between: P07 requires one scale for them."""
    found = [other for back in bench.view.dequantizers_of(one) for other in bench.view.quantized_readers(back.output)]
    before = bench.view.dequantizer(one.data)
    opening = None if before is None else bench.view.quantizer_of(before.data)
    return found if opening is None else [*found, opening]
