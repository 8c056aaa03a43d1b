"""Rows that were measured before, in a file, so that a long run goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.lowbit_table import Cost, Line


@dataclass
class Kept:
    """Cache of measured lines by table title, model and row.

    Attributes:
        path: JSON Lines file; if a row occurs several times, the last one counts; None: no file.
        times: whether seconds are stored; False for rows that are measured while the machine is busy.
    """

    path: Path | None = None
    times: bool = True
    _lines: dict[tuple[str, str, str], Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            for row in self.path.read_text(encoding="utf-8").splitlines():
                held = json.loads(row)
                cost = None if held["line"]["cost"] is None else Cost(**held["line"]["cost"])
                line = Line(**{**held["line"], "scores": tuple(held["line"]["scores"]), "cost": cost})
                self._lines[held["table"], line.model, held["row"]] = line

    def has(self, table: str, model: str, row: str) -> bool:
        """Return whether a row is in the cache."""
        return (table, model, row) in self._lines

    def line(self, table: str, model: str, row: str, measure: Callable[[], Line]) -> Line:
        """Return the cached line of a row, or measure and store it."""
        key = table, model, row
        if key not in self._lines:
            line = measure()
            self._lines[key] = line if self.times else replace(line, cost=None)
            if self.path is not None:
                held = {"table": table, "row": row, "line": asdict(self._lines[key])}
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(held) + "\n")
        return self._lines[key]
