"""JSON serialization of outcomes, for the pipe of a step's process and for the step's output folder."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, Final, get_args

from sbonnx.batch.jobs.job import Outcome, Places, Status

FILE: Final = "outcome.json"
"""File name in the folder of a step's output."""

JUDGED_ALONE: Final = "judged_alone"
"""Counter of a step of which only the acceptance ran; its duration is not used for estimates."""

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
"""Default values of the fields whose types are checked."""

_NAMES: Final = frozenset(one.name for one in fields(Outcome))


def to_json(outcome: Outcome) -> str:
    """Serialize `outcome` to one line."""
    return json.dumps({name: getattr(outcome, name) for name in sorted(_NAMES)}, separators=(",", ":"), default=_plain)


def from_json(text: str | bytes) -> Outcome:
    """Parse the output of `to_json`. Unknown keys of later versions are ignored.

    Raises:
        ValueError: it is not an outcome.
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
    """Return the outcome in a step's output folder; None if it is missing or damaged."""
    try:
        return from_json((places.made(key) / FILE).read_bytes())
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):  # damaged: treat as missing
        return None


def now() -> str:
    """Return the current time, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _plain(value: Any) -> Any:
    """Convert NumPy values to Python numbers, other values to strings."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
