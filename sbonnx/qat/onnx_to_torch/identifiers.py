"""Names of a graph as names in Python."""

from __future__ import annotations

import keyword
import re
from typing import Final

from torch import fx, nn

_TAKEN: Final = frozenset(dir(fx.GraphModule)) | frozenset(dir(nn.Module())) | {"meta", "shape_env"}
"""Attributes of every graph module."""


class PythonNames:
    """Gives each name of a graph a name in Python of its own: other characters than letters and digits become "_".

    "/layer1/conv.0/Conv" is `layer1_conv_0_Conv`; the second of two that would be equal ends in `_1`.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._next: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """A name that was not given yet, and that no graph module, keyword or builtin of its own has."""
        stem = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or "unnamed"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        stem = f"{stem}_" if stem in _TAKEN or keyword.iskeyword(stem) else stem
        made, count = stem, self._next.get(stem, 0)
        while made in self._given:
            count += 1
            made = f"{stem}_{count}"
        self._next[stem] = count
        self._given.add(made)
        return made
