"""Samples sorted by content: ranks and feeds depend on the set of samples alone."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx.calib.data import Feed
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.samples import CanonicalSamples, canonical_samples, content_key
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.options import RunOptions
from sbonnx.spec import Array

RNG = np.random.default_rng(0)

FEEDS: tuple[Feed, ...] = (
    *({"x": RNG.standard_normal((1, length)).astype(np.float32)} for length in (5, 3, 5, 3, 4)),
    {"x": np.zeros((1, 3), np.float32), "ids": np.array([[7]])},
    {"x": np.zeros((1, 3), np.float32), "words": np.array([["ä", "b"]], object)},
)


def units(order: list[int]) -> list[Sample]:
    return [Sample(index, f"sample {index}", FEEDS[place]) for index, place in enumerate(order)]


def told(found: CanonicalSamples) -> list[tuple[int, list[tuple[str, list[object]]]]]:
    """Ranks and contents."""
    return [(unit.rank, sorted((name, array.tolist()) for name, array in unit.feed.items())) for unit in found]


@pytest.mark.parametrize("memory", [1 << 20, 0])
def test_the_order_of_the_data_does_not_matter(memory: int) -> None:
    """In memory and, but for texts, on disk; walked twice; places in the data are kept."""
    orders = [list(range(7)), [6, 4, 2, 0, 1, 3, 5], [3, 3, 0, 1, 2, 4, 5, 6]]
    options = RunOptions(memory=memory)
    with canonical_samples(units(orders[0]), options) as first, canonical_samples(units(orders[1]), options) as second:
        assert told(first) == told(second) == told(first)
        assert [rank for rank, _ in told(first)] == list(range(7))
        assert sorted(unit.index for unit in second) == list(range(7))
    with canonical_samples(units(orders[2]), options) as twice:  # samples of the same content follow one another
        assert [each for _, each in told(twice)].count(told(twice)[0][1]) in (1, 2)
        assert twice.samples == 8


def test_samples_of_one_size_lie_together() -> None:
    with TensorStore() as store:
        sizes = [unit.feed["x"].shape for unit in CanonicalSamples(units([0, 1, 2, 3, 4]), store, RunOptions())]
    assert sizes == sorted(sizes)


def test_which_samples_are_kept_depends_on_their_contents_alone() -> None:
    """Not on their order, nor on their sizes; the rest is freed."""
    every = list(range(7))
    with TensorStore() as store:
        whole = [each for _, each in told(CanonicalSamples(units(every), store, RunOptions()))]
    kept = []
    for order in (every, every[::-1]):
        with TensorStore() as store:
            found = CanonicalSamples(units(order), store, RunOptions(), 3)
            assert found.samples == 3 and [rank for rank, _ in told(found)] == [0, 1, 2]
            assert store.counters.resident == sum(x.nbytes for unit in found for x in unit.feed.values())
            kept.append([each for _, each in told(found)])
    assert kept[0] == kept[1] and all(each in whole for each in kept[0])
    digests = sorted(content_key(unit.feed)[1] for unit in units(every))
    with TensorStore() as store:
        chosen = CanonicalSamples(units(every), store, RunOptions(), 3)
        assert {content_key(unit.feed)[1] for unit in chosen} == set(digests[:3])


def test_what_may_be_written_over_is_copied() -> None:
    """Readers may hand out the same array again."""
    array = np.ones((1, 4), np.float32)
    with canonical_samples([Sample(0, "here", {"x": array})], RunOptions()) as found:
        array[:] = 2.0
        assert next(iter(found)).feed["x"].tolist() == [[1.0] * 4]


def test_contents_that_differ_have_other_keys() -> None:
    x = np.arange(4, dtype=np.float32)
    others: list[Array] = [x.reshape(2, 2), x.astype(np.float64), -x, x[::-1]]
    keys = [*(content_key({"x": values}) for values in (x, *others)), content_key({"y": x})]
    assert len(set(keys)) == len(keys)
    assert content_key({"x": x}) == content_key({"x": np.array(x)})
