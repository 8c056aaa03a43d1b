"""Measured records in a file, so that an interrupted benchmark continues and single rows can be measured again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, ...]


class Kept:
    """Cache of measured records.

    Args:
        path: JSON Lines file; if a key occurs several times, the last record counts; None: no file.
        again: last parts of keys whose records are measured again, once, even if there are some.
    """

    def __init__(self, path: Path | None = None, again: Collection[str] = ()) -> None:
        self._path = path
        self._again = frozenset(again)
        self._records: dict[Key, Record] = {}
        self._measured: set[Key] = set()
        if path is not None and path.is_file():
            for row in path.read_text(encoding="utf-8").splitlines():
                held = json.loads(row)
                self._records[tuple(held["key"])] = held["record"]

    def get(self, *key: str) -> Record | None:
        """Return the record of a key, or None."""
        return self._records.get(key)

    def record(self, key: Key, measure: Callable[[], Record]) -> Record:
        """Return the record of a key; measure and store it if there is none, or if it is to be measured again."""
        if key not in self._records or (key[-1] in self._again and key not in self._measured):
            self._records[key] = measure()
            self._measured.add(key)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "record": self._records[key]}) + "\n")
        return self._records[key]
