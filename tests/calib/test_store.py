"""TensorStore: what comes out is what went in, memory stays in its budget, nothing stays on disk."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.store import TensorStore, parse_size
from sbonnx.errors import OutputError, RecipeError

ROOT = Path(__file__).resolve().parents[2]


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


def test_freed_places_are_used_again() -> None:
    with TensorStore(0) as store:
        for i in range(100):
            store.put(i, np.full(256, i, np.float32))
            if i:
                store.release(i - 1)
        assert store._end == 2 * 1024
        np.testing.assert_array_equal(store.get(99), np.full(256, 99, np.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 3)), max_size=40), st.integers(0, 400))
def test_like_a_dict(steps: list[tuple[int, int, int]], budget: int) -> None:
    """Any order of puts and releases: what a plain dict with counts would hold, and never more than the budget."""
    model: dict[int, list[Any]] = {}
    with TensorStore(budget) as store:
        for key, length, readers in steps:
            if key in model:
                store.release(key)
                model[key][1] -= 1
                if not model[key][1]:
                    del model[key]
            else:
                model[key] = [np.full(length, key, np.float32), readers]
                store.put(key, model[key][0], readers=readers)
            assert store.counters.resident <= budget
            assert store.counters.resident + store.counters.spilled == sum(a.nbytes for a, _ in model.values())
        assert len(store) == len(model)
        for key, (array, _) in model.items():
            np.testing.assert_array_equal(store.get(key), array)


def test_from_many_threads() -> None:
    with TensorStore(2000) as store, ThreadPoolExecutor(4) as pool:

        def work(i: int) -> bool:
            store.put(i, np.full(100, i, np.float32))
            return bool((store.take(i) == i).all())

        assert all(pool.map(work, range(300)))
        assert len(store) == 0


def test_closed_is_closed(tmp_path: Path) -> None:
    store = TensorStore(0, folder=tmp_path)
    store.put("a", np.ones(10))
    file = store._file
    assert file is not None
    store.close()
    store.close()
    assert file.closed
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        store.get("a")


def test_forgotten_without_close(tmp_path: Path) -> None:
    store = TensorStore(0, folder=tmp_path)
    store.put("a", np.ones(10))
    file = store._file
    assert file is not None
    del store
    gc.collect()
    assert file.closed


@pytest.mark.skipif(sys.platform == "win32", reason="an open file has a name there")
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
        import os, signal, numpy as np
        from sbonnx.calib.store import TensorStore
        store = TensorStore(0, folder={str(tmp_path)!r})
        store.put("a", np.ones(100000))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    with (
        TensorStore(0) as store,
        pytest.raises(OutputError, match=r"no room for 800 bytes.*No space left on device.*TMPDIR"),
    ):
        store.put("a", np.ones(100))
