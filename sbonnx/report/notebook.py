"""Form of results: one line, a few lines, a summary in notebooks, a table, plain values.

The door from results to `sbonnx.present`: the only module of the domain that imports it, and only when called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from sbonnx.report.plots import optional
from sbonnx.values import JsonValue, plain

if TYPE_CHECKING:
    from sbonnx.report.outcome import Report
    from sbonnx.report.pruned import PruningReport


class NotebookView:
    """Value that notebooks show as a summary: `sbonnx.present.html.cards.CARDS` has a function for its class."""

    def _repr_html_(self) -> str:
        """Return the summary that notebooks show."""
        from sbonnx.present.html.cards import summary

        return summary(self)


class Result(NotebookView, JsonValue):
    """Result of a function: ``repr`` in one line, ``summary()``, ``frame()``, ``to_dict()``, and notebooks show it.

    Its dataclasses are declared with ``repr=False``.
    """

    frame_of: ClassVar = ""
    """Path of the attribute that has the rows of `frame`; "": the result is the only row."""

    def __repr__(self) -> str:
        from sbonnx.present.text.card_text import headline

        return f"{type(self).__name__}({headline(self)})"

    def summary(self) -> str:
        """Return a few lines for people: title, figures and the first rows, the worst ones where they have an order."""
        from sbonnx.present.text.card_text import summary

        return summary(self)

    def frame(self) -> Any:
        """Return the rows of the result as a pandas DataFrame. Columns are keys of `to_dict`, inner ones with dots.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = optional("pandas", "frame()")
        rows = attrgetter(self.frame_of)(self) if self.frame_of else (self,)
        if isinstance(rows, Mapping):
            rows = [{"name": name, "value": value} for name, value in rows.items()]
        flat = [dict(_flat(row)) for row in rows]
        names = dict.fromkeys(name for row in flat for name in row)
        parents = {name.rpartition(".")[0] for name in names}
        return pandas.DataFrame(flat, columns=[name for name in names if name not in parents])


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a row by their path; a value that is no object has the path ``value``."""
    value = plain(value)
    if not isinstance(value, Mapping):
        yield path or "value", value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def page(report: Report | PruningReport) -> str:
    """Return the HTML page of a report."""
    from sbonnx.present.html import single_page

    return single_page(report)
