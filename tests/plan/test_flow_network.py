"""Minimum cuts against every cut tried one by one."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sbonnx.planning.flow_network import FlowNetwork


def smallest_cut(network: FlowNetwork, inner: list[str]) -> set[str]:
    """The sink side of least capacity, and of those the one with the fewest nodes."""
    found = []
    for size in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, size):
            side = {"t", *chosen}
            cut = [room for (tail, head), room in network.capacities.items() if tail not in side and head in side]
            found.append((math.inf if None in cut else sum(room for room in cut if room is not None), len(side), side))
    cost, size, side = min(found, key=lambda entry: entry[:2])
    assert math.isfinite(cost)
    assert [entry[:2] for entry in found].count((cost, size)) == 1  # the smallest side is unique
    return side


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(60))
def test_equals_the_best_of_all_cuts(seed: int) -> None:
    chance = random.Random(seed)
    inner = [f"n{number}" for number in range(7)]
    network = FlowNetwork()
    for name in inner:
        network.add("s", name, chance.randrange(9))
        network.add(name, "t", chance.randrange(9))
    for _ in range(chance.randrange(20)):
        tail, head = chance.sample(inner, 2)
        network.add(tail, head, chance.choice([None, 0, 1, 2, 3, 5, 8]))
    known = {node for edge in network.capacities for node in edge}
    assert network.sink_side("s", "t") == smallest_cut(network, inner) & known


def test_a_long_chain() -> None:
    """The narrowest edge of a chain of 20,000 nodes is cut; several of them at the last one."""
    network = FlowNetwork()
    for number in range(20_000):
        network.add(number, number + 1, 3 if number in (700, 12_000) else 5)
    assert network.sink_side(0, 20_000) == set(range(12_001, 20_001))


def test_equal_edges_are_summed() -> None:
    network = FlowNetwork()
    network.add("s", "a", 2)
    network.add("s", "a", 2)
    network.add("a", "t", 3)
    assert network.sink_side("s", "t") == {"t"}
    network.add("a", "t", None)
    network.add("a", "t", 1)
    assert network.sink_side("s", "t") == {"a", "t"}


def test_without_sink() -> None:
    network = FlowNetwork()
    network.add("s", "a", 1)
    assert network.sink_side("s", "t") == set()
