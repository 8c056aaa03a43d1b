"""Long JSON in the metadata of a file, compressed: rows of many nodes repeat their keys and names."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, Final

PLAIN: Final = 4096
"""Characters up to which the text is stored as it is, so that viewers show it."""


def pack(text: str) -> str:
    """Return JSON as ASCII text that `unpack` reads; the same JSON gives the same text."""
    return text if len(text) <= PLAIN else base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Return the value of a text of `pack`.

    Raises:
        ValueError: it is none.
    """
    if text.startswith(("{", "[")):
        return json.loads(text)
    try:
        return json.loads(zlib.decompress(base64.b85decode(text)))
    except zlib.error as error:
        raise ValueError(str(error)) from error
