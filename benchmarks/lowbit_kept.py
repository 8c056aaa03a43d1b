"""Rows that were measured before, in a file, so that a long run goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.lowbit_table import Cost, Line


@dataclass
class Kept:
    """Lines by the title of their table, model and row.

    Attributes:
        path: file with a JSON object a line; a row that is in it several times counts as in the last; None: no file.
        times: whether seconds are kept; not of rows that are measured while the machine is busy.
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
        """Whether a row was measured."""
        return (table, model, row) in self._lines

    def line(self, table: str, model: str, row: str, measure: Callable[[], Line]) -> Line:
        """The line of a row, measured now if it was not before."""
        key = table, model, row
        if key not in self._lines:
            line = measure()
            self._lines[key] = line if self.times else replace(line, cost=None)
            if self.path is not None:
                held = {"table": table, "row": row, "line": asdict(self._lines[key])}
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(held) + "\n")
        return self._lines[key]
