"""Groups of sites that share one scale: around data movement and Concat, and as the recipe asks."""

from __future__ import annotations

from sbonnx.backends import Backend
from sbonnx.backends.base import fills_zero
from sbonnx.graph import Node, Tensor, query
from sbonnx.ops import CONCATS, MOVES_DATA, PADS, PICKS_MAX
from sbonnx.plan.survey import Survey
from sbonnx.plan.wishes import Wishes
from sbonnx.recipe import Recipe

COPIES = MOVES_DATA | PICKS_MAX
"""Ops whose output holds values of the first input: quantizing twice with one scale equals quantizing once."""


def tie(survey: Survey, recipe: Recipe, backend: Backend, wishes: Wishes) -> None:
    """Join sites into groups. In place, in `wishes`."""
    tensors = {tensor.name: tensor for place in survey.places for tensor in place.node.outputs}
    for key in [key for key, draft in wishes.drafts.items() if draft.role == "activation"]:
        tensor = tensors.get(wishes.drafts[key].tensor)
        if tensor is not None:
            _tie_to_origin(tensor, key, wishes)
    for place in survey.places:
        if place.node.op in CONCATS:
            _tie_concat(place.node, wishes, whole=backend.joins_concat)
    first: dict[int, str] = {}
    for key, draft in wishes.drafts.items():
        group = recipe.shared_group(draft.tensor) if draft.role == "activation" else None
        if group is not None and not wishes.join(first.setdefault(group, key), key):
            alone = "each channel has a scale of its own"
            why = alone if draft.spec.axis is not None else f"its type differs from that of '{first[group]}'"
            wishes.refuse("share scale", draft.tensor, why)


def _copies(node: Node) -> bool:
    """Return whether the output holds only values of the first input and zeros."""
    return node.op in COPIES or (node.op in PADS and fills_zero(node))


def _tie_to_origin(tensor: Tensor, key: str, wishes: Wishes) -> None:
    """Join a site with the nearest preceding site if only data movement separates them."""
    producer = query.producer(tensor)
    while producer is not None and _copies(producer):
        before = producer.inputs[0]
        for other in wishes.activation_keys(before.name):
            if wishes.join(other, key):
                return
        producer = query.producer(before)


def _tie_concat(node: Node, wishes: Wishes, *, whole: bool) -> None:
    """Join the sites around a Concat: all of them, or only those of inputs that have no other reader and no group.

    An input read only by the Concat is requantized to the scale of the Concat's output, so quantizing it once with
    that scale loses less. An input that already shares a scale keeps it; otherwise the groups of a whole network
    would merge into one.
    """
    keys = [key for tensor in node.inputs for key in wishes.activation_keys(tensor.name)[:1]]
    if not whole:
        shared = {tensor.name for tensor in node.inputs if len(query.readers(tensor)) > 1}
        keys = [key for key in keys if wishes.drafts[key].tensor not in shared and wishes.is_alone(key)]
        keys = keys if wishes.has_activation(node.outputs[0].name) else []
    for key in wishes.activation_keys(node.outputs[0].name)[:1]:
        keys.insert(0, key)
    for other in keys[1:]:
        wishes.join(keys[0], other)
