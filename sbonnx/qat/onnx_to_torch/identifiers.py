"""Conversion of names in a graph to Python identifiers."""

from __future__ import annotations

import keyword
import re
from typing import Final

from torch import fx, nn

_TAKEN: Final = frozenset(dir(fx.GraphModule)) | frozenset(dir(nn.Module())) | {"meta", "shape_env"}
"""Attributes of every graph module, which must not be used as names."""


class PythonNames:
    """Assigns a unique Python identifier to each name of a graph; characters other than letters and digits become "_".

    "/layer1/conv.0/Conv" becomes `layer1_conv_0_Conv`; a duplicate gets the suffix `_1`.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._next: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """Return an unused identifier that is not a keyword and not an attribute of graph modules."""
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
