"""Questions about the graph of a detector: operators behind its outputs, forms of boxes, units of priors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.detectors.head import Activation, Corners, Unit
from sbonnx.graph import Constant, Graph, Node, Tensor, query
from sbonnx.ops import CONCATS, KEEPS_VALUES, LINEAR, MAKES_DISTANCES, RESHAPES, SELECTS, SPLITS

LAYOUT: Final = KEEPS_VALUES | RESHAPES
"""Operators that change the form of values and not the values."""

ROWS: Final = 8
"""Minimum number of priors: shorter constants are variances and scales."""

BOX_SIDES: Final = 4
"""Numbers of a box."""

LARGEST_SHARE: Final = 1.5
"""Largest center of a prior, as a share of the image; pixels are larger."""


@dataclass(frozen=True)
class BoxForm:
    """Form of a tensor of boxes, as far as the graph says it.

    Attributes:
        corners: order of the numbers; None: unknown.
        unit: None: unknown.
        raw: whether they come from a linear layer without decoding: offsets to priors.
    """

    corners: Corners | None = None
    unit: Unit | None = None
    raw: bool = False


def maker(tensor: Tensor) -> Node | None:
    """Return the operator that computes the values of a tensor; changes of form are passed."""
    node = query.producer(tensor)
    while node is not None and node.op in LAYOUT and node.inputs:
        tensor = node.inputs[0]
        node = query.producer(tensor)
    return node


def tail_of(tensor: Tensor) -> Iterator[Node]:
    """Yield the operators before a tensor, back to the linear layers, which are included."""
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        node = query.producer(waiting.pop())
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if node.op not in LINEAR:
            waiting.extend(part for part in node.inputs if not isinstance(part, Constant) and not part.is_empty())


def is_selected(tensor: Tensor) -> bool:
    """Return whether boxes are selected after the last linear layer, by NonMaxSuppression or TopK."""
    return any(node.op in SELECTS for node in tail_of(tensor))


def selects_queries(graph: Graph) -> bool:
    """Return whether a graph selects features with TopK (the queries of two-stage DETRs)."""
    return any(node.op == "TopK" for node in query.all_nodes(graph))


def applies(tensor: Tensor, op: str) -> bool:
    """Return whether an operator is applied after the last linear layer."""
    return any(node.op == op for node in tail_of(tensor))


def activation(tensor: Tensor) -> Activation | None:
    """Return the activation that scores still need: none after Sigmoid or Softmax, else it is unknown."""
    node = maker(tensor)
    if node is not None and node.op in CONCATS:  # of several scales
        makers = [maker(part) for part in node.inputs]
        return "none" if all(part is not None and part.op in ("Sigmoid", "Softmax") for part in makers) else None
    return "none" if node is not None and node.op in ("Sigmoid", "Softmax") else None


def ends_in(tensor: Tensor, op: str) -> bool:
    """Return whether an operator, or its quantized form (QOperator), computes the values of a tensor, at each scale."""
    node = maker(tensor)
    makers = [maker(part) for part in node.inputs] if node is not None and node.op in CONCATS else [node]
    return all(part is not None and part.op in (op, f"QLinear{op}") for part in makers)


def box_form(tensor: Tensor) -> BoxForm:
    """Return the form of boxes.

    Sides as differences and sums of a center and half a size are corners; a sum and an exponential are center and
    size. The unit is that of the centers of the priors, which are constants of the graph.
    """
    node = maker(tensor)
    if node is not None and node.op == "Clip":
        node = maker(node.inputs[0])
    if node is None or (node.op in LINEAR or node.op == "Add"):
        return BoxForm(raw=True)
    if node.op == "Sigmoid":
        return BoxForm("cxcywh", "shares")
    if node.op not in CONCATS:
        return BoxForm()
    ops = [part.op if part is not None else "" for part in map(maker, node.inputs)]
    half = len(ops) // 2
    corners: Corners | None = None
    if ops[:half] == ["Sub"] * half and ops[half:] == ["Add"] * half:
        corners = "xyxy"
    elif len(ops) % 2 == 0 and ops[:half] == ["Add"] * half and ops[half:] == ["Mul"] * half:
        corners = "cxcywh"
    elif all(op in LINEAR for op in ops):
        return BoxForm(raw=True)  # offsets of several scales
    return BoxForm(corners, _unit_of_priors(tensor))


def _unit_of_priors(tensor: Tensor) -> Unit | None:
    """Return the unit of the constants that are added for each prior; None without any."""
    largest = None
    for node in tail_of(tensor):
        for part in node.inputs if node.op == "Add" else ():
            values = query.constant(part)
            if values is not None and values.ndim > 1 and values.shape[-1] <= 4 and values.size >= 2 * ROWS:
                largest = max(largest or 0.0, float(values.max()))
    if largest is None:
        return None
    return "shares" if largest <= LARGEST_SHARE else "pixels"


def distance_unit(tensor: Tensor) -> Unit | None:
    """Return the unit of distances to sides, which are not below 0: pixels after Exp or a factor, else strides.

    Source: FCOS (exp), and its improvement (Relu, whose result is multiplied by the stride); None: it is neither.
    """
    node = maker(tensor)
    if node is not None and node.op == "Mul":
        return "pixels" if any(_rectifies(maker(part)) for part in node.inputs) else None
    if _rectifies(node):
        return "pixels" if node is not None and node.op == "Exp" else "strides"
    return None


def factor_unit(tensor: Tensor) -> Unit | None:
    """Return the unit of distances of RTMDet: pixels after a factor, strides after Exp; None: it is neither.

    Source: MMDetection rtmdet_head.py multiplies by the stride in the network, MMYOLO in the decoder.
    """
    node = maker(tensor)
    return {"Mul": "pixels", "Exp": "strides"}.get(node.op if node is not None else "")  # type: ignore[return-value]


def _rectifies(node: Node | None) -> bool:
    return node is not None and node.op in MAKES_DISTANCES


def is_concat_of(tensor: Tensor, ops: tuple[str, ...]) -> bool:
    """Return whether a tensor joins the results of these operators, in order."""
    node = maker(tensor)
    if node is None or node.op not in CONCATS:
        return False
    return tuple(part.op if part is not None else "" for part in map(maker, node.inputs)) == ops


def joins_boxes_and_scores(tensor: Tensor, columns: int, after: int) -> bool:
    """Return whether columns (images, columns, N) join four of boxes, class scores and columns after them, in order.

    Keypoints and angles stand after the scores too: only the Sigmoid of the scores tells where classes end. Numbers of
    columns that the graph does not say may be any.

    Args:
        columns: number of all.
        after: number of columns after the scores (coefficients of masks).
    """
    parts = list(_joined(tensor))
    places = [place for place, part in enumerate(parts) if ends_in(part, "Sigmoid")]
    if len(places) != 1:
        return False
    sizes, place = [_columns(part) for part in parts], places[0]
    halves = (sizes[:place], BOX_SIDES), (sizes[place + 1 :], after)
    return all(_may_sum(part, count) for part, count in halves) and sizes[place] in (None, columns - BOX_SIDES - after)


def _joined(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the parts that are joined along the columns, in order; the tensor itself if there are none."""
    node = query.producer(tensor)
    while node is not None and node.op in KEEPS_VALUES:
        node = query.producer(node.inputs[0])
    if node is None or node.op not in CONCATS or node.attrs["axis"] not in (1, -2):
        yield tensor
        return
    for part in node.inputs:
        yield from _joined(part)


def _columns(tensor: Tensor) -> int | None:
    shape = query.shape(tensor)
    size = shape[1] if shape is not None and len(shape) > 1 else None
    return size if isinstance(size, int) else None


def _may_sum(sizes: Sequence[int | None], total: int) -> bool:
    """Return whether sizes, of which some may be unknown, can have this sum."""
    least = sum(size for size in sizes if size is not None)
    return least < total if None in sizes else least == total


def joins_levels_of(tensor: Tensor, ops: tuple[str, ...]) -> bool:
    """Return whether a tensor joins levels, each of which joins the results of these operators; "": a linear layer."""
    node = maker(tensor)
    if node is None or node.op not in CONCATS:
        return False
    return all(_ops_of_parts(part) == ops for part in node.inputs)


def joins_scores_and_distances(tensor: Tensor) -> bool:
    """Return whether a tensor joins levels, each of which joins scores (Sigmoid) and raw distances (NanoDet)."""
    node = maker(tensor)
    if node is None or node.op not in CONCATS:
        return False
    parts = [_ops_of_parts(part) for part in node.inputs]
    return all(len(ops) == 2 and ops[0] == "Sigmoid" and (ops[1] in SPLITS or ops[1] in ("", "Mul")) for ops in parts)


def columns_of_scores(tensor: Tensor) -> int | None:
    """Return the number of columns of the first part of a level of `joins_scores_and_distances`; None: unknown."""
    node = maker(tensor)
    level = None if node is None or node.op not in CONCATS else maker(node.inputs[0])
    return None if level is None or level.op not in CONCATS else _columns(level.inputs[0])


def _ops_of_parts(tensor: Tensor) -> tuple[str, ...]:
    node = maker(tensor)
    if node is None or node.op not in CONCATS:
        return ()
    ops = [part.op if part is not None else "none" for part in map(maker, node.inputs)]
    return tuple("" if op in LINEAR else op for op in ops)
