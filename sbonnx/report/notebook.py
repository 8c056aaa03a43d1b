"""The door from results to `sbonnx.present`: the only module of the domain that imports it, and only when called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NotebookView:
    """Result that notebooks show as a summary: `sbonnx.present.html.cards.CARDS` has a function for its class."""

    def _repr_html_(self) -> str:
        """Return the summary that notebooks show."""
        from sbonnx.present.html.cards import summary

        return summary(self)


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML page of a report, given as plain values."""
    from sbonnx.present.html import single_page
    from sbonnx.values import json_values

    return single_page(json_values(report))
