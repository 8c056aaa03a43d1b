"""Acceptance results of a job, for tables and for JUnit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.html_report.figures import count, decibel, number, percent, plain, ratio, text

AT_MOST: Final = "max_"
"""Prefix of the keys with an upper limit; all others have a lower limit."""

OWN: Final = "min_metric."
"""Prefix of the keys of a job's own metrics."""

NAMES: Final = {
    "min_sqnr": "SQNR",
    "min_agreement": "agreement",
    "max_size_ratio": "size ratio",
    "max_latency_ratio": "latency ratio",
}
"""Display names of the keys of a job file."""

COLUMN: Final = {"SQNR": "sqnr", "size ratio": "size", "latency ratio": "latency", "agreement": "agreement"}

ABSENT: Final = "not measured"


@dataclass(frozen=True)
class Held:
    """One value compared with its threshold.

    Attributes:
        what, found, wanted: display texts.
        met: whether the threshold is met.
        value: value to sort by; None if it could not be measured.
        column: column of the overview: sqnr, agreement, size, latency, or metric.
    """

    what: str
    found: str
    wanted: str
    met: bool
    value: float | None
    column: str

    def __str__(self) -> str:
        return f"{self.what} {self.found}, wanted {self.wanted}"


def held_of(outcome: Mapping[str, Any]) -> tuple[Held, ...]:
    """Read the acceptance rows (what, found, wanted, met) of an outcome. Values that were not measured are None."""
    reason = text(outcome.get("reason"))
    return tuple(_held(*row, reason=reason) for row in outcome.get("accepted") or ())


def _held(what: object, found: object, wanted: object, met: object, *, reason: str) -> Held:
    key = text(what)
    name = NAMES.get(key, key.removeprefix(OWN))
    column = "metric" if key.startswith(OWN) else COLUMN.get(name, "metric")
    value = None if f"accept.{key} cannot be judged" in reason else number(found)
    sign = "≤" if key.startswith(AT_MOST) else "≥"
    said = ABSENT if value is None else _said(column, value)
    return Held(name, said, f"{sign} {_said(column, number(wanted))}", bool(met), value, column)


def _said(column: str, value: float | None) -> str:
    if column == "metric":
        return plain(value)
    if column == "sqnr":
        return f"{decibel(value)} dB"
    return percent(value) if column == "agreement" else ratio(value)


def summary(rows: Sequence[Held]) -> str:
    """Count the met thresholds: ``2 of 3 met``."""
    return f"{count(sum(row.met for row in rows))} of {count(len(rows))} met"
