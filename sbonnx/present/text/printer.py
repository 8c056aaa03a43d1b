"""Printing of command results: tables for people, or one JSON value for programs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from sbonnx.system.terminal import BELOW_QUALITY, DONE, LINE_LENGTH, escaped, number_text, one_line, to_json, versioned
from sbonnx.values import json_values

if TYPE_CHECKING:
    from sbonnx.report.codes import Note
    from sbonnx.report.verdict import Verdict

EXACT: Final = "exact"
"""Signal-to-noise ratio of a tensor without any error, such as before the first quantized layer."""

NUMBER: Final = re.compile(rf"[-+]?(\d[\d.,]*(e[-+]?\d+)?|∞|nan)( (%|[kMGT]?B))?|{EXACT}")
"""A number, optionally with a unit: ``0.99``, ``-∞``, ``74.3 kB``, ``99.1 %``."""

BAR: Final = re.compile("[█▏▎▍▌▋▊▉]*")
"""A bar of block characters, which a line break would shorten."""

COLUMN_GAP: Final = 3
"""Characters between the columns of a table on a terminal."""

PIPE_WIDTH: Final = 100_000
"""Table width when stdout is not a terminal, so that nothing is truncated or wrapped."""


def decibels(value: float) -> float | str:
    """Return a signal-to-noise ratio for a table."""
    return EXACT if value == math.inf else value


def cell(value: object) -> str:
    """Format one table cell: numbers with 4 significant digits, an empty string for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number_text(value, ".4g")
    return one_line(value)


def _fitting(
    columns: Sequence[str], texts: list[list[str]], width: int, optional: Sequence[str]
) -> tuple[Sequence[str], list[list[str]]]:
    """Return columns and rows of a table, without the first of the `optional` columns until it fits."""
    from rich.cells import cell_len

    for name in optional:
        widths = [max(map(cell_len, column)) for column in zip(columns, *texts, strict=True)]
        if sum(widths) + COLUMN_GAP * (len(widths) - 1) <= width:
            break
        kept = [index for index, column in enumerate(columns) if column != name]
        columns, texts = [columns[index] for index in kept], [[row[index] for index in kept] for row in texts]
    return columns, texts


@final
class Printer:
    """Prints tables unless `as_json` or `quiet`; JSON if `as_json`, and then nothing else on stdout."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.tables = not (as_json or quiet)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        headed: bool = True,
        optional: Sequence[str] = (),
    ) -> None:
        """Print a table; nothing if there are no rows. Columns of numbers are right-aligned.

        Args:
            optional: columns that are left out, in this order, as long as the table is wider than the terminal.
        """
        texts = [[cell(value) for value in row] for row in rows]
        if not self.tables or not texts:
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        terminal = sys.stdout.isatty()
        console = Console(file=sys.stdout, width=None if terminal else PIPE_WIDTH, highlight=False)
        columns, texts = _fitting(columns, texts, console.width, optional)
        table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, show_header=headed)
        for index, column in enumerate(columns):
            numeric = all(not row[index] or NUMBER.fullmatch(row[index]) for row in texts)
            drawn = all(BAR.fullmatch(row[index]) for row in texts)
            table.add_column(
                Text(column), justify="right" if numeric else "left", overflow="fold", no_wrap=numeric or drawn
            )
        for row in texts:
            table.add_row(*map(Text, row))
        with console.capture() as captured:
            console.print(Text(one_line(title), style="bold"))
            console.print(table)
        for line in captured.get().splitlines():
            print(line.rstrip())
        if not terminal:  # on a terminal, the box style already ends with an empty line
            print()

    def facts(self, title: str, facts: Mapping[str, object]) -> None:
        """Print a table of names and values, without those that are None."""
        rows = [(name, value) for name, value in facts.items() if value is not None]
        self.table(title, ("", ""), rows, headed=False)

    def line(self, text: str) -> None:
        if self.tables:
            print(escaped(text))

    def note(self, text: str) -> None:
        """Print one line with a note about the result."""
        self.line(one_line(f"note: {text}", LINE_LENGTH))

    def notes(self, notes: Iterable[Note], *, every: bool = False) -> None:
        """Print one line for each kind of note, or `every` note."""
        from sbonnx.report.codes import by_code, summary

        for text in notes if every else map(summary, by_code(notes)):
            self.note(text)

    def verdict(self, verdict: Verdict, following: Sequence[str] = ()) -> None:
        """Print the sentence about the result, then the next commands, complete: the end of the output."""
        self.line(one_line(verdict.text, LINE_LENGTH))
        for command in following:
            self.line(f"next: {command}")

    def text(self, text: str) -> None:
        if self.tables:
            print(escaped(text, keep="\n"))

    def value(self, schema: str, value: Any) -> None:
        """Print a result as JSON, with the name and version of its schema; nothing without `as_json`.

        Args:
            schema: a key of `sbonnx.cli.schemas.published.SCHEMAS`.
            value: a value of its class.
        """
        if self.as_json:
            text = to_json(versioned(schema, json_values(value)))
            utf = (sys.stdout.encoding or "utf").lower().startswith("utf")
            print(text if utf else json.dumps(json.loads(text), indent=2))

    def advice(self, text: str, command: str) -> None:
        """Print one line on stderr, complete: it ends with a command, "" if there is none, that must not be cut."""
        print(f"advice: {escaped(f'{text}: {command}' if command else text)}", file=sys.stderr)

    def problems(self, problems: Sequence[str]) -> int:
        """Print each problem as one line on stderr and return the exit code."""
        for problem in problems:
            print(f"below quality: {one_line(problem, LINE_LENGTH)}", file=sys.stderr)
        return BELOW_QUALITY if problems else DONE
