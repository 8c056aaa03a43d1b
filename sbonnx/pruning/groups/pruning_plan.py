"""The pruning plan: which channels of which layers are removed, by names that survive copies of the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from sbonnx.errors import ModelError
from sbonnx.report.pruned import RemovedChannels, RemovedSide
from sbonnx.values import plain

Direction = Literal["in", "out"]
"""Input or output channels of a layer."""

VERSION: Final = 1
"""Version of the JSON form."""


class LayerSide(NamedTuple):
    """Input or output channels of a linear layer, by the name of its node."""

    layer: str
    direction: Direction


@dataclass(frozen=True)
class PruningPlan:
    """Channels to remove.

    Group numbers depend on the order of nodes, so the plan has indices of channels by layer, and each side that loses
    channels is listed. A plan that does not match the graph is refused.

    Attributes:
        removed: by side of a layer, the sorted indices of its removed channels; sides that lose none are left out.
    """

    removed: Mapping[LayerSide, tuple[int, ...]] = field(default_factory=dict)

    @property
    def channels(self) -> RemovedChannels:
        """The plan as rows, for reports."""
        rows = (RemovedSide(side.layer, side.direction, tuple(self.removed[side])) for side in self)
        return RemovedChannels(VERSION, tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return plain(self.channels)  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        """Iterate over the sides, sorted."""
        return iter(sorted(self.removed))

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PruningPlan:
        """Read the result of `to_dict`.

        Raises:
            ModelError: it is not a plan of this version.
        """
        version = data.get("version", VERSION)
        if version != VERSION:
            raise ModelError(f"a pruning plan of version {version}; this version of sbonnx reads {VERSION}")
        try:
            rows = [(LayerSide(str(row["layer"]), _direction(row["side"])), row["channels"]) for row in data["removed"]]
            removed = {side: tuple(sorted({int(channel) for channel in channels})) for side, channels in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"not a pruning plan (written by --plan): {type(error).__name__} {error}") from error
        return PruningPlan({side: channels for side, channels in removed.items() if channels})


def _direction(text: Any) -> Direction:
    if text not in ("in", "out"):
        raise ValueError(f"side {text!r} is not 'in' or 'out'")
    return "in" if text == "in" else "out"
