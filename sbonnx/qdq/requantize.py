"""Handling of models that are already quantized: refuse them, or convert them back to float first."""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, Node, query
from sbonnx.ops import QDQ, QUANTIZE
from sbonnx.qdq.strip import strip
from sbonnx.qdq.unfold import is_integer_op, unfold
from sbonnx.report import Refusal

WHAT = "take an earlier quantization out"


def _quantized(graph: Graph) -> Iterator[Node]:
    """Iterate over the nodes that only a quantized model has, in order."""
    return (node for node in query.all_nodes(graph) if node.op in QDQ or is_integer_op(node))


def make_float(graph: Graph, *, requantize: bool) -> tuple[Refusal, ...]:
    """Ensure that a graph is float. In place.

    Quantizing a quantized model would round values twice and leave two pairs where one belongs. With `requantize`, its
    pairs are removed first and integer operators become float operators; a note gives their numbers.

    Returns:
        Refusals for nodes that could not be converted and stay unchanged.

    Raises:
        ModelError: the model is already quantized, and `requantize` is False.
    """
    first = next(_quantized(graph), None)
    if first is None:
        return ()
    where = f"'{graph.info.path}'" if graph.info.path is not None else "the model"
    if not requantize:
        tensor = next((str(one.name) for one in first.inputs if not one.is_empty()), "")
        raise ModelError(
            f"{where} is quantized already, first at '{first.name}' ({first.op} of '{tensor}'): give its float model, "
            "or --requantize (requantize=True) to take its pairs out first"
        )
    fired, refusals = unfold(graph)
    pairs = strip(graph)
    written = f"; integer operators written as float ones: {len(fired)}" if fired else ""
    graph.info.notes.append(f"pairs of an earlier quantization taken out: {pairs}{written}")
    left = (Refusal(WHAT, str(node.name), _why(node)) for node in _quantized(graph))
    known = {refusal.where for refusal in refusals}
    return (*refusals, *(refusal for refusal in left if refusal.where not in known))


def _why(node: Node) -> str:
    if node.op in QUANTIZE:
        return "its codes are read by other ops than a DequantizeLinear"
    return "its codes or numbers are computed" if node.op in QDQ else "it has no float operator"
