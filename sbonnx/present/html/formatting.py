"""Formatting of plain values as short texts that are valid in HTML and XML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sbonnx.system.sizes import size_text

NOTHING: Final = "–"
"""Placeholder for a missing value."""

MINUS: Final = "\u2212"

_ILLEGAL: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that are not allowed in XML 1.0 (section 2.2); browsers replace most of them too."""

_LOGIN: Final = re.compile(r"(?<=://)[^/\s?#@]*@")
_SIGNED: Final = re.compile(
    r"([?&][^=&#\s]*(?:sig|token|key|secret|password|credential)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE
)

_PIECES: Final = re.compile(r"[^/._\-:,\s]*[/._\-:,\s]+|[^/._\-:,\s]+")
"""A part of a name with the separators after it."""

_MINUTE: Final = 60
_LONGEST: Final = 4
"""Significant digits of displayed numbers."""


def text(value: object) -> str:
    """Convert `value` to text that is valid in HTML and XML; "" for None."""
    if value is None:
        return ""
    shown = str(value)
    return shown if shown.isprintable() else _ILLEGAL.sub("\ufffd", shown)  # printable characters are legal


def address(value: object) -> str:
    """Format a path or URL without the login or signed query parameters that a URL may contain."""
    return _SIGNED.sub(r"\1***", _LOGIN.sub("***@", text(value)))


def number(value: object) -> float | None:
    """Convert to float, including "inf" and "nan" from JSON; None if it is not a number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def plain(value: object, digits: int = _LONGEST) -> str:
    """Format a number with at most `digits` digits: ``0.00016``, ``43.14``, ``∞``; `NOTHING` if it is missing."""
    parsed = number(value)
    if parsed is None:
        return NOTHING
    if math.isnan(parsed):
        return "not a number"
    if math.isinf(parsed):
        return "∞" if parsed > 0 else f"{MINUS}∞"
    if parsed == int(parsed) and abs(parsed) < 10**digits:
        return count(parsed)
    return f"{parsed:.{digits}g}".replace("-", MINUS)


def raw(value: object) -> str:
    """Format a number as a sort key for the script; "" if it is missing."""
    parsed = number(value)
    return "" if parsed is None else f"{parsed:.7g}"


def fixed(value: object, places: int) -> str:
    """Format a number with a fixed number of decimals, so that a column is aligned."""
    parsed = number(value)
    return plain(parsed) if parsed is None or not math.isfinite(parsed) else f"{parsed:.{places}f}".replace("-", MINUS)


def decibel(value: object) -> str:
    """Format an SQNR in dB, without the unit."""
    return fixed(value, 1)


def ratio(value: object) -> str:
    """Format a ratio to float: ``0.35``."""
    return fixed(value, 2)


def percent(value: object) -> str:
    """Format a share (0 to 1) as a percentage; a share below 1 is never rounded up to 100 %."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed):
        return plain(parsed)
    if parsed == 1:
        return "100 %"
    share = f"{100 * parsed:.2f}"
    return f"{'99.99' if share == '100.00' and parsed < 1 else share} %"


def count(value: object) -> str:
    """Format a whole number with thin spaces between thousands."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed):
        return plain(parsed)
    return f"{round(parsed):,}".replace(",", "\u202f").replace("-", MINUS)


def size(value: object) -> str:
    """Format a number of bytes: ``237 kB``, ``1.42 MB``."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed):
        return plain(parsed)
    return size_text(parsed).replace(",", "\u202f").replace("-", MINUS)


def seconds(value: object) -> str:
    """Format a duration in s: ``0.42 s``, ``12.3 s``, ``3 min 20 s``, ``1 h 05 min``."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed):
        return plain(parsed)
    if round(parsed) < _MINUTE:
        return f"{parsed:.2f} s" if parsed < 10 else f"{parsed:.1f} s"  # three significant digits
    minutes, rest = divmod(round(parsed), _MINUTE)
    if minutes < _MINUTE:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // _MINUTE} h {minutes % _MINUTE:02d} min"


def pieces(name: str) -> list[str]:
    """Split a name after separators, where a line may break: ``["/layer1/", "layer1.", "0/", "Conv"]``."""
    return _PIECES.findall(name)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested settings to key paths with YAML values: (``W.QUANTIZER.BIT``, ``8``)."""
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield text(path), address(shown)
