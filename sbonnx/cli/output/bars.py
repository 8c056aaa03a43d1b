"""Bars of text, for tables."""

from __future__ import annotations

from typing import Final

WIDTH: Final = 24
"""Characters of the longest bar."""

EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
"""A character filled by so many eighths, from the left."""


def bar(share: float, width: int = WIDTH) -> str:
    """A bar of `share` (0 to 1; what is not a number is full) of `width` characters, to an eighth of a character.

    What is not nothing is never empty.
    """
    share = 1.0 if share != share else min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[part] if part else "")
