"""Numbers of bytes as texts."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Format a number of bytes with three significant digits: ``237 kB``, ``1.42 MB``; TB has no larger unit."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            break
        size /= 1000
    rounded = float(f"{size:.3g}")
    return f"{rounded:,.0f} {unit}" if abs(rounded) >= 1000 else f"{rounded:g} {unit}"
