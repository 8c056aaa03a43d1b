"""Results from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from sbonnx.report.codes import Note, Reason, Refusal
from sbonnx.report.reading import read
from sbonnx.values import INLINE, INTERNAL, OBJECT, OPTIONAL, JsonValue, json_values


@dataclass(frozen=True)
class Figures:
    """Figures that have no key of their own."""

    error: float
    changed: float | None


@dataclass(frozen=True)
class Other:
    """Other form of a value, with keys of its own."""

    llm: int


@dataclass(frozen=True)
class Example(JsonValue):
    """Each form of a field."""

    json_keys: ClassVar = ("twice", ..., "count", "note_codes")
    count: int
    name: Literal["a", "b"]
    rows: tuple[tuple[str, float], ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = field(default=(), metadata={"codes": "note_codes"})
    score: Figures | None = field(default=None, metadata=INLINE)
    inner: Figures | Other | None = field(default=None, metadata=OBJECT)
    command: str | None = field(default=None, metadata=OPTIONAL)
    source: object = field(default=None, metadata=INTERNAL)
    target: float | str = "text"

    @property
    def twice(self) -> int:
        """A key that is computed."""
        return 2 * self.count

    @property
    def note_codes(self) -> tuple[str, ...]:
        """Codes of the notes."""
        return tuple(note.code for note in self.notes)


FULL = Example(
    3,
    "a",
    (("x", math.inf), ("y", 1.0)),
    {"a": 1},
    (Note("k", "sentence"),),
    Figures(math.nan, None),
    Figures(1.0, 2.0),
    "run",
    target=math.inf,
)


@pytest.mark.parametrize("value", [FULL, Example(1, "b"), Example(1, "b", inner=Other(7))])
def test_read_back_from_json(value: Example) -> None:
    found = read(Example, json.loads(json.dumps(json_values(value.to_dict()))))
    assert repr(found) == repr(value) and [note.code for note in found.notes] == [note.code for note in value.notes]


def test_whole_numbers_stay_whole() -> None:
    assert isinstance(read(Example, {"count": 1, "name": "a", "target": 3}).target, int)


def test_sentences_without_codes_are_their_codes() -> None:
    refusal = read(Refusal, {"what": "w", "where": "n", "why": "because"})
    assert refusal.code == "because" and isinstance(refusal.why, Reason)
    assert read(Refusal, {"what": "w", "where": "n", "why": "because", "code": "c"}).why.code == "c"


def test_errors_name_the_key() -> None:
    for values, text in (
        ({"name": "a"}, "Example.count is missing"),
        ({"count": 1, "name": "a", "rows": [["x"]]}, r"Example.rows\[0\] has 1 values, and 2 belong there"),
        ({"count": 1, "name": "a", "inner": {"error": "no", "changed": None}}, "Example.inner.error is 'no'"),
        ([], r"Example is \[\]"),
    ):
        with pytest.raises(ValueError, match=text):
            read(Example, values)
