"""Writes one section of docs/results.md, leaving the others as they are."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results.md"
TITLE = "# Results\n"
PACK = ROOT.parent / "shared" / "data"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def not_measured(keys: Iterable[Sequence[str]]) -> str:
    """Return a sentence that lists rows (model, setting, way) without a record, by setting and way; "" if none."""
    models: dict[str, list[str]] = {}
    for name, *rest in keys:
        models.setdefault(", ".join(rest), []).append(name)
    listed = "; ".join(f"{row}: {', '.join(names)}" for row, names in models.items())
    return f" Not measured: {listed}." if listed else ""


def write_section(name: str, text: str) -> None:
    """Replace the text between the markers of section `name`, or append a new section."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text.strip()}\n{end}"
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else TITLE
    if begin in old:
        head, rest = old.split(begin, 1)
        new = head + block + rest.split(end, 1)[1]
    else:
        new = f"{old.rstrip()}\n\n{block}\n"
    if not new.startswith(TITLE):
        new = f"{TITLE}\n{new.lstrip()}"
    RESULTS.write_text(new, encoding="utf-8")


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Create a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, default=PACK, help="folder of models and data with eval.py")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results.md")
    return parser
