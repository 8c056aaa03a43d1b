"""Models that are quantized already: refused with a way on, or made float again first."""

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
    """Nodes that only a quantized model has, in order."""
    return (node for node in query.all_nodes(graph) if node.op in QDQ or is_integer_op(node))


def make_float(graph: Graph, *, requantize: bool) -> tuple[Refusal, ...]:
    """Make sure that a graph is float. In place.

    Quantizing a quantized model rounds what is rounded already, and leaves two pairs where one belongs. With
    `requantize` its pairs are taken out first, and integer operators become float ones; a note says how many.

    Returns:
        What could not be taken out, and stays as it is.

    Raises:
        ModelError: the model is quantized already, and `requantize` is not asked for.
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
