"""TensorStore: what comes out is what went in, memory stays in its budget, nothing stays on disk."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbonnx.calib.storage.spill_file import READ_RATE, WRITE_RATE, SpillFile
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import OutputError, RecipeError
from sbonnx.options import parse_size

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "size"),
    [("2 GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 kB", 1500), ("3g", 3 * 10**9), ("7", 7), (0, 0), (4096, 4096)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "two", "-1", "1 XiB", "3 i", "1e9 B"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RecipeError, match="is no size of memory; write '2 GiB'"):
        parse_size(text)


@pytest.mark.parametrize("budget", ["1 GiB", 0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_resident_or_spilled_is_the_same(budget: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    with TensorStore(budget) as store:
        store.put("a", array)
        back = store.get("a")
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        np.testing.assert_array_equal(back, array)


def test_a_view_is_spilled_as_it_looks() -> None:
    array = np.arange(24.0).reshape(4, 6)[::2, ::-1].T
    with TensorStore(0) as store:
        store.put("a", array)
        np.testing.assert_array_equal(store.get("a"), array)


def test_text_is_never_spilled() -> None:
    with TensorStore(0) as store:
        store.put("a", np.array(["x", "yy"], object))
        assert list(store.get("a")) == ["x", "yy"]
        assert store.counters.spills == 0


def test_released_at_the_last_reader() -> None:
    with TensorStore() as store:
        store.put("a", np.ones(10, np.float32), readers=2)
        store.put("unread", np.ones(10, np.float32), readers=0)
        assert "unread" not in store
        store.release("a")
        assert store.counters.resident == 40
        store.take("a")
        assert "a" not in store
        assert store.counters.resident == 0
        with pytest.raises(KeyError):
            store.get("a")


def test_a_key_is_taken_once() -> None:
    with TensorStore() as store:
        store.put(("a", 1), np.ones(1))
        with pytest.raises(ValueError, match="in the store already"):
            store.put(("a", 1), np.ones(1))


def test_the_budget_holds() -> None:
    arrays = [np.full(256, i, np.float32) for i in range(10)]
    with TensorStore("4 KiB") as store:
        for i, array in enumerate(arrays):
            store.put(i, array)
        seen = store.counters
        assert seen.peak_resident == 4096
        assert (seen.spilled, seen.spills) == (6 * 1024, 6)
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(store.take(i), array)
        assert (store.counters.resident, store.counters.spilled) == (0, 0)


def test_a_view_does_not_keep_the_rest_alive() -> None:
    whole = np.arange(1000.0)
    with TensorStore() as store:
        store.put("row", whole[:10])
        store.put("all", whole)
        assert not np.shares_memory(store.get("row"), whole)
        assert store.get("all") is whole


@pytest.mark.parametrize("budget", ["1 MiB", 0])
def test_a_buffer_that_is_used_again(budget: Any) -> None:
    buffer = np.ones(10, np.float32)
    with TensorStore(budget) as store:
        store.put("a", buffer, copy=True)
        buffer[:] = 2
        np.testing.assert_array_equal(store.get("a"), np.ones(10, np.float32))


def test_lazy_arrays_are_made_at_each_get() -> None:
    with TensorStore() as store:
        store.put("x", np.arange(4.0), readers=1)
        store.put_lazy("y", lambda: store.get("x") * 2, 32, readers=2)
        store.put_lazy("unread", lambda: np.ones(1), 8, readers=0)
        assert "unread" not in store
        assert (store.counters.lazy, store.counters.resident) == (32, 32)
        for _ in range(2):
            np.testing.assert_array_equal(store.take("y"), np.arange(4.0) * 2)
        assert "y" not in store
        assert (store.counters.recomputed, store.counters.lazy) == (2, 0)


def test_drop() -> None:
    with TensorStore(80) as store:
        x = np.arange(10.0)
        store.put("held", x, readers=3)
        store.put("spilled", x)
        assert (store.fits(0), store.fits(1)) == (True, False)
        for key in ("held", "spilled", "spilled", "nowhere"):
            store.drop(key)
        assert len(store) == 0
        assert (store.counters.resident, store.counters.spilled) == (0, 0)
        assert store.fits(80)


def test_what_is_cheaper_before_anything_was_measured() -> None:
    """490 MB: a second to write, 0.1065 to read; 0.06 to copy where they fit."""
    with TensorStore() as store:
        assert store.cheaper_to_recompute(0.061, 490_000_000)
        assert not store.cheaper_to_recompute(0.062, 490_000_000)
        assert not store.cheaper_to_recompute(0.031, 490_000_000, readers=2)
    with TensorStore(0) as store:
        assert store.cheaper_to_recompute(1.1, 490_000_000)
        assert not store.cheaper_to_recompute(1.11, 490_000_000)
        assert store.cheaper_to_recompute(0.6, 490_000_000, readers=2)
        assert not store.cheaper_to_recompute(0.61, 490_000_000, readers=2)


def test_what_is_cheaper_is_measured(tmp_path: Path) -> None:
    """Past 8 MiB the store's own rates count: a slow disk makes recomputing worth more."""
    block = np.zeros(1 << 20, np.uint8)
    with TensorStore(0, folder=tmp_path) as store:
        for i in range(8):
            store.put(i, block)
            store.get(i)
        file = store._file
        assert file is not None
        write, read = file.write_rate, file.read_rate
        assert write != WRITE_RATE and read != READ_RATE
        border = (1 << 20) / write + (1 << 20) / read
        assert store.cheaper_to_recompute(border * 0.99, 1 << 20)
        assert not store.cheaper_to_recompute(border * 1.01, 1 << 20)


def test_copies_are_independent_and_within_the_budget() -> None:
    x = np.arange(100_000, dtype=np.float32)
    with TensorStore("2 MiB") as store:
        store.put("a", x, readers=2, copy=True)
        assert not np.shares_memory(store.get("a"), x)
        own = store.take("a")
        store.release("a")
        store.put("b", x + 1, copy=True)
        assert np.array_equal(own, x)
        assert np.array_equal(store.get("b"), x + 1)
        rest = x[:60_000]
        for key in range(10):
            store.put(key, rest, copy=True)
        assert store.counters.spills > 0
        assert store.counters.peak_resident <= 2 << 20
        assert all(np.array_equal(store.take(key), rest) for key in range(10))


SIZES = st.one_of(st.integers(0, 40), st.integers(1000, 1100))


class LikeADict(RuleBasedStateMachine):
    """A store with a small budget against a plain dict of (array, readers left), every step checked."""

    def __init__(self) -> None:
        super().__init__()
        self.store = TensorStore(4096)
        self.model: dict[int, list[Any]] = {}
        self.lazy: set[int] = set()
        self.next = 0

    @rule(length=SIZES, readers=st.integers(0, 3), lazy=st.booleans(), copy=st.booleans())
    def put(self, length: int, readers: int, lazy: bool, copy: bool) -> None:
        key, self.next = self.next, self.next + 1
        array = np.full(length, key, np.float32)
        if lazy:
            self.store.put_lazy(key, array.copy, array.nbytes, readers)
        else:
            self.store.put(key, array, readers=readers, copy=copy)
        if readers:
            self.model[key] = [array, readers]
            self.lazy |= {key} if lazy else set()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["get", "release", "take", "drop"]))
    def use(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        found = getattr(self.store, how)(key)
        if how in ("get", "take"):
            np.testing.assert_array_equal(found, self.model[key][0])
        if how == "drop":
            self.model[key][1] = 0
        elif how in ("release", "take"):
            self.model[key][1] -= 1
        if self.model[key][1] == 0:
            del self.model[key]

    @invariant()
    def same(self) -> None:
        counters = self.store.counters
        sizes = {key: array.nbytes for key, (array, _) in self.model.items()}
        assert set(self.model) == {key for key in range(self.next) if key in self.store}
        assert len(self.store) == len(self.model)
        assert counters.resident <= min(counters.peak_resident, self.store.budget)
        assert counters.spilled <= counters.peak_spilled
        assert counters.lazy == sum(size for key, size in sizes.items() if key in self.lazy)
        assert counters.resident + counters.spilled + counters.lazy == sum(sizes.values())

    def teardown(self) -> None:
        for key, (array, _) in self.model.items():
            np.testing.assert_array_equal(self.store.get(key), array)
        self.store.close()


LikeADict.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestLikeADict = LikeADict.TestCase


def test_a_copy_without_memory_is_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have less memory than the budget."""
    array = np.arange(1000, dtype=np.float32)

    def refuse(self: TensorStore, array: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(TensorStore, "_copy", refuse)
    with TensorStore(budget="1 MB") as store:
        store.put("a", array, copy=True)
        assert (store.counters.resident, store.counters.spilled, store.counters.spills) == (0, array.nbytes, 1)
        np.testing.assert_array_equal(store.get("a"), array)


def test_from_many_threads() -> None:
    with TensorStore(2000) as store, ThreadPoolExecutor(4) as pool:

        def work(i: int) -> bool:
            store.put(i, np.full(100, i, np.float32), readers=2)
            return bool((store.get(i) == i).all() and (store.take(i) == i).all() and (store.take(i) == i).all())

        assert all(pool.map(work, range(300)))
        assert len(store) == 0
        assert (store.counters.resident, store.counters.spilled) == (0, 0)


def test_reads_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads inside the file at once: each waits there until the other has come."""
    meeting = threading.Barrier(2, timeout=10)
    read_at = SpillFile._read_at

    def met(self: SpillFile, start: int, left: memoryview) -> int:
        meeting.wait()
        return read_at(self, start, left)

    monkeypatch.setattr(SpillFile, "_read_at", met)
    with TensorStore(0) as store, ThreadPoolExecutor(2) as pool:
        store.put("a", np.full(10, 1.0))
        store.put("b", np.full(10, 2.0))
        found = list(pool.map(store.get, ["a", "b"]))
    np.testing.assert_array_equal(found, [np.full(10, 1.0), np.full(10, 2.0)])


def test_a_place_that_is_being_read_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released and overwritten while another thread reads it: the reader gets what it asked for."""
    read_at = SpillFile._read_at
    with TensorStore(0) as store:
        store.put("a", np.full(100, 1.0))

        def late(self: SpillFile, start: int, left: memoryview) -> int:
            store.release("a")
            store.put("b", np.full(100, 2.0))
            return read_at(self, start, left)

        monkeypatch.setattr(SpillFile, "_read_at", late)
        np.testing.assert_array_equal(store.get("a"), np.full(100, 1.0))
        monkeypatch.undo()
        store.put("c", np.full(100, 3.0))
        assert store._file is not None
        assert store._file.size == 2 * 4096, "the place of 'a' is free once it was read"
        np.testing.assert_array_equal(store.get("b"), np.full(100, 2.0))


def test_closed_is_closed(tmp_path: Path) -> None:
    store = TensorStore(0, folder=tmp_path)
    store.put("a", np.ones(10))
    assert store._file is not None
    file = store._file._file
    store.close()
    store.close()
    assert file.closed
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        store.get("a")


def test_forgotten_without_close(tmp_path: Path) -> None:
    store = TensorStore(0, folder=tmp_path)
    store.put("a", np.ones(10))
    assert store._file is not None
    file = store._file._file
    del store
    gc.collect()
    assert file.closed


@pytest.mark.skipif(sys.platform == "win32", reason="an open file has a name there")
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "raise SystemExit(3)", "1 / 0"])
def test_a_process_leaves_nothing_however_it_ends(how: str, tmp_path: Path) -> None:
    code = f"""
        import os, signal, tempfile, numpy as np
        from sbonnx.calib.storage.tensor_store import TensorStore
        assert tempfile.gettempdir() == {str(tmp_path)!r}
        store = TensorStore(0)
        store.put("a", np.ones(100000))
        assert store.counters.spilled == 800000
        {how}
    """
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True)
    assert done.returncode in (-9, 3, 1)
    assert b"AssertionError" not in done.stderr
    assert list(tmp_path.iterdir()) == []


class Full:
    """A device that is always full, with a file's manners."""

    def __init__(self) -> None:
        self.file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
        self.fileno, self.close = self.file.fileno, self.file.close


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.calib.storage.spill_file.tempfile.TemporaryFile", lambda **_: Full())
    with TensorStore(0) as store:
        with pytest.raises(OutputError, match=r"no room for 800 bytes.*No space left on device.*TMPDIR"):
            store.put("a", np.ones(100))
        assert "a" not in store
        assert store.counters.spilled == 0


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with (
        TensorStore(0, folder=tmp_path / "gone") as store,
        pytest.raises(OutputError, match=r"cannot be kept in '.*gone' \(No such file or directory\): point TMPDIR"),
    ):
        store.put("a", np.ones(100))
