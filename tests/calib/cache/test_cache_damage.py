"""Damaged, foreign and unwritable files of the cache: left out with a note, never wrong numbers."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.cache.sketch_files import CHECK_DIGITS, load_packed
from sbonnx.errors import DataError, OutputError
from tests.calib.cache.caching import KEYS, assert_same, files, opened, seen, small


def test_a_damaged_header_is_made_anew(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    path = tmp_path / "cache.json"
    for content in (b"", path.read_bytes()[:40], b"\xff\x00"):
        path.write_bytes(content)
        again = opened(tmp_path)
        assert "was damaged and is made anew" in again.notes[0]
        assert_same(again.get(KEYS[0]), seen(KEYS[0]))
        assert not opened(tmp_path).notes


def test_without_its_header_a_foreign_sketch_is_not_taken(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    (tmp_path / "cache.json").unlink()
    other = opened(tmp_path, model_digest="cc" * 16)
    assert other.get(KEYS[0]) is None and len(other) == 0


@pytest.mark.parametrize("kept", [0, 1, 30, 500, -1])
def test_a_file_cut_short_is_left_out_and_healed(kept: int, tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    before = set(files(tmp_path))
    cache.put(KEYS[1], seen(KEYS[1]))
    cache.flush()
    (name,) = set(files(tmp_path)) - before
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:kept])
    again = opened(tmp_path)
    assert again.get(KEYS[1]) is None
    assert_same(again.get(KEYS[0]), seen(KEYS[0]))
    assert len(again.notes) == 1 and str(path) in again.notes[0] and "was damaged" in again.notes[0]
    again.put(KEYS[1], seen(KEYS[1]))
    again.flush()
    healed = opened(tmp_path)
    assert_same(healed.get(KEYS[1]), seen(KEYS[1]))
    assert not healed.notes and len(files(tmp_path)) == 2


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_flipped_bit_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flip")
    cache = opened(folder)
    for key, sketch in small().items():
        cache.put(key, sketch)
    cache.flush()
    cache.save_partial(7, small(), "plan")
    path = folder / data.draw(st.sampled_from(files(folder)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    again = opened(folder)
    partial = again.load_partial("plan")
    assert len(again.notes) == 1
    if path.name.startswith("partial"):
        assert partial is None and len(again) == 3
    else:
        assert partial is not None and len(again) == 0


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    binding = cache._binding[:12]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"partial-{binding}-x.bin").write_text("what is this")
    (tmp_path / ".photo.tmp").write_text("mine too")
    cache.clear_partial()
    again = opened(tmp_path)
    assert again.load_partial("x") is None
    assert {"notes.txt", ".photo.tmp", f"partial-{binding}-x.bin"} == set(files(tmp_path))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    cache = opened(tmp_path)
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    cache.put(KEYS[1], seen(KEYS[1]))

    def refuse(source: Any, target: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(OutputError, match=os.strerror(code)):
            cache.flush()
        with pytest.raises(OutputError, match=os.strerror(code)):
            cache.save_partial(1, {}, "plan")
    assert len(files(tmp_path)) == 1 and len(opened(tmp_path)) == 1
    cache.flush()
    assert len(opened(tmp_path)) == 2, "what could not be written is not forgotten"


@pytest.mark.parametrize("name", ["cache.json", "sketches", ".sketches-x.tmp"])
def test_special_files_are_not_waited_for(name: str, tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    path = tmp_path / (name if "." in name else files(tmp_path)[0])
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if path.suffix == ".tmp":
        assert_same(opened(tmp_path).get(KEYS[0]), seen(KEYS[0]))
    else:
        with pytest.raises(DataError, match="cannot be read: it is a FIFO"):
            opened(tmp_path)
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "{}",
        '{"format": 1, "head": {}}',
        '{"format": 1, "head": {}, "entries": [[1]]}',
        '{"format": 1, "head": {}, "entries": [["k", [["lo", "<f4", "<f4", [1000000000000]]], 8]]}',
        '{"format": 1, "head": {}, "entries": [["k", [["lo", "<U90000000", "<U1", [2]]], 8]]}',
        '{"format": 1, "head": {}, "entries": [["k", [["lo", "|O", "|O", [1]]], 8]]}',
        '{"format": 1, "head": {}, "entries": [["k", [["lo", "<f4", "<f4", [-1]]], 8]]}',
    ],
    ids=lambda content: content[-40:],
)
def test_content_that_sbonnx_did_not_write(content: str, tmp_path: Path) -> None:
    """Damaged as well, though its digest is right."""
    data = content.encode() + b"\n" + bytes(8)
    path = tmp_path / f"sketches-x-{hashlib.sha256(data).hexdigest()[:CHECK_DIGITS]}.bin"
    path.write_bytes(data)
    assert load_packed(path) is None


def test_a_deep_header_is_damaged(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "cache.json").write_text("[" * 100_000)
    assert "was damaged and is made anew" in opened(tmp_path).notes[0]


def test_a_new_folder_without_its_header_goes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was there stays."""
    (tmp_path / "old").mkdir()
    monkeypatch.setattr("sbonnx.calib.cache.sketch_cache.write_whole", raising)
    for name in ("old", "new"):
        with pytest.raises(OutputError, match="no room"):
            opened(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def raising(*_: object) -> None:
    raise OutputError("no room")
