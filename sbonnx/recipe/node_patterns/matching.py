"""Pattern syntax for nodes and tensors.

=============== ==========================================================================================
pattern         matches
=============== ==========================================================================================
``conv*``       nodes by name, with the wildcards ``*``, ``?`` and ``[...]`` (a name matches itself)
``node:conv*``  nodes by name, explicit form of ``conv*``
``op:*Pool``    nodes by operator type, wildcards allowed
``re:.*/ffn/.`` nodes by a regular expression that must cover the whole name
``tensor:x*``   tensors by name, wildcards allowed
=============== ==========================================================================================

Names are those of the original file, before simplification and fusion; case counts. A bare name that no node has is
resolved as the name of a torch module (`sbonnx.recipe.node_patterns.torch_modules`).
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

Kind = Literal["name", "node", "op", "re", "tensor"]

MAX_WILDCARDS: Final = 2000
"""Maximum characters of a pattern with wildcards, or of a regular expression. Plain names may be longer."""

_PREFIXES: Final[tuple[Kind, ...]] = ("node", "op", "re", "tensor")

_WILDCARD: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Matcher:
    """Parsed pattern: its kind, the part after the prefix, and that part as a regular expression."""

    kind: Kind
    body: str
    regex: re.Pattern[str]

    def _covers(self, name: str) -> bool:
        return name == self.body or self.regex.fullmatch(name) is not None

    def hits_node(self, name: str, op: str) -> bool:
        """Whether the pattern matches the node `name` of operator type `op`."""
        if self.kind == "tensor":
            return False
        return self._covers(op if self.kind == "op" else name)

    def hits_tensor(self, name: str) -> bool:
        """Whether the pattern has the prefix ``tensor:`` and matches the tensor `name`."""
        return self.kind == "tensor" and self._covers(name)

    def is_tensor(self, name: str) -> bool:
        """Whether the pattern matches the tensor `name`, for keys that accept tensors only (no prefix needed)."""
        return self._covers(name)


def _split(pattern: str) -> tuple[Kind, str]:
    for prefix in _PREFIXES:
        if pattern[: len(prefix) + 1].lower() == f"{prefix}:":
            return prefix, pattern[len(prefix) + 1 :]
    return "name", pattern


@lru_cache(maxsize=4096)
def matcher(pattern: str) -> Matcher:
    """Parse and compile `pattern`.

    Raises:
        re.error: a regular expression after ``re:`` does not parse (`check_pattern` finds that first).
    """
    kind, body = _split(pattern)
    if kind == "re":
        return Matcher(kind, body, re.compile(body))
    return Matcher(kind, body, re.compile(fnmatch.translate(body) if _WILDCARD.search(body) else re.escape(body)))


def check_pattern(pattern: str) -> str | None:
    """Return the problem of `pattern`, as the end of a sentence, or None."""
    kind, body = _split(pattern)
    if not body:
        return "must not be an empty pattern"
    if len(body) > MAX_WILDCARDS and (kind == "re" or _WILDCARD.search(body)):
        return f"must be a pattern of at most {MAX_WILDCARDS} characters"
    try:
        matcher(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression ({error})"
    return None
