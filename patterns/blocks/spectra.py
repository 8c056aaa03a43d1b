"""Power spectra under a logarithm, recognized by their structure: constant bases, squares, filter banks, Log.

The logarithm turns relative errors into absolute ones, and the powers of a spectrum span more than 8 bits hold: those
of a quiet frame are below one step of a loud one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from sbonnx.graph import Constant, Node, query
from sbonnx.ops import MATRIX_PRODUCTS, MOVES_DATA
from sbonnx.report.codes import Reason

BETWEEN: Final = (
    MOVES_DATA
    | MATRIX_PRODUCTS
    | frozenset(
        {"Add", "Sub", "Sum", "Mul", "Div", "Clip", "Max", "Min", "Relu", "Abs", "Neg", "Cast", "Sqrt", "Pow", "Concat"}
        | {"ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare"}
    )
)
"""Ops that are computed between the bases of a spectrum and the logarithm, beside linear ops. Bases and filter banks
that are computed from constants are matrix products without weight."""


def spectra(nodes: Iterable[Node], linear: Collection[str]) -> dict[str, Reason]:
    """Return the ops that compute power spectra and their logarithm, by name, with the reason to stay float.

    Args:
        nodes: of the graph and its bodies.
        linear: names of linear ops with a constant weight.
    """
    reasons: dict[str, Reason] = {}
    constant: set[str] = set()  # computed from constants
    for node in nodes:
        inputs = [tensor for tensor in node.inputs if not tensor.is_empty()]
        if inputs and all(isinstance(tensor, Constant) or tensor.name in constant for tensor in inputs):
            constant.update(tensor.name for tensor in node.outputs)
        if node.op == "Log":
            why = Reason("log-of-power", f"'{node.name}' takes the logarithm of the power that it computes")
            reasons.update(dict.fromkeys(_behind(node, linear, constant), why))
    return reasons


def _behind(log: Node, linear: Collection[str], constant: Collection[str]) -> set[str]:
    """Return the names of a logarithm and of the ops behind it, up to the linear ops whose outputs are squared.

    None if no linear op is, and no product with a tensor that is computed from constants.
    """
    bases: set[str] = set()
    banks: set[str] = set()
    between = {log.name}
    seen: set[tuple[str, bool]] = set()
    pending = [(log, False)]
    while pending:
        node, squared = pending.pop()
        for tensor in node.inputs:
            producer = None if isinstance(tensor, Constant) else query.producer(tensor)
            if producer is None or (producer.name, squared) in seen:
                continue
            seen.add((producer.name, squared))
            if producer.name in linear:
                (bases if squared else banks).add(producer.name)
                if not squared and len(banks) <= 1:
                    pending.append((producer, squared))
            elif producer.op in BETWEEN:
                between.add(producer.name)
                if squared and producer.op in MATRIX_PRODUCTS and any(x.name in constant for x in producer.inputs):
                    bases.add(producer.name)
                pending.append((producer, squared or _squares(producer)))
    return bases | banks | between if bases else set()


def _squares(node: Node) -> bool:
    """Return whether a node computes squares of its input, or sums of them."""
    if node.op in ("ReduceL2", "ReduceSumSquare"):
        return True
    if node.op == "Mul":
        return node.inputs[0] is node.inputs[1]
    exponent = node.inputs[1] if node.op == "Pow" else None
    return isinstance(exponent, Constant) and exponent.values.size == 1 and float(exponent.values.reshape(())) == 2
