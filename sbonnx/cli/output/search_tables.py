"""Tables of the results of AUTO and MIXED."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sbonnx.cli.output.metric_tables import percent
from sbonnx.cli.output.show import Show

POINTS: Final = 8
"""Rows of the Pareto front in the table; the JSON has all of them."""


def show_search(show: Show, search: Mapping[str, Any]) -> None:
    """Show the steps, the measured choices of widths and the Pareto front; nothing without a search."""
    if not search:
        return
    rows = [("plain recipe", search["plain"], None, "")] if search["plain"] else []
    rows += [
        (one["what"], one, one["gain_db"], "kept" if one["kept"] else one["why"] or "off") for one in search["steps"]
    ]
    show.table(
        f"tried, judged on {search['judged_on']} feeds{' held out' if search['held_out'] else ''}",
        ("step", "SQNR dB", "classes changed", "gain dB", ""),
        [(what, one.get("sqnr_db"), percent(one.get("changed")), gain, said) for what, one, gain, said in rows],
    )
    mixed = search["mixed"]
    if mixed is None:
        return
    show.table(
        f"widths, cost in {mixed['unit']} for {mixed['target']}",
        ("choice", "cost", "widths", "SQNR dB", "loss", ""),
        [
            (
                one["what"],
                one["cost"],
                _widths(one["widths"]),
                one["sqnr_db"],
                one["loss"],
                "kept" if one["kept"] else "",
            )
            for one in mixed["tried"]
        ],
    )
    front = mixed["front"]
    step = max(1, -(-len(front) // POINTS))
    show.table(
        "Pareto front: cost, and the error energy that the layers lose one by one",
        (mixed["unit"], "predicted loss"),
        [tuple(point) for point in front[::step]],
    )


def _widths(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
