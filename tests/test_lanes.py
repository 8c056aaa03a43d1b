"""Which cases the fast lane takes, and that the commands run each test in one lane."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lanes import covering, divide, spread

ROOT = Path(__file__).resolve().parents[1]


class Case:
    """As much of a `pytest.Item` as is read."""

    def __init__(self, test: str, **params: int) -> None:
        self.nodeid = f"{test}[{'-'.join(map(str, params.values()))}]"
        self.callspec = SimpleNamespace(params=params)
        self.markers = {"sampled": pytest.mark.sampled(2).mark if test == "spread" else pytest.mark.sampled.mark}
        if test == "whole":
            self.markers.clear()

    def get_closest_marker(self, name: str) -> Any:
        return self.markers.get(name)

    def add_marker(self, name: str) -> None:
        self.markers[name] = getattr(pytest.mark, name).mark


def test_every_value_is_in_the_fast_lane() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(5), range(3), range(2))]
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) == 5
    assert {value for case in chosen for value in case.items()} == {value for case in cases for value in case.items()}


@pytest.mark.parametrize(
    ("cases", "count", "expected"), [(9, 3, {0, 4, 8}), (9, 1, {0}), (2, 2, {0, 1}), (2, 5, {0, 1}), (10, 2, {0, 9})]
)
def test_a_number_of_cases_is_spread(cases: int, count: int, expected: set[int]) -> None:
    assert spread(cases, count) == expected


def test_the_cases_left_out_are_slow() -> None:
    product = [Case("product", a=a, b=b) for a in range(4) for b in range(3)]
    spread_out, whole = [Case("spread", a=a) for a in range(6)], [Case("whole", a=a) for a in range(5)]
    spread_out[5].add_marker("slow")
    divide([*product, *spread_out, *whole])  # type: ignore[list-item]
    fast = [case.nodeid for case in (*product, *spread_out, *whole) if not case.get_closest_marker("slow")]
    assert fast[:6] == [*(f"product[{pair}]" for pair in ("0-0", "1-1", "2-2", "3-0")), "spread[0]", "spread[4]"]
    assert len(fast) == 6 + len(whole)


@pytest.mark.sampled
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", "xyz")
def test_this_product_is_sampled(a: int, b: str, request: pytest.FixtureRequest) -> None:
    """By what pytest itself says of cases: 4 of the 12 are fast, and all others slow."""
    cases = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    fast = [item for item in cases if not item.get_closest_marker("slow")]
    assert len(fast) in (0, 4) or len(cases) == 1  # one was asked for by name


def test_the_commands_run_both_lanes() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == [
        "make check",
        "make test-all",
        "make golden",
    ]
