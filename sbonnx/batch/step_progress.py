"""Progress and log lines of a step, with the values of ${NAME} hidden."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbonnx.batch.jobs.job import Outcome, Tell
from sbonnx.batch.redaction import Hider


class StepProgress:
    """`Progress` that reports to the batch runner."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._what = "quantize"
        self._done = 0
        self._total: int | None = None

    def start(self, what: str, total: int | None) -> None:
        """Implement `Progress.start`."""
        self._what, self._done, self._total = what, 0, total
        self._tell(what, 0, total)

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        """Implement `Progress.state`."""
        if segment is not None:
            self._done = 0

    def advance(self, pieces: int = 1) -> None:
        """Implement `Progress.advance`."""
        self._done += pieces
        self._tell(self._what, self._done, self._total)

    def close(self) -> None:
        """Implement `Progress.close`."""


def hidden(outcome: Outcome, hider: Hider) -> Outcome:
    """Return the outcome with the values of ${NAME} hidden."""
    return replace(outcome, reason=hider.text(outcome.reason), report=hider.plain(outcome.report))


def clean_log(log: Path, hider: Hider) -> None:
    """Hide the values of ${NAME} in the output of libraries."""
    sys.stderr.flush()
    if not hider or not log.is_file():
        return
    found = log.read_bytes()
    clean = hider.text(found.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    if clean != found:
        log.write_bytes(clean)


def plain(value: Any, renamed: tuple[str, str]) -> Any:
    """Convert to JSON values; non-finite numbers become the strings "inf", "-inf" or "nan"."""
    if isinstance(value, str):
        return value.replace(*renamed) if renamed[0] else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner, renamed) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, renamed) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), renamed)
    return value if value is None or isinstance(value, (bool, int)) else str(value)


__all__ = ["StepProgress", "clean_log", "hidden", "plain"]
