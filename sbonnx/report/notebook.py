"""The door from results to `sbonnx.present`: the only module of the domain that imports it, and only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbonnx.report.outcome import Report


class NotebookView:
    """Result that notebooks show as a summary: `sbonnx.present.html.cards.CARDS` has a function for its class."""

    def _repr_html_(self) -> str:
        """Return the summary that notebooks show."""
        from sbonnx.present.html.cards import summary

        return summary(self)


def page(report: Report) -> str:
    """Return the HTML page of a report."""
    from sbonnx.present.html import single_page

    return single_page(report)
