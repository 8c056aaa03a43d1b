"""SpillFile: places that never overlap, a file that goes with its process, rates that are measured."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.storage import spill_file as spill
from sbonnx.calib.storage.spill_file import PAGE, SpillFile, file_system, spill_folder, sweep
from sbonnx.errors import OutputError


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE), st.integers(0, 99)), max_size=40))
def test_places_hold_what_was_written(steps: list[tuple[bool, int, int]]) -> None:
    """Any order of writes and frees against a dict; the file is never longer than its live places ever were."""
    held: dict[int, Any] = {}
    pages = peak = 0
    file = SpillFile()
    for number, (add, size, pick) in enumerate(steps):
        if add or not held:
            array = np.full(size, number % 251, np.uint8)
            start = file.write(array)
            assert start % PAGE == 0
            held[number] = (start, array)
            pages += -(-size // PAGE)
        else:
            start, array = held.pop(sorted(held)[pick % len(held)])
            file.free(start, array.size)
            pages -= -(-array.size // PAGE)
        peak = max(peak, pages)
        for start, array in held.values():
            np.testing.assert_array_equal(file.read(start, array.size), array)
    assert file.size >= pages * PAGE
    for start, array in held.values():
        file.free(start, array.size)
    assert file.size == 0, "gaps that touch are one, and the last one is the end"
    file.close()


def test_equal_sizes_never_leave_gaps() -> None:
    file = SpillFile()
    for _ in range(100):
        starts = [file.write(np.zeros(3 * PAGE, np.uint8)) for _ in range(3)]
        for start in starts:
            file.free(start, 3 * PAGE)
    assert file.size == 0
    first = file.write(np.zeros(3 * PAGE, np.uint8))
    file.write(np.zeros(PAGE, np.uint8))
    file.free(first, 3 * PAGE)
    assert file.write(np.zeros(2 * PAGE, np.uint8)) == first
    assert file.write(np.zeros(PAGE, np.uint8)) == first + 2 * PAGE
    assert file.size == 4 * PAGE
    file.close()


def test_rates_are_assumed_then_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 0.5)  # reads and writes take half a second each
    file = SpillFile()
    block = np.zeros(4 << 20, np.uint8)
    start = file.write(block)
    file.read(start, block.size)
    assert (file.write_rate, file.read_rate) == (spill.WRITE_RATE, spill.READ_RATE)
    file.write(block)
    file.read(start, block.size)
    assert (file.write_rate, file.read_rate) == (8 << 20, 8 << 20)
    file.close()


def test_a_file_cut_short_is_one_line() -> None:
    file = SpillFile()
    start = file.write(np.ones(100, np.uint8))
    os.ftruncate(file._file.fileno(), 10)
    with pytest.raises(OutputError, match="was cut short: point TMPDIR"):
        file.read(start, 100)
    file.close()


def test_closing_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile()
    start = file.write(np.arange(100, dtype=np.uint8))
    read_at = SpillFile._read_at

    def closed_meanwhile(self: SpillFile, where: int, left: memoryview) -> int:
        file.close()
        assert not file._file.closed
        return read_at(self, where, left)

    monkeypatch.setattr(SpillFile, "_read_at", closed_meanwhile)
    np.testing.assert_array_equal(file.read(start, 100), np.arange(100, dtype=np.uint8))
    assert file._file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(start, 100)


@pytest.mark.parametrize("missing", ["preadv", "pwrite"])
def test_where_the_system_reads_only_at_its_own_position(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"sbonnx.calib.storage.spill_file.os.{missing}", raising=False)
    file = SpillFile()
    arrays = [np.full(5000, i, np.uint8) for i in range(3)]
    starts = [file.write(array) for array in arrays]
    for start, array in zip(starts, arrays, strict=True):
        np.testing.assert_array_equal(file.read(start, 5000), array)
    file.close()


def test_stale_files_are_swept_and_others_are_not(tmp_path: Path) -> None:
    for name in ("sbonnx-spill-old", "sbonnx-spill-new", "other-old"):
        (tmp_path / name).write_bytes(b"x")
        if name.endswith("old"):
            os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    (tmp_path / "sbonnx-spill-link").symlink_to("other-old")
    os.utime(tmp_path / "sbonnx-spill-link", (0, 0), follow_symlinks=False)
    sweep(tmp_path)
    left = ["other-old", "sbonnx-spill-link", "sbonnx-spill-new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    (tmp_path / "sbonnx-spill-old").write_bytes(b"x")
    os.utime(tmp_path / "sbonnx-spill-old", (0, 0))
    SpillFile(tmp_path).close()
    assert not (tmp_path / "sbonnx-spill-old").exists()


MOUNTS = """\
/dev/sda / ext4 rw 0 0
tmpfs {place} tmpfs rw 0 0
/dev/sdb {place}/with\\040space xfs rw 0 0
"""


def test_the_kind_of_file_system(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text(MOUNTS.format(place=tmp_path))
    assert file_system(tmp_path.parent, table) == "ext4"
    assert file_system(tmp_path / "deep", table) == "tmpfs"
    assert file_system(tmp_path / "with space" / "x", table) == "xfs"
    assert file_system(tmp_path, tmp_path / "nowhere") is None


def test_a_temporary_folder_in_memory_is_no_place_to_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    usual = Path(tempfile.gettempdir())
    kinds = {usual: "tmpfs", Path("/var/tmp"): "ext4"}
    monkeypatch.setattr(spill, "file_system", kinds.get)
    assert spill_folder() == Path("/var/tmp")
    kinds[Path("/var/tmp")] = "tmpfs"
    assert spill_folder() == usual
    kinds[Path("/var/tmp")] = "ext4"
    monkeypatch.setenv("TMPDIR", str(usual))
    assert spill_folder() == usual
