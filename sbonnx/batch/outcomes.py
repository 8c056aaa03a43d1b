"""Outcomes as JSON: what a step's process says over its pipe, and what lies in the folder of what it made."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, Final, get_args

from sbonnx.batch.jobs.job import Outcome, Places, Status

FILE: Final = "outcome.json"
"""In the folder of what a step has made."""

JUDGED_ALONE: Final = "judged_alone"
"""Counter of a step of which only the acceptance was run: its time says nothing of the next one's."""

STATUSES: Final = frozenset(get_args(Status))

_EMPTY: Final[dict[str, Any]] = {
    "reason": "",
    "error": "",
    "finished": "",
    "counters": {},
    "accepted": [],
    "files": {},
    "reads": [],
}
"""Values of fields whose types are checked."""

_NAMES: Final = frozenset(one.name for one in fields(Outcome))


def to_json(outcome: Outcome) -> str:
    """`outcome` on one line."""
    return json.dumps({name: getattr(outcome, name) for name in sorted(_NAMES)}, separators=(",", ":"), default=_plain)


def from_json(text: str | bytes) -> Outcome:
    """What `to_json` wrote. Keys that a later version added are left out.

    Raises:
        ValueError: it is no outcome.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("key"), str) or values.get("status") not in STATUSES:
        raise ValueError("not an outcome")
    if not all(isinstance(values.get(name, empty), type(empty)) for name, empty in _EMPTY.items()):
        raise ValueError("not an outcome")
    known: dict[str, Any] = {name: value for name, value in values.items() if name in _NAMES}
    known["accepted"] = tuple((row[0], float(row[1]), float(row[2]), bool(row[3])) for row in known.get("accepted", ()))
    known["reads"] = tuple(str(name) for name in known.get("reads", ()))
    return Outcome(**known)


def read_made(places: Places, key: str) -> Outcome | None:
    """The outcome of what a step has made; None where it has made nothing that can be read."""
    try:
        return from_json((places.made(key) / FILE).read_bytes())
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):  # damaged: as if it were not there
        return None


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, tuples and paths as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
