"""Text bars for tables."""

from __future__ import annotations

from typing import Final

WIDTH: Final = 24
"""Width of the longest bar in characters."""

EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
"""Block characters, filled from the left by 0 to 8 eighths."""


def bar(share: float, width: int = WIDTH) -> str:
    """Draw a bar of `share` (0 to 1; NaN: full) of `width` characters, with a resolution of 1/8 character.

    A share above 0 is never drawn empty.
    """
    share = 1.0 if share != share else min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[part] if part else "")
