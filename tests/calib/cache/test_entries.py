"""Entries that are damaged, foreign, not writable, or used by many processes, some of them killed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sbonnx.calib.cache.entries import HEADER, SKETCH, merge_folders, read_entry, write_entry
from sbonnx.calib.cache.sketch_cache import SketchKey
from sbonnx.errors import DataError, OutputError
from sbonnx.spec import Array
from tests.support.caching import KEYS, assert_same, complete, entry_of, files, one, opened, seen, small

ROOT = Path(__file__).resolve().parents[3]
SETUP = """
import sys
from pathlib import Path
from tests.support.caching import *
folder = Path(sys.argv[1])
"""
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")

ARRAYS = npst.arrays(
    st.sampled_from([np.int64, np.int16, np.uint8, np.float32, np.float64, np.bool_]), npst.array_shapes(min_dims=0)
) | npst.arrays(np.int64, npst.array_shapes(), elements=st.integers(0, 1 << 34))


WHAT = {"binding": "b", "key": ["t", 1]}


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(arrays=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4))
def test_any_arrays_are_stored_without_loss(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Array]) -> None:
    path = tmp_path_factory.mktemp("entry") / "e"
    write_entry(path, WHAT, arrays)
    found = read_entry(path, WHAT)
    assert found is not None and list(found) == list(arrays)
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes()
    assert read_entry(path, {**WHAT, "key": ["t", 2]}) is None


def test_counts_take_few_bytes(tmp_path: Path) -> None:
    arrays = seen(KEYS[1]).to_arrays()
    write_entry(tmp_path / "e", WHAT, arrays)
    assert (tmp_path / "e").stat().st_size < sum(values.nbytes for values in arrays.values()) / 2


@pytest.mark.parametrize(
    "layout",
    [
        "[" * 100_000,
        "{}",
        "[[1]]",
        '[["lo", "<f4", "<f4", [1000000000000]]]',
        '[["lo", "<U90000000", "<U1", [2]]]',
        '[["lo", "|O", "|O", [1]]]',
        '[["lo", "<f4", "<f4", [-1]]]',
    ],
    ids=lambda layout: layout[-40:],
)
def test_entries_that_sbonnx_did_not_write(layout: str, tmp_path: Path) -> None:
    """They are damaged as well, even if their checksums are correct."""
    cache = opened(tmp_path)
    identity = json.dumps(cache._entry(KEYS[0]))
    content = f"[{identity}, {layout}]\n".encode() + bytes(8)
    entry_of(tmp_path, KEYS[0]).write_bytes(hashlib.sha256(content).digest() + content)
    assert one(cache, KEYS[0]) is None and "1 damaged entries" in cache.notes[0]
    assert files(tmp_path) == [HEADER]


# --- damage --------------------------------------------------------------------------------------------------------


def test_the_entry_of_another_tensor_is_damage(tmp_path: Path) -> None:
    """Its checksum is right, and its range would be taken for that of the tensor that was asked for."""
    cache = opened(tmp_path)
    cache.save({key: seen(key) for key in KEYS})
    shutil.copy(entry_of(tmp_path, KEYS[0]), entry_of(tmp_path, KEYS[2]))
    again = opened(tmp_path)
    assert again.load([KEYS[0], KEYS[2]]) == {} and "1 damaged entries" in again.notes[0]
    assert_same(one(again, KEYS[0]), seen(KEYS[0]))


def test_a_damaged_header_is_written_again(tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    for content in (b"x", b"\xff", b"[]", b""):
        (tmp_path / HEADER).write_bytes(content)
        again = opened(tmp_path)
        assert "was damaged and is written again" in again.notes[0]
        assert_same(one(again, KEYS[0]), seen(KEYS[0]))
        assert not opened(tmp_path).notes
        with pytest.raises(DataError, match="differs in model"):
            opened(tmp_path, model_digest="cc" * 16)


def test_without_its_header_a_foreign_sketch_is_not_used(tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    (tmp_path / HEADER).unlink()
    assert one(opened(tmp_path, model_digest="cc" * 16), KEYS[0]) is None


@pytest.mark.parametrize("kept", [0, 1, 30, 500, -1])
def test_a_truncated_entry_is_replaced(kept: int, tmp_path: Path) -> None:
    opened(tmp_path).save({key: seen(key) for key in KEYS})
    path = entry_of(tmp_path, KEYS[1])
    path.write_bytes(path.read_bytes()[:kept])
    again = opened(tmp_path)
    assert again.load(KEYS) == {}
    (note,) = again.notes
    assert str(tmp_path) in note and "damaged" in note
    again.save({key: seen(key) for key in KEYS})
    healed = opened(tmp_path)
    assert len(healed.load(KEYS)) == len(KEYS) and not healed.notes


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_flipped_bits_never_give_wrong_values(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flip")
    cache = opened(folder)
    cache.save(small())
    cache.save_checkpoint(7, small(), "run")
    for _ in range(data.draw(st.integers(1, 3))):
        path = folder / data.draw(st.sampled_from(files(folder)))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
    try:
        again = opened(folder)
        found, checkpoint = again.load(small()), again.load_checkpoint("run")
        again.save(small())
        again.save_checkpoint(8, small(), "run")
    except (DataError, OutputError) as error:
        assert "calibration cache" in str(error)
        return
    for key, sketch in found.items():
        assert_same(sketch, small()[key])
    if checkpoint is not None:
        assert checkpoint[0] == 7 and checkpoint[1].keys() == small().keys()
        for key, sketch in checkpoint[1].items():
            assert_same(sketch, small()[key])


def test_other_files_stay(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".photo.tmp").write_text("mine too")
    assert opened(tmp_path).load_checkpoint("x") is None
    assert files(tmp_path) == [".photo.tmp", HEADER, "notes.txt"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@POSIX
def test_a_full_disk_leaves_the_earlier_contents(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.save({KEYS[0]: seen(KEYS[0])})
    before = files(tmp_path)
    with largest_file(1000):
        with pytest.raises(OutputError, match="cannot be written: "):
            cache.save({KEYS[1]: seen(KEYS[1])})
        with pytest.raises(OutputError, match="cannot be written: "):
            cache.save_checkpoint(1, {KEYS[1]: seen(KEYS[1])}, "run")
    assert set(opened(tmp_path).load(KEYS)) == {KEYS[0]} and files(tmp_path) == before
    cache.save({KEYS[1]: seen(KEYS[1])})
    assert set(opened(tmp_path).load(KEYS)) == set(KEYS[:2])


@POSIX
def test_a_new_folder_without_a_header_is_removed(tmp_path: Path) -> None:
    """An existing folder stays."""
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        with largest_file(0), pytest.raises(OutputError, match="cannot be written: "):
            opened(tmp_path / name)
    assert files(tmp_path) == ["old"] and files(tmp_path / "old") == []


@POSIX
@pytest.mark.parametrize("suffix", [HEADER, SKETCH])
def test_special_files_are_not_waited_for(suffix: str, tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    (path,) = tmp_path.glob(f"*{suffix}")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="cannot be read: it is a FIFO"):
        opened(tmp_path).load(KEYS)
    assert path.exists()


@POSIX
def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """At once, and not those of a process that is alive, however old they are."""
    import fcntl

    opened(tmp_path)
    paths = [tmp_path / f".{name}-0123{SKETCH}.89abcdef.tmp" for name in ("dead", "alive")]
    for path in paths:
        path.touch()
    os.utime(paths[1], (time.time() - 7200,) * 2)
    with paths[1].open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        opened(tmp_path)
        assert [name.split("-")[0] for name in files(tmp_path)] == [".alive", HEADER]
    opened(tmp_path)
    assert files(tmp_path) == [HEADER]


@POSIX
def test_without_locks_unfinished_files_are_removed_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    for name, age in (("old", 7200), ("new", 10)):
        path = tmp_path / f".{name}-0123{SKETCH}.89abcdef.tmp"
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    opened(tmp_path)
    assert [name.split("-")[0] for name in files(tmp_path) if name.startswith(".")] == [".new"]
    assert one(opened(tmp_path), KEYS[0]) is not None


# --- several caches ------------------------------------------------------------------------------------------------


def test_parts_are_merged(tmp_path: Path) -> None:
    """A sketch that a part lacks is left out; existing sketches stay."""
    parts = [tmp_path / name for name in "ab"]
    for part, keys in zip(parts, (KEYS, KEYS[1:]), strict=True):
        opened(part).save({key: seen(key) for key in keys})
    whole = tmp_path / "whole"
    merge_folders(parts, whole)
    assert set(opened(whole).load(KEYS)) == set(KEYS[1:])
    expected = seen(KEYS[1])
    expected.merge(seen(KEYS[1]))
    assert_same(one(opened(whole), KEYS[1]), expected)
    before = complete(whole)
    merge_folders(parts, whole)
    assert complete(whole) == before
    for path in parts[0].glob(f"*{SKETCH}"):
        path.write_bytes(b"damaged")
    merge_folders(parts, tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- several processes ---------------------------------------------------------------------------------------------


def child(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `code` after `SETUP`."""
    command = [sys.executable, "-c", SETUP + textwrap.dedent(code), str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_on_one_folder(tmp_path: Path) -> None:
    """Four write and read at once; each finds all of its sketches."""
    code = """
    mine = [SketchKey(f"{sys.argv[2]}-{number}") for number in range(24)]
    cache = opened(folder)
    for number, key in enumerate(mine):
        cache.save({key: seen(key, samples=1, values=8), KEYS[number % 3]: seen(KEYS[number % 3])})
        cache.save_checkpoint(number, {key: seen(key)}, sys.argv[2])
        if number % 5 == 0:
            assert one(opened(folder), key) is not None, key
            assert opened(folder).load_checkpoint(sys.argv[2])[0] == number
    assert not cache.notes, cache.notes
    """
    running = [child(code, tmp_path / "c", name) for name in "abcd"]
    assert [process.wait(60) for process in running] == [0, 0, 0, 0]
    cache = opened(tmp_path / "c")
    assert not cache.notes and len(complete(tmp_path)) == 4 * 24 + 3
    for name in "abcd":
        key = SketchKey(f"{name}-23")
        assert_same(one(cache, key), seen(key, samples=1, values=8))
    for key in KEYS:
        assert_same(one(cache, key), seen(key))
    assert not [name for name in files(tmp_path / "c") if name.endswith(".tmp")]


@pytest.mark.slow
@POSIX
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL while entries are written: all confirmed ones are there and correct."""
    code = """
    made = {key: seen(key, samples=1, values=40_000) for key in KEYS}
    cache = opened(folder)
    number = 0
    while True:
        number += 1
        key = SketchKey(f"{sys.argv[2]}-{number}")
        cache._stored.clear()
        cache.save({**made, key: seen(key, samples=1, values=8)})
        print(number, flush=True)
        cache.save_checkpoint(number, made, "run")
    """
    rng, confirmed = random.Random(0), {}
    for attempt in range(8):
        process = child(code, tmp_path / "c", str(attempt))
        assert process.stdout is not None
        confirmed[attempt] = int(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        confirmed[attempt] = max([confirmed[attempt], *map(int, process.stdout.read().split())])
        process.wait()
        cache = opened(tmp_path / "c")
        assert not cache.notes
        for key in KEYS:
            assert_same(one(cache, key), seen(key, samples=1, values=40_000))
        for run, numbers in confirmed.items():
            assert all(one(cache, SketchKey(f"{run}-{number}")) for number in range(1, numbers + 1))
        found = cache.load_checkpoint("run")
        if found is not None:
            assert_same(found[1][KEYS[0]], seen(KEYS[0], samples=1, values=40_000))
    assert opened(tmp_path / "c").load_checkpoint("run") is not None
