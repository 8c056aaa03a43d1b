"""Databases of sketches that are damaged, foreign, not writable, or used by many processes, some of them killed."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
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

from sbonnx.calib.cache.sketch_cache import SketchKey
from sbonnx.calib.cache.sketch_database import (
    DATABASE,
    SketchRow,
    copy_database,
    merge_databases,
    pack,
    put_rows,
    unpack,
    writing,
)
from sbonnx.errors import DataError, OutputError
from sbonnx.spec import Array
from tests.calib.cache.caching import KEYS, assert_same, complete, files, one, opened, seen, small

ROOT = Path(__file__).resolve().parents[3]
SETUP = """
import sys
from pathlib import Path
from tests.calib.cache.caching import *
folder = Path(sys.argv[1])
"""
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")

ARRAYS = npst.arrays(
    st.sampled_from([np.int64, np.int16, np.uint8, np.float32, np.float64, np.bool_]), npst.array_shapes(min_dims=0)
) | npst.arrays(np.int64, npst.array_shapes(), elements=st.integers(0, 1 << 34))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4))
def test_any_arrays_are_packed_without_loss(arrays: dict[str, Array]) -> None:
    found = unpack(*pack(arrays))
    assert list(found) == list(arrays)
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes()


def test_counts_take_few_bytes() -> None:
    arrays = seen(KEYS[1]).to_arrays()
    assert len(pack(arrays)[1]) < sum(values.nbytes for values in arrays.values()) / 2


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
def test_rows_that_sbonnx_did_not_write(layout: str, tmp_path: Path) -> None:
    """They are damaged as well, even if their checksums are correct."""
    cache = opened(tmp_path)
    row = SketchRow(cache.binding, "", 0, 1, json.dumps(KEYS[0]), layout, bytes(8))
    with writing(tmp_path / DATABASE, "") as db:
        put_rows(db, [row])
    assert one(cache, KEYS[0]) is None and "1 damaged entries" in cache.notes[0]


# --- damage --------------------------------------------------------------------------------------------------------


def test_a_damaged_header_is_written_again(tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    for change in ("UPDATE identity SET content = 'x'", "UPDATE identity SET content = x'ff'", "DELETE FROM identity"):
        db = sqlite3.connect(tmp_path / DATABASE)
        db.execute(change)
        db.commit()
        db.close()
        again = opened(tmp_path)
        assert "was damaged and is written again" in again.notes[0]
        assert_same(one(again, KEYS[0]), seen(KEYS[0]))
        assert not opened(tmp_path).notes
        with pytest.raises(DataError, match="differs in model"):
            opened(tmp_path, model_digest="cc" * 16)


def test_without_its_header_a_foreign_sketch_is_not_used(tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    db = sqlite3.connect(tmp_path / DATABASE)
    db.execute("DELETE FROM identity")
    db.commit()
    db.close()
    assert one(opened(tmp_path, model_digest="cc" * 16), KEYS[0]) is None


@pytest.mark.parametrize("kept", [0, 1, 30, 500, 5000, -1])
def test_a_truncated_database_is_replaced(kept: int, tmp_path: Path) -> None:
    opened(tmp_path).save({key: seen(key) for key in KEYS})
    path = tmp_path / DATABASE
    path.write_bytes(path.read_bytes()[:kept])
    again = opened(tmp_path)
    found = again.load(KEYS)
    for key, sketch in found.items():
        assert_same(sketch, seen(key))
    if kept > 1 and len(found) < len(KEYS):
        (note,) = again.notes
        assert str(path) in note and "damaged" in note
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
    content = bytearray((folder / DATABASE).read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.sampled_from(used))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / DATABASE).write_bytes(content)
    try:
        again = opened(folder)
        found, checkpoint = again.load(small()), again.load_checkpoint("run")
        again.save(small())
        again.save_checkpoint(8, small(), "run")
    except (DataError, OutputError) as error:
        assert DATABASE in str(error) or "calibration cache" in str(error)
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
    assert files(tmp_path) == [".photo.tmp", "notes.txt", DATABASE]


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
    with largest_file((tmp_path / DATABASE).stat().st_size):
        with pytest.raises(OutputError, match="cannot be written: "):
            cache.save({KEYS[1]: seen(KEYS[1])})
        with pytest.raises(OutputError, match="cannot be written: "):
            cache.save_checkpoint(1, {KEYS[1]: seen(KEYS[1])}, "run")
    assert set(opened(tmp_path).load(KEYS)) == {KEYS[0]} and files(tmp_path) == [DATABASE]
    cache.save({KEYS[1]: seen(KEYS[1])})
    assert set(opened(tmp_path).load(KEYS)) == set(KEYS[:2])


@POSIX
@pytest.mark.parametrize("size", [0, 4096])
def test_a_new_folder_without_a_database_is_removed(size: int, tmp_path: Path) -> None:
    """An existing folder stays."""
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        with largest_file(size), pytest.raises(OutputError, match="cannot be written: "):
            opened(tmp_path / name)
    assert files(tmp_path) == ["old"] and files(tmp_path / "old") == []


@pytest.mark.parametrize("name", [DATABASE, f"{DATABASE}-journal"])
def test_special_files_are_not_waited_for(name: str, tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read: it is a FIFO"):
        opened(tmp_path)
    assert (tmp_path / name).exists()


# --- several databases ---------------------------------------------------------------------------------------------


def test_parts_are_merged(tmp_path: Path) -> None:
    """A sketch that a part lacks is left out; existing sketches stay."""
    parts = [tmp_path / name for name in "ab"]
    for part, keys in zip(parts, (KEYS, KEYS[1:]), strict=True):
        opened(part).save({key: seen(key) for key in keys})
    whole = tmp_path / "whole" / DATABASE
    merge_databases([part / DATABASE for part in parts], whole)
    assert {key for _, _, key in complete(tmp_path / "whole")} == {json.dumps(key) for key in KEYS[1:]}
    expected = seen(KEYS[1])
    expected.merge(seen(KEYS[1]))
    assert_same(one(opened(tmp_path / "whole"), KEYS[1]), expected)
    before = whole.read_bytes()
    merge_databases([part / DATABASE for part in parts], whole)
    assert whole.read_bytes() == before
    (parts[0] / DATABASE).write_bytes(b"damaged")
    merge_databases([part / DATABASE for part in parts], tmp_path / "none" / DATABASE)
    assert not (tmp_path / "none").exists()


def test_a_copy_adds_rows(tmp_path: Path) -> None:
    for name, keys in (("a", KEYS[:2]), ("b", KEYS[1:])):
        opened(tmp_path / name).save({key: seen(key) for key in keys})
    copy_database(tmp_path / "a" / DATABASE, tmp_path / "b" / DATABASE)
    copy_database(tmp_path / "a" / DATABASE, tmp_path / "new" / DATABASE)
    assert set(opened(tmp_path / "b").load(KEYS)) == set(KEYS)
    assert complete(tmp_path / "new") == complete(tmp_path / "a")
    (tmp_path / "b" / DATABASE).write_bytes(b"damaged")
    copy_database(tmp_path / "a" / DATABASE, tmp_path / "b" / DATABASE)
    assert complete(tmp_path / "b") == complete(tmp_path / "a")
    copy_database(tmp_path / "absent" / DATABASE, tmp_path / "b" / DATABASE)


# --- several processes ---------------------------------------------------------------------------------------------


def child(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `code` after `SETUP`."""
    command = [sys.executable, "-c", SETUP + textwrap.dedent(code), str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_on_one_database(tmp_path: Path) -> None:
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
    assert files(tmp_path / "c") == [DATABASE]


@pytest.mark.slow
@POSIX
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL while rows are written: all confirmed rows are there and correct. The next write removes a journal."""
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
    cache.save({SketchKey("last"): seen(SketchKey("last"))})
    assert files(tmp_path / "c") == [DATABASE]
