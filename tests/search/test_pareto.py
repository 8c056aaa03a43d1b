"""The exact choice against all choices there are, and the greedy one against the exact one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.search import pareto as fronts
from sbonnx.search.pareto import Front, Option, either, greedy, join, join_all, leaf

NUMBER = st.integers(0, 12).map(float)
CHOICE = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=4)
PROBLEM = st.lists(CHOICE, min_size=1, max_size=5)


def leaves(problem: list[list[tuple[float, float]]]) -> list[Front]:
    """A front a choice; an option is called by its choice and its place."""
    return [
        leaf([Option(cost, loss, (number, place)) for place, (cost, loss) in enumerate(some)])
        for number, some in enumerate(problem)
    ]


def best_within(problem: list[list[tuple[float, float]]], limit: float) -> float | None:
    """The least loss of all choices within a limit, one by one."""
    found = [
        sum(loss for _, loss in choice) for choice in product(*problem) if sum(cost for cost, _ in choice) <= limit
    ]
    return min(found, default=None)


@settings(max_examples=150, deadline=None)
@given(problem=PROBLEM, limit=st.integers(0, 60))
def test_exact_is_the_best_of_all(problem: list[list[tuple[float, float]]], limit: int) -> None:
    front = join_all(leaves(problem))
    place = front.within(limit)
    best = best_within(problem, limit)
    assert (place is None) == (best is None)
    if place is None:
        return
    assert front.losses[place] == best
    labels = front.labels(place)
    assert [number for number, _ in labels] == list(range(len(problem)))
    assert sum(problem[number][at][0] for number, at in labels) == front.costs[place] <= limit
    assert sum(problem[number][at][1] for number, at in labels) == front.losses[place]


@settings(max_examples=100, deadline=None)
@given(problem=PROBLEM, limit=st.integers(0, 60))
def test_greedy_keeps_the_limit_and_is_never_better(problem: list[list[tuple[float, float]]], limit: int) -> None:
    made = leaves(problem)
    places = greedy(made, limit)
    best = best_within(problem, limit)
    assert (places is None) == (best is None)
    if places is None or best is None:
        return
    assert sum(front.costs[place] for front, place in zip(made, places, strict=True)) <= limit
    assert sum(front.losses[place] for front, place in zip(made, places, strict=True)) >= best


@settings(max_examples=80, deadline=None)
@given(problem=PROBLEM)
def test_a_front_is_what_nothing_dominates(problem: list[list[tuple[float, float]]]) -> None:
    front = join_all(leaves(problem))
    every = {(sum(c for c, _ in choice), sum(x for _, x in choice)) for choice in product(*problem)}
    expected = {(c, x) for c, x in every if not any((a <= c and b <= x) and (a, b) != (c, x) for a, b in every)}
    assert set(zip(front.costs.tolist(), front.losses.tolist(), strict=True)) == expected
    hull = front.hull()
    slopes = np.diff(front.losses[hull]) / np.diff(front.costs[hull])
    assert hull[0] == 0 and hull[-1] == len(front) - 1
    assert (np.diff(slopes) > 0).all()


@settings(max_examples=60, deadline=None)
@given(first=PROBLEM, second=PROBLEM, limit=st.integers(0, 60))
def test_one_of_two_sets_of_choices(
    first: list[list[tuple[float, float]]], second: list[list[tuple[float, float]]], limit: int
) -> None:
    front = either([join_all(leaves(first)), join_all(leaves(second))])
    place = front.within(limit)
    found = [best for best in (best_within(first, limit), best_within(second, limit)) if best is not None]
    assert (None if place is None else front.losses[place]) == min(found, default=None)
    if place is not None:
        assert len(front.labels(place)) in (len(first), len(second))


def curves(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Options that do not dominate each other: costs rise, losses fall."""
    costs = [np.sort(rng.integers(1, 60, 4)) / 10 for _ in range(count)]
    return [np.stack([cost, 1 / cost + rng.random(4) * 1e-3]) for cost in costs]


def test_a_front_that_is_thinned_keeps_its_ends_and_true_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its most points it holds about so many, each a choice that exists, near the exact one."""
    rng = np.random.default_rng(0)
    problem = [[(float(c), float(x)) for c, x in zip(*curve, strict=True)] for curve in curves(rng, 12)]
    exact = join_all(leaves(problem))
    monkeypatch.setattr(fronts, "MOST_POINTS", 100)
    thin = join_all(leaves(problem))
    assert len(exact) > 300 and len(thin) <= 102
    assert (thin.costs[0], thin.losses[-1]) == pytest.approx((exact.costs[0], exact.losses[-1]))
    for limit in np.linspace(exact.costs[0], exact.costs[-1], 20):
        place, best = thin.within(limit), exact.within(limit)
        assert place is not None and best is not None and thin.costs[place] <= limit
        assert sum(problem[number][at][0] for number, at in thin.labels(place)) == pytest.approx(thin.costs[place])
        cell = limit - 12 * (exact.costs[-1] - exact.costs[0]) / 100  # a cell a join is what may be lost
        worst = exact.within(cell)
        assert worst is None or thin.losses[place] <= exact.losses[worst] + 1e-9
        assert thin.losses[place] >= exact.losses[best] - 1e-9


def test_many_layers_are_no_recursion() -> None:
    front = join_all([leaf([Option(0.0, 1.0, (n, 0)), Option(1.0, 0.0, (n, 1))]) for n in range(2000)])
    place = front.within(700.0)
    assert place is not None and front.losses[place] == 1300.0
    assert sum(at for _, at in front.labels(place)) == 700


def test_there_must_be_something_to_choose() -> None:
    with pytest.raises(ValueError, match="no options"):
        leaf([])
    with pytest.raises(ValueError, match="nothing to choose"):
        join_all([])


def test_a_join_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    one, two = (
        leaf([Option(float(c), float(-c + x), n) for n, (c, x) in enumerate(rng.random((200, 2)))]) for _ in range(2)
    )
    whole = join(one, two)
    monkeypatch.setattr(fronts, "CHUNK", 50)
    pieces = join(one, two)
    assert np.array_equal(whole.costs, pieces.costs) and np.array_equal(whole.losses, pieces.losses)
    assert [whole.labels(n) for n in range(len(whole))] == [pieces.labels(n) for n in range(len(pieces))]
