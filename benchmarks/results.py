"""Writes one section of a page of docs/results/, leaving the others as they are.

A section has a caption of at most two lines; the command and the other sentences of its method are listed at the end
of the page, under "How measured". Tables have at most 8 columns. The index has the key figure of each page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.pages import PAGES, Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PACK = ROOT.parent / "shared" / "data"

COLUMNS: Final = 8
"""Columns of a table at most."""
CAPTION: Final = 240
"""Characters of a caption at most: two lines."""
METHODS: Final = "## How measured\n"

_COMMAND: Final = re.compile(r"(?P<command>`python -m [^`]*`(?:[,;] [^:]*?)?)(?P<end>[.:]|$)(?:\s+|$)(?=[^0-9]|$)")
_SENTENCE: Final = re.compile(r"(?<=[.!])\s+(?=[A-Z0-9`\"])")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; more than one, each with the columns that name the rows, where it is too wide."""
    lines = [list(row) for row in rows]
    if len(header) <= COLUMNS:
        return _table(header, lines)
    keys = _keys(lines, len(header))
    rest = len(header) - keys
    parts = -(-rest // (COLUMNS - keys))
    bounds = [keys + rest * part // parts for part in range(parts + 1)]
    return "\n\n".join(
        _table([*header[:keys], *header[low:high]], [[*row[:keys], *row[low:high]] for row in lines])
        for low, high in pairwise(bounds)
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _keys(rows: Sequence[Sequence[str]], width: int) -> int:
    """Return how many columns from the left name a row."""
    for count in range(1, min(width, COLUMNS - 1)):
        if len({tuple(row[:count]) for row in rows}) == len(rows):
            return count
    raise ValueError(f"no {COLUMNS - 2} columns from the left name each row of the table")


def not_measured(keys: Iterable[Sequence[str]]) -> str:
    """Return a sentence that lists rows (model, setting, way) without a record, by setting and way; "" if none."""
    models: dict[str, list[str]] = {}
    for name, *rest in keys:
        models.setdefault(", ".join(rest), []).append(name)
    listed = "; ".join(f"{row}: {', '.join(names)}" for row, names in models.items())
    return f" Not measured: {listed}." if listed else ""


def parted(text: str) -> tuple[str, str]:
    """Part a section into what is shown, with captions of two lines, and the list of its method."""
    shown: list[str] = []
    methods: dict[str, list[str]] = {}
    title, heading, left = "", "", CAPTION
    for block in re.split(r"\n{2,}", text.strip()):
        if block.startswith("#"):
            title = block.lstrip("# ") if block.startswith("## ") else title
            heading, left = ", ".join(dict.fromkeys((title, block.lstrip("# ")))), CAPTION
            shown.append(block)
        elif block.startswith("**") and block.endswith("**"):
            shown.append(_listed(block))
        elif block.startswith(("|", "-", "!")):
            left = CAPTION
            shown.append(block)
        else:
            command, rest = _command(" ".join(block.split()))
            caption, method = _caption(rest, left)
            left = 0 if method else left - len(caption)
            methods.setdefault(heading, []).extend([*command, *method])
            shown.extend([caption] if caption else [])
    lists = [
        "\n".join((f"**{where}**\n", *(f"- {line}" for line in found))) for where, found in methods.items() if found
    ]
    return "\n\n".join(shown), "\n\n".join(lists)


def _listed(verdict: str) -> str:
    """Return a verdict in bold; a list of its sentences if it is longer than two lines."""
    if len(verdict) <= CAPTION:
        return verdict
    return "\n".join(f"- **{sentence}**" for sentence in _SENTENCE.split(verdict.strip("*")))


def _command(text: str) -> tuple[list[str], str]:
    """Return the command that a paragraph begins with, with its settings, and the text after it."""
    found = _COMMAND.match(text)
    if found is None:
        return [], text
    rest = text[found.end() :]
    return [f"{found['command']}."], rest[:1].upper() + rest[1:]


def _caption(text: str, room: int) -> tuple[str, list[str]]:
    """Return the sentences of a paragraph that fit as its caption, and the others."""
    sentences = _SENTENCE.split(text) if text else []
    count = 0
    while count < len(sentences) and len(" ".join(sentences[: count + 1])) <= room:
        count += 1
    return " ".join(sentences[:count]), sentences[count:]


def with_command(text: str, command: str) -> str:
    """Return a section with the command that writes it below its heading."""
    heading, rest = text.split("\n\n", 1)
    return f"{heading}\n\n`{command}`.\n\n{rest}"


def write_section(name: str, text: str) -> None:
    """Replace section `name` in its page, or append it, with its method at the end; update the key figures.

    Raises:
        ValueError: no page has this section.
    """
    file = next((file for file, page in PAGES.items() if name in page.sections), None)
    if file is None:
        raise ValueError(f"no page of {RESULTS} has a section {name!r}")
    path = RESULTS / f"{file}.md"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    blocks = dict(re.findall(r"<!-- begin (.*?) -->\n(.*?)\n<!-- end \1 -->", old, re.DOTALL))
    blocks[name], blocks[f"method of {name}"] = parted(text)
    path.write_text(page_text(PAGES[file], blocks), encoding="utf-8")
    (RESULTS / "index.md").write_text(index(), encoding="utf-8")


def page_text(page: Page, blocks: dict[str, str]) -> str:
    """Return a page: title, key figure, sections, methods.

    Args:
        page: its title and the order of its sections.
        blocks: texts of sections and of their methods by name.
    """

    def marked(names: Iterable[str]) -> list[str]:
        return [f"<!-- begin {name} -->\n{blocks[name].strip()}\n<!-- end {name} -->\n" for name in names]

    shown = [name for name in page.sections if name in blocks]
    sections = marked(shown)
    methods = marked(f"method of {name}" for name in shown if blocks.get(f"method of {name}"))
    figure = page.figure("\n".join(sections))
    return "\n".join([f"# {page.title}\n", f"**{figure}**\n", *sections, METHODS, *methods])


def index() -> str:
    """Return the page that lists the others, each with its key figure."""
    rows = []
    for file, page in PAGES.items():
        path = RESULTS / f"{file}.md"
        if path.exists():
            figure = path.read_text(encoding="utf-8").splitlines()[2].strip("*")
            rows.append((f"[{page.title}]({file}.md)", figure))
    about = 'Every figure is written by a command, which its page names under "How measured".'
    return f"# Results\n\n{about}\n\n{table(('question', 'key figure'), rows)}\n"


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Create a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, default=PACK, help="folder of models and data with eval.py")
    parser.add_argument("--write", action="store_true", help="put the table into its page of docs/results/")
    return parser
