"""Length of texts after the normalizers of a tokenizer.json, which native code would lengthen without a limit.

A Replace can make thousands of characters of one, and those that follow it can do so again. A bound in terms of the
length is computed first; only texts that it does not clear are measured, one normalizer at a time.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

LOCAL: Final = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 36, "ByteLevel": 4}
"""Most characters that one becomes, for normalizers that map characters independently of those far away.

Source: Unicode Standard Annex 15, maximum expansion factors. BertNormalizer: blanks around a Chinese character (3), NFD
and lower case. Others of the package do not lengthen a text, apart from `Normalizer.bound`.
"""

TREE_HEADER: Final = 4
"""Bytes of a precompiled charsmap before its tree: the size of the tree, little-endian."""


@dataclass(frozen=True)
class Normalizer:
    """One normalizer of a tokenizer.json, which the package tokenizers has accepted.

    Attributes:
        values: its JSON; not a sequence.
    """

    values: Mapping[str, Any]

    def bound(self, length: int) -> int:
        """Return the most characters that a text of `length` characters becomes."""
        if self.values["type"] == "Prepend":
            return length + len(self.values["prepend"])
        if self.values["type"] != "Replace":
            return length * self._factor
        content, replaced = len(self.values["content"]), self._replaced
        if replaced:
            return length + max(0, length // len(replaced) * (content - len(replaced)))
        return length + (length + 1) * content  # a regular expression can match nothing, at every character

    def length_of(self, text: str, limit: int) -> int:
        """Return the number of characters that a text becomes, or a bound; a number above `limit` if that is exceeded.

        The memory that it needs is that of `limit` characters.
        """
        bound = self.bound(len(text))
        if bound <= limit or self.values["type"] == "Prepend" or self._factor > limit:
            return bound
        if self.values["type"] == "Replace":
            replaced = self._replaced
            growth = len(self.values["content"]) - len(replaced)
            return len(text) + text.count(replaced) * growth if replaced else bound
        size, total = limit // self._factor, 0
        for start in range(0, len(text), size):
            total += len(self.apply(text[start : start + size]))
            if total > limit:
                break
        return total

    def apply(self, text: str) -> str:
        """Return the normalized text."""
        normalized: str = self._native.normalize_str(text)
        return normalized

    @cached_property
    def _native(self) -> Any:
        from tokenizers import Tokenizer

        model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
        return Tokenizer.from_str(json.dumps({"model": model, "normalizer": dict(self.values)})).normalizer

    @cached_property
    def _factor(self) -> int:
        if self.values["type"] != "Precompiled":
            return LOCAL.get(self.values["type"], 1)
        data = base64.b64decode(self.values["precompiled_charsmap"])
        results = data[TREE_HEADER + int.from_bytes(data[:TREE_HEADER], "little") :].split(b"\0")
        return max(1, *(len(result.decode("utf-8", "replace")) for result in results))

    @property
    def _replaced(self) -> str:
        """The text that a Replace replaces; "" for a regular expression."""
        replaced: str = self.values["pattern"].get("String", "")
        return replaced


def normalizers_of(values: Any) -> Iterator[Normalizer]:
    """Yield the normalizers of the key ``normalizer``, in the order in which they are applied."""
    if isinstance(values, Mapping):
        inner = values.get("normalizers")
        if inner is None:
            yield Normalizer(values)
        else:
            for part in inner:
                yield from normalizers_of(part)


def normalized_length(text: str, normalizers: list[Normalizer], limit: int) -> int:
    """Return the most characters that a text has before, between and after its normalizers.

    Returns a bound if that is within `limit`, and any number above `limit` if it is exceeded.
    """
    bounds = [len(text)]
    for normalizer in normalizers:
        bounds.append(normalizer.bound(bounds[-1]))
    if max(bounds) <= limit:
        return max(bounds)
    longest = len(text)
    for normalizer in normalizers:
        longest = max(longest, normalizer.length_of(text, limit))
        if longest > limit:
            break
        text = normalizer.apply(text)
    return longest


__all__ = ["TREE_HEADER", "normalized_length", "normalizers_of"]
