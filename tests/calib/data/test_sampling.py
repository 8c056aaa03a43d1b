"""Which feeds are used: the first or random ones, the same everywhere; and how many there are, told without reading."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.data import InputSpec
from sbonnx.calib.data.dataset import read
from sbonnx.calib.data.objects import Sampling, _mix, rank
from sbonnx.calib.data.stored_arrays import StoredArray
from sbonnx.errors import DataError
from sbonnx.spec import Array
from tests.calib.data.test_dataset import F32, SOURCES, X, as_loader, sample

ROOT = Path(__file__).resolve().parents[3]
ONE = (InputSpec("x", F32, ("N", 1)),)

# SplitMix64 of Vigna's reference in C (splitmix64.c) for the seed 1234567: what its first calls give.
REFERENCE = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)


def test_ranks_are_splitmix64() -> None:
    """The n-th number of SplitMix64 is the finaliser of its seed plus n times the golden gamma."""
    gamma = 0x9E3779B97F4A7C15
    assert tuple(_mix((1234567 + n * gamma) % 2**64) for n in range(5)) == REFERENCE
    assert rank(7, 3) == _mix(3 + _mix(7))


def test_the_picked_positions_are_these_for_ever() -> None:
    assert Sampling(5, "random", 0).chosen(20) == (1, 5, 7, 14, 17)
    assert Sampling(5, "random", 1).chosen(20) == (6, 7, 8, 12, 19)
    assert Sampling(5, "first", 1).chosen(20) == (0, 1, 2, 3, 4)
    assert Sampling(None, "random", 1).chosen(3) == (0, 1, 2)
    code = "from sbonnx.calib.data.objects import Sampling; print(Sampling(5, 'random', 0).chosen(20))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(Sampling(5, "random", 0).chosen(20))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 200), st.integers(1, 60), st.integers(0, 2**70), st.integers(0, 50))
def test_more_data_changes_little(total: int, limit: int, seed: int, more: int) -> None:
    """What stays of the pick after feeds were added is all of it but what the new ones push out, one for one."""
    sampling = Sampling(limit, "random", seed)
    before, after = sampling.chosen(total), sampling.chosen(total + more)
    assert len(before) == min(limit, total) and list(before) == sorted(set(before))
    new = [place for place in after if place >= total]
    assert len(set(before) - set(after)) == max(0, len(before) + len(new) - limit)
    assert {place for place in after if place < total} <= set(before)
    assert [place for place, _ in sampling.kept(range(total))] == list(before)


def test_every_feed_has_the_same_chance() -> None:
    """20 of 100 over 2,000 seeds: each is in 400 times, give or take five deviations of sqrt(2000 * 0.2 * 0.8)."""
    counts = np.zeros(100)
    for seed in range(2000):
        counts[list(Sampling(20, "random", seed).chosen(100))] += 1
    assert np.abs(counts - 400).max() < 5 * 17.9


@pytest.mark.parametrize("make", SOURCES)
def test_every_source_gives_the_same_pick_in_the_order_of_the_data(make: Callable[[Path], Any], tmp_path: Path) -> None:
    seed = next(seed for seed in range(9) if Sampling(2, "random", seed).chosen(3) == (0, 2))
    data = read(make(tmp_path), X, limit=2, pick="random", seed=seed)
    for _ in range(2):
        assert [len(feed["x"]) for feed in data] == [2, 3]
    assert len(data) == 2


class Counting:
    """Feeds of unknown number, like an IterableDataset's loader, that counts how often it is walked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.walks = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.walks += 1
        return ({"x": np.full((3, 1), i, np.float32)} for i in range(self.count))


def first_values(data: Any) -> list[float]:
    return [float(feed["x"][0, 0]) for feed in data]


def test_a_source_of_unknown_length_is_counted_once() -> None:
    source = Counting(50)
    data = read(source, ONE, limit=5, pick="random", seed=3)
    before = source.walks
    assert first_values(data) == list(Sampling(5, "random", 3).chosen(50)) == first_values(data)
    assert source.walks == before + 2
    assert data.count is None and len(data) == 5


def test_picking_counts_batches_after_splitting() -> None:
    array = np.arange(40, dtype=np.float32)[:, None]
    data = read({"x": array}, ONE, split=3, limit=4, pick="random", seed=1)
    assert data.count == len(data) == 4
    assert first_values(data) == [3.0 * place for place in Sampling(4, "random", 1).chosen(14)]


def test_only_the_picked_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        np.savez(tmp_path / f"{number}.npz", x=np.full((1, 1), number, np.float32))
    loaded: list[StoredArray] = []
    load = StoredArray.load

    def counted(array: StoredArray) -> Array:
        loaded.append(array)
        return load(array)

    monkeypatch.setattr(StoredArray, "load", counted)
    data = read(tmp_path, ONE, limit=3, pick="random", seed=2)
    loaded.clear()
    assert first_values(data) == list(Sampling(3, "random", 2).chosen(30))
    assert len(loaded) == 3


def test_a_generator_keeps_only_what_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 of 1,000 feeds of 4 kB: the walk would be refused at 100 kB if it kept them all."""
    monkeypatch.setattr("sbonnx.calib.data.objects.MAX_CACHED", 100_000)

    def feeds() -> Iterator[dict[str, Any]]:
        return ({"x": np.full((1000, 1), i, np.float32)} for i in range(1000))

    places = Sampling(4, "random", 0).chosen(1000)
    data = read(feeds(), ONE, limit=4, pick="random")
    assert first_values(data) == list(places)
    assert [where for where, _ in data.items()] == [f"feed {place}" for place in places]
    with pytest.raises(DataError, match="can be walked only once and gave more than"):
        read(feeds(), ONE, limit=400, pick="random")


def test_data_that_shrinks_between_walks_is_named() -> None:
    source = Counting(50)
    data = read(source, ONE, limit=5, pick="random", seed=3)
    source.count = 3
    with pytest.raises(DataError, match="the Counting held 50 feeds when they were counted, and fewer now"):
        list(data)


def save_npz(folder: Path) -> Any:
    np.savez(folder / "a.npz", sr=np.array(16000), x=sample(10))
    return folder / "a.npz"


def save_compressed(folder: Path) -> Any:
    np.savez_compressed(folder / "a.npz", x=sample(10))
    return folder / "a.npz"


def save_npy(folder: Path) -> Any:
    np.save(folder / "x.npy", sample(10))
    return folder / "x.npy"


def save_folder(folder: Path) -> Any:
    for number, size in enumerate((5, 2, 3)):
        np.save(folder / f"{number}.npy", sample(size))
    return folder


def save_columns(folder: Path) -> Any:
    (folder / "x").mkdir()
    save_folder(folder / "x")
    return folder


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (save_npz, 3),
        (save_compressed, 3),
        (save_npy, 3),
        (save_folder, 4),
        (save_columns, 4),
        (lambda _: {"x": sample(10)}, 3),
        (lambda _: sample(10), 3),
        (lambda _: [{"x": sample(5)}, {"x": sample(5)}], 4),
        (lambda _: ((sample(5), 1) for _ in range(2)), 4),
        (lambda _: [(sample(4).tolist(),)], None),
        (as_loader, None),
    ],
)
def test_batches_are_counted_where_it_is_cheap(
    make: Callable[[Path], Any], batches: int | None, tmp_path: Path
) -> None:
    inputs = (*X, InputSpec("sr", np.dtype(np.int64), ())) if make is save_npz else X
    data = read(make(tmp_path), inputs, split=4)
    assert data.count == batches
    assert len(data) == len(list(data)) >= 1
    assert read(data._source, inputs, split=4, limit=2).count == (batches and 2)


def test_headers_of_very_many_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.calib.data.stored_arrays.MOST_FILES", 2)
    assert read(save_folder(tmp_path), X, split=4).count is None


def test_a_file_that_cannot_be_read_is_named_when_it_is_reached(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "1.npy").write_bytes(b"junk")
    data = read(tmp_path, X, split=4)
    assert data.count is None
    with pytest.raises(DataError, match=r"1\.npy' cannot be read"):
        list(data)
