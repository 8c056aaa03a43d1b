"""Divide the tests into a fast lane (`-m "not slow"`) and the rest (`-m slow`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest


def divide(items: Sequence[pytest.Item]) -> None:
    """Mark `slow` the cases of tests marked `sampled` that the fast lane leaves out.

    `sampled` keeps as few cases as have each value of each parameter; `sampled(n)` keeps n, evenly spread.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        values = [{name: id(value) for name, value in each.callspec.params.items()} for each in group]  # type: ignore[attr-defined]
        kept = spread(len(group), *marker.args) if marker.args else covering(values)
        for index in sorted({*range(len(group))} - kept):
            group[index].add_marker("slow")


def spread(cases: int, count: int) -> set[int]:
    """Return `count` indices below `cases`, evenly spread from the first to the last."""
    if count >= cases:
        return {*range(cases)}
    return {round(index * (cases - 1) / max(count - 1, 1)) for index in range(count)}


def covering(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Return indices of cases among which each value of each parameter occurs, chosen by how many each adds."""
    missing = {value for case in cases for value in case.items()}
    chosen: set[int] = set()
    while missing:
        gains = [len(missing & case.items()) for case in cases]
        best = gains.index(max(gains))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen
