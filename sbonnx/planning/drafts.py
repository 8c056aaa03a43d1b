"""Drafts of sites: one pair per tensor and spec, their groups with one scale, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from sbonnx.backends import Backend
from sbonnx.backends.placement_rules import fills_zero
from sbonnx.graph import Node, Tensor, query
from sbonnx.ops import CONCATS, MOVES_DATA, PADS, PICKS_MAX
from sbonnx.planning.survey import Survey
from sbonnx.planning.types import GivenParams, ObserverChoice, Reader, Role, RoundingChoice, Site
from sbonnx.recipe import Recipe
from sbonnx.recipe.resolve import tensor_hit
from sbonnx.report import Reason, Refusal
from sbonnx.spec import QuantSpec

SHORT_BITS: Final = 7
"""Width of 8-bit weights that are shortened for kernels whose sums saturate."""


@dataclass
class Draft:
    """A site that can still gain readers."""

    tensor: str
    role: Role
    spec: QuantSpec
    observer: ObserverChoice
    scope: str
    why: str
    rule: str
    rounding: RoundingChoice = field(default_factory=RoundingChoice)
    follows: tuple[str, str] | None = None
    fixed: tuple[float, float] | None = None
    given: GivenParams | None = None
    leaves: bool = False
    readers: dict[Reader, None] = field(default_factory=dict)


class Drafts:
    """Drafts by tensor, in order of first mention, and refusals."""

    def __init__(self) -> None:
        self.by_key: dict[str, Draft] = {}
        self._keys: dict[str, list[str]] = {}
        self._refusals: dict[Refusal, None] = {}
        self._order: dict[str, int] = {}
        self._parents: dict[str, str] = {}
        self._tied: set[str] = set()
        self.own: set[str] = set()
        """Keys of sites that share their scale with no other."""

    def refuse(self, what: str, where: str, why: Reason) -> None:
        """Record a refusal."""
        self._refusals[Refusal(what, where, why)] = None

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals in order, without duplicates."""
        return tuple(self._refusals)

    def add(self, draft: Draft, reader: Reader | None) -> str:
        """Merge `draft` into the site of the same tensor, scope and spec, or open a new one. Return its key."""
        for key in self._keys.get(draft.tensor, ()):
            site = self.by_key[key]
            same = (site.spec, site.role, site.scope, site.follows)
            if same == (draft.spec, draft.role, draft.scope, draft.follows):
                break
        else:
            taken = self._keys.setdefault(draft.tensor, [])
            key = draft.tensor if not taken else f"{draft.tensor}#{len(taken)}"
            taken.append(key)
            self.by_key[key] = site = replace(draft, readers={})
            self._parents[key] = key
            self._order[key] = len(self._order)
        if reader is not None:
            site.readers[reader] = None
        return key

    def keys_of(self, tensor: str) -> list[str]:
        """Return the keys of all sites on a tensor."""
        return list(self._keys.get(tensor, ()))

    def activation_keys(self, tensor: str) -> list[str]:
        """Return the keys of the activation sites on a tensor."""
        return [key for key in self._keys.get(tensor, ()) if self.by_key[key].role == "activation"]

    def has_activation(self, tensor: str) -> bool:
        """Return whether a tensor has an activation site."""
        return bool(self.activation_keys(tensor))

    def root(self, key: str) -> str:
        """Return the key that names the group of `key`."""
        while self._parents[key] != key:
            self._parents[key] = self._parents[self._parents[key]]
            key = self._parents[key]
        return key

    def join(self, one: str, other: str) -> bool:
        """Give two sites one scale. Return False if one has its `own`, their specs differ, or are per-channel."""
        spec = self.by_key[one].spec
        if not self.own.isdisjoint((one, other)):
            return False
        if spec != self.by_key[other].spec or spec.axis is not None:
            return False
        first, second = sorted((self.root(one), self.root(other)), key=self._order.__getitem__)
        self._parents[second] = first
        self._tied.add(first)
        return True

    def is_alone(self, key: str) -> bool:
        """Return whether a site shares its scale with no other site."""
        return self.root(key) not in self._tied

    def sites(self) -> tuple[Site, ...]:
        """Return the sites, in order of first mention."""
        return tuple(
            Site(
                key=key,
                tensor=draft.tensor,
                role=draft.role,
                spec=draft.spec,
                readers=tuple(draft.readers),
                why=draft.why,
                rule=draft.rule,
                group=self.root(key),
                observer=draft.observer,
                rounding=draft.rounding,
                follows=draft.follows,
                scope=draft.scope,
                fixed=draft.fixed,
                given=draft.given,
                leaves=draft.leaves,
            )
            for key, draft in self.by_key.items()
        )


COPIES = MOVES_DATA | PICKS_MAX
"""Ops whose output holds values of the first input: quantizing twice with one scale equals quantizing once."""


def tie(survey: Survey, recipe: Recipe, backend: Backend, drafts: Drafts) -> None:
    """Join sites into groups. In place, in `drafts`."""
    drafts.own |= {key for key, draft in drafts.by_key.items() if tensor_hit(recipe.own_scales, draft.tensor)}
    tensors = {tensor.name: tensor for place in survey.places for tensor in place.node.outputs}
    for key in [key for key, draft in drafts.by_key.items() if draft.role == "activation"]:
        tensor = tensors.get(drafts.by_key[key].tensor)
        if tensor is not None:
            _tie_to_origin(tensor, key, drafts)
    for place in survey.places:
        if place.node.op in CONCATS:
            _tie_concat(place.node, drafts, whole=backend.numbers.joins_concat)
    first: dict[int, str] = {}
    for key, draft in drafts.by_key.items():
        group = recipe.shared_group(draft.tensor) if draft.role == "activation" else None
        if group is not None and not drafts.join(first.setdefault(group, key), key):
            drafts.refuse("share scale", draft.tensor, _not_shared(key, first[group], drafts))


def _not_shared(key: str, other: str, drafts: Drafts) -> Reason:
    """Return why a site cannot join the group of another one."""
    if not drafts.own.isdisjoint((key, other)):
        return Reason("own-scale", "OWN_SCALES gives one of them a scale of its own")
    if drafts.by_key[key].spec.axis is not None:
        return Reason("scale-per-channel", "it has one scale per channel")
    return Reason("types-differ", f"its type differs from that of '{other}'")


def _tie_to_origin(tensor: Tensor, key: str, drafts: Drafts) -> None:
    """Join a site with the nearest preceding site if only data movement separates them."""
    producer = query.producer(tensor)
    while producer is not None and (producer.op in COPIES or (producer.op in PADS and fills_zero(producer))):
        before = producer.inputs[0]
        for other in drafts.activation_keys(before.name):
            if drafts.join(other, key):
                return
        producer = query.producer(before)


def _tie_concat(node: Node, drafts: Drafts, *, whole: bool) -> None:
    """Join the sites around a Concat: all of them, or only those of inputs that have no other reader and no group.

    An input read only by the Concat is requantized to the scale of the Concat's output, so quantizing it once with
    that scale loses less. An input that already shares a scale keeps it; otherwise the groups of a whole network
    would merge into one. A prescribed range is not shared.
    """
    keys = [key for tensor in node.inputs for key in drafts.activation_keys(tensor.name)[:1]]
    if not whole:
        shared = {tensor.name for tensor in node.inputs if len(query.readers(tensor)) > 1}
        free = (key for key in keys if drafts.by_key[key].fixed is None and drafts.is_alone(key))
        keys = [key for key in free if drafts.by_key[key].tensor not in shared]
        keys = keys if drafts.has_activation(node.outputs[0].name) else []
    for key in drafts.activation_keys(node.outputs[0].name)[:1]:
        keys.insert(0, key)
    for other in keys[1:]:
        drafts.join(keys[0], other)


def feed_bodies(survey: Survey, recipe: Recipe, drafts: Drafts) -> dict[str, Reason]:
    """Let Loop, Scan and the nodes of their bodies read dequantized weights that linear nodes outside have as integers.

    The file would hold such a weight twice, as integers and as floats. In place, in `drafts`; below 7 bits, and in
    fp8, the weight is not quantized instead, as nothing was measured inside the body.

    Returns:
        the nodes whose weight is not quantized, each with the reason.
    """
    declined: dict[str, Reason] = {}
    for draft in drafts.by_key.values():
        reader = next(iter(draft.readers), None)
        if draft.role != "weight" or reader is None:
            continue
        tensor = survey.nodes[reader.node].inputs[reader.index]
        planned = {
            planned_reader for key in drafts.keys_of(draft.tensor) for planned_reader in drafts.by_key[key].readers
        }
        others = [(node, index) for node, index in query.readers(tensor) if Reader(node.name, index) not in planned]
        inside = [use for use in others if query.bodies(use[0]) or use[0].name in survey.in_loop]
        wanted = (recipe.settings("w", node=node.name, op=node.op, tensor=tensor.name).enabled for node, _ in inside)
        if not inside or inside != others or not all(wanted):
            continue
        if draft.spec.bits >= SHORT_BITS and not draft.spec.is_float:
            draft.readers |= {Reader(node.name, index): None for node, index in inside}
            continue
        loop = survey.in_loop.get(inside[0][0].name, inside[0][0].name)
        why = Reason(
            "body-needs-weight",
            f"the body of '{loop}' needs its weight in float: with {draft.spec.bits} bits the file would hold it twice",
        )
        declined |= dict.fromkeys((planned_reader.node for planned_reader in draft.readers), why)
        draft.readers.clear()
    return declined
