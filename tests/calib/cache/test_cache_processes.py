"""Many files and many processes on one cache, some of them killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from sbonnx.calib.cache import sketch_files
from sbonnx.calib.cache.sketch_cache import MERGE_AT, SketchKey
from tests.calib.cache.caching import KEYS, assert_same, files, opened, seen

ROOT = Path(__file__).resolve().parents[3]
SETUP = """
import sys
from pathlib import Path
from sbonnx.calib.cache.sketch_cache import MERGE_AT
from tests.calib.cache.caching import *
folder = Path(sys.argv[1])
"""
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")


def test_files_are_merged(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    for number in range(5 * MERGE_AT):
        key = SketchKey(f"t{number}")
        cache.put(key, seen(key, samples=1, values=8))
        cache.flush()
        assert len(files(tmp_path)) <= MERGE_AT
        cache.flush()
    again = opened(tmp_path)
    for number in range(5 * MERGE_AT):
        key = SketchKey(f"t{number}")
        assert_same(again.get(key), seen(key, samples=1, values=8))


def test_a_file_that_is_merged_under_a_readers_hands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = opened(tmp_path)
    for number in range(MERGE_AT):
        key = SketchKey(f"t{number}")
        writer.put(key, seen(key, samples=1, values=8))
        writer.flush()
    load = sketch_files.load_packed
    merged: list[Path] = []

    def load_late(path: Path) -> Any:
        if not merged:  # between the listing of the folder and the reading of its first file
            merged.append(path)
            writer.put(SketchKey("last"), seen(SketchKey("last"), samples=1, values=8))
            writer.flush()
        return load(path)

    monkeypatch.setattr("sbonnx.calib.cache.sketch_cache.load_packed", load_late)
    reader = opened(tmp_path)
    assert len(files(tmp_path)) == 1 and len(reader) == MERGE_AT + 1 and not reader.notes


def child(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `code` after `SETUP`."""
    command = [sys.executable, "-c", SETUP + textwrap.dedent(code), str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_side_by_side(tmp_path: Path) -> None:
    """Four write, merge and read one folder at once; each finds all of its own and nothing else."""
    code = """
    mine = [SketchKey(f"{sys.argv[2]}-{number}") for number in range(3 * MERGE_AT)]
    cache = opened(folder)
    for number, key in enumerate(mine):
        cache.put(key, seen(key, samples=1, values=8))
        cache.put(KEYS[number % 3], seen(KEYS[number % 3]))
        cache.flush()
        cache.save_partial(number, {key: seen(key)}, sys.argv[2])
        if number % 5 == 0:
            assert opened(folder).get(key) is not None, key
            assert opened(folder).load_partial(sys.argv[2])[0] == number
    assert not cache.notes, cache.notes
    """
    running = [child(code, tmp_path / "c", name) for name in "abcd"]
    assert [process.wait(60) for process in running] == [0, 0, 0, 0]
    cache = opened(tmp_path / "c")
    assert not cache.notes and len(cache) == 4 * 3 * MERGE_AT + 3
    for name in "abcd":
        key = SketchKey(f"{name}-{3 * MERGE_AT - 1}")
        assert_same(cache.get(key), seen(key, samples=1, values=8))
    for key in KEYS[:3]:
        assert_same(cache.get(key), seen(key))
    assert not [name for name in files(tmp_path / "c") if name.endswith(".tmp")]


@POSIX
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """kill -9 while files are written: what is there is right, what was is still there, no temporary file stays."""
    code = """
    made = {key: seen(key, samples=1, values=40_000) for key in KEYS}
    cache = opened(folder)
    number = 0
    while True:
        number += 1
        for key, sketch in made.items():
            cache.put(key, sketch)
        key = SketchKey(f"{sys.argv[2]}-{number}")
        cache.put(key, seen(key, samples=1, values=8))
        cache.flush()
        print(number, flush=True)
        cache.save_partial(number, made, "plan")
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
        assert not cache.notes and not [name for name in files(tmp_path / "c") if name.endswith(".tmp")]
        for key in KEYS:
            assert_same(cache.get(key), seen(key, samples=1, values=40_000))
        for run, numbers in confirmed.items():
            assert all(cache.get(SketchKey(f"{run}-{number}")) for number in range(1, numbers + 1))
        found = cache.load_partial("plan")
        if found is not None:
            assert_same(found[1][KEYS[0]], seen(KEYS[0], samples=1, values=40_000))
    assert opened(tmp_path / "c").load_partial("plan") is not None


@POSIX
def test_temporary_files_of_the_dead_are_removed_and_of_the_living_not(tmp_path: Path) -> None:
    code = """
    import os, time
    from sbonnx.calib.cache import sketch_files
    def pieces():
        yield b"half of it"
        print("writing", flush=True)
        time.sleep(float(sys.argv[2]))
        if sys.argv[3] == "dies":
            os.kill(os.getpid(), 9)
    sketch_files.write_whole(folder / "sketches-x-y.bin", pieces())
    """
    opened(tmp_path)
    dead = child(code, tmp_path, "0", "dies")
    assert dead.wait(30) == -signal.SIGKILL
    assert [name.endswith(".tmp") for name in files(tmp_path)] == [True]
    alive = child(code, tmp_path, "1.0", "lives")
    assert alive.stdout is not None and alive.stdout.readline() == "writing\n"
    assert len(files(tmp_path)) == 2
    opened(tmp_path)
    (left,) = files(tmp_path)
    assert left.endswith(".tmp")
    assert alive.wait(30) == 0 and files(tmp_path) == ["sketches-x-y.bin"]
