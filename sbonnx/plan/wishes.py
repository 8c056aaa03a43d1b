"""Collection of requested sites: merges requests into one pair per tensor and spec."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sbonnx.plan.types import ObserverChoice, Reader, Role, RoundingChoice, Site
from sbonnx.report import Refusal
from sbonnx.spec import QuantSpec


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
    readers: dict[Reader, None] = field(default_factory=dict)


class Wishes:
    """Drafts by tensor, in order of first mention, and refusals."""

    def __init__(self) -> None:
        self.drafts: dict[str, Draft] = {}
        self._keys: dict[str, list[str]] = {}
        self._refusals: dict[Refusal, None] = {}
        self._order: dict[str, int] = {}
        self._parents: dict[str, str] = {}
        self._tied: set[str] = set()

    def refuse(self, what: str, where: str, why: str) -> None:
        """Record a refusal."""
        self._refusals[Refusal(what, where, why)] = None

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals in order, without duplicates."""
        return tuple(self._refusals)

    def add(self, wish: Draft, reader: Reader | None) -> str:
        """Merge `wish` into the site of the same tensor, scope and spec, or open a new one. Return its key."""
        for key in self._keys.get(wish.tensor, ()):
            draft = self.drafts[key]
            same = (draft.spec, draft.role, draft.scope, draft.follows) == (
                wish.spec,
                wish.role,
                wish.scope,
                wish.follows,
            )
            if same:
                break
        else:
            taken = self._keys.setdefault(wish.tensor, [])
            key = wish.tensor if not taken else f"{wish.tensor}#{len(taken)}"
            taken.append(key)
            self.drafts[key] = draft = replace(wish, readers={})
            self._parents[key] = key
            self._order[key] = len(self._order)
        if reader is not None:
            draft.readers[reader] = None
        return key

    def activation_keys(self, tensor: str) -> list[str]:
        """Return the keys of the activation sites on a tensor."""
        return [key for key in self._keys.get(tensor, ()) if self.drafts[key].role == "activation"]

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
        """Give two sites one scale. Return False if their specs differ or are per-channel."""
        spec = self.drafts[one].spec
        if spec != self.drafts[other].spec or spec.axis is not None:
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
            )
            for key, draft in self.drafts.items()
        )
