"""Outcomes of steps: JSON for pipes and output folders, and integrity checks of output folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from functools import cache, partial
from typing import Any, Final, get_args

from sbonnx.batch.accept import unchanged
from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import FINE, Outcome, Places, Status, Step
from sbonnx.errors import SbonnxError, reason_of
from sbonnx.values import json_values

FILE: Final = "outcome.json"
"""File name in the folder of a step's output."""

JUDGED_ALONE: Final = "judged_alone"
"""Counter of a step of which only the acceptance ran; its duration is not used for estimates."""

FILES: Final = "files"
"""Subfolder of a step's output with the model and its data files."""

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
    return json.dumps(
        {name: getattr(outcome, name) for name in sorted(_NAMES)}, separators=(",", ":"), default=json_values
    )


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
    fields: dict[str, Any] = {name: value for name, value in values.items() if name in _NAMES}
    fields["accepted"] = tuple(
        (row[0], float(row[1]), float(row[2]), bool(row[3])) for row in fields.get("accepted", ())
    )
    fields["reads"] = tuple(str(name) for name in fields.get("reads", ()))
    return Outcome(**fields)


def read_made(places: Places, key: str) -> Outcome | None:
    """Return the outcome in a step's output folder; None if it is missing or damaged."""
    try:
        return from_json((places.made(key) / FILE).read_bytes())
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):  # damaged: treat as missing
        return None


def skipped_steps(
    steps: Mapping[str, Step], waiting: Iterable[str], outcomes: Mapping[str, Outcome]
) -> list[tuple[str, Outcome]]:
    """Return (key, outcome) of the waiting steps that have a dependency which did not succeed."""
    skipped = []
    for key in waiting:
        failed = [need for need in steps[key].after if need in outcomes and outcomes[need].status not in FINE]
        if failed:
            ended = outcomes[failed[0]]
            reason = f"'{steps[failed[0]].title}' did not succeed ({ended.status}): {ended.reason}"
            skipped.append((key, Outcome(key, "skipped", reason=reason, attempts=0, finished=now())))
    return skipped


def outcome_of(key: str, error: BaseException) -> Outcome:
    """Return the outcome of a step that raised `error`: "refused" for a `SbonnxError`, else "failed"."""
    if isinstance(error, SbonnxError):
        return Outcome(key, "refused", str(error), finished=now(), error=error.kind)
    return Outcome(key, "failed", reason_of(error), finished=now(), error=type(error).__name__)


def now() -> str:
    """Return the current time, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Intact:
    """Checks the outputs of steps. Files with unchanged stamps are not read again.

    intact = Intact(places)
    outcomes = [intact.outcome(step) for step in steps]
    intact.digests.save()
    """

    def __init__(self, places: Places) -> None:
        self.digests = Digests(places.state)
        self._places = places
        self._unchanged = cache(partial(unchanged, places=places, digests=self.digests))

    def outcome(self, step: Step) -> Outcome | None:
        """Return the outcome of a step; None if it has no output, its files are damaged, or the files that its metric
        read have changed.
        """
        stored = self.files(step.key, step.work)
        return stored if stored is not None and all(map(self._unchanged, stored.reads)) else None

    def files(self, key: str, work: str) -> Outcome | None:
        """Return the outcome under `key`, with files under `work`; None if one of them is missing or damaged."""
        stored = read_made(self._places, key)
        if stored is None:
            return None
        folder = self._places.made(work) / FILES
        intact = all(self.digests.of(folder / name) == digest for name, digest in stored.files.items())
        return stored if intact else None


def made_before(step: Step, places: Places) -> Outcome | None:
    """Return the outcome of one step, as `Intact.outcome`."""
    intact = Intact(places)
    stored = intact.outcome(step)
    intact.digests.save()
    return stored
