"""Candidates for advice: changes of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """One candidate: what it does, in words, and the overrides of the recipe."""

    what: str
    overrides: Mapping[str, Any]

    @property
    def texts(self) -> tuple[str, ...]:
        """The overrides as ``KEY=VALUE``, for ``--set``."""
        return tuple(
            f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for key, value in self.overrides.items()
        )
