"""The cache returns what was stored, or nothing; the cache of another model or of other data is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from sbonnx.calib.cache.entries import CHECKPOINT, HEADER
from sbonnx.calib.cache.sketch_cache import SketchKey, run_key
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError, OutputError
from tests.support.caching import (
    IDENTITY,
    KEYS,
    SETTINGS,
    assert_same,
    checkpoints,
    complete,
    everything,
    files,
    one,
    opened,
    seen,
)

# --- round trip ----------------------------------------------------------------------------------------------------


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    opened(tmp_path / "c").save(everything())
    again = opened(tmp_path / "c")
    found = again.load([*everything(), SketchKey("unknown")])
    assert found.keys() == everything().keys() and not again.notes
    for key, sketch in everything().items():
        assert_same(found[key], sketch)


@pytest.mark.parametrize("key", [*KEYS, SketchKey("raw")])
def test_a_restored_sketch_continues_as_if_uninterrupted(key: SketchKey, tmp_path: Path) -> None:
    straight = seen(key, samples=6)
    opened(tmp_path / "c").save_checkpoint(4, {key: seen(key)}, "run")
    found = opened(tmp_path / "c").load_checkpoint("run")
    assert found is not None and found[0] == 4
    resumed = found[1][key]
    assert_same(resumed, seen(key))
    rng = np.random.default_rng([0, *key.tensor.encode()])
    data = [rng.standard_normal((1, 4, 1500)).astype(np.float32) for _ in range(6)]
    for index in (4, 5):
        resumed.observe(data[index], index)
    assert_same(resumed, straight)


def test_each_load_returns_a_copy(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    cache.save({KEYS[0]: seen(KEYS[0])})
    first = one(cache, KEYS[0])
    assert first is not None
    first.observe(np.full(9, 100, np.float32))
    assert_same(one(cache, KEYS[0]), seen(KEYS[0]))


def test_a_sketch_under_a_wrong_key(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    for sketch in (Sketch(track=True), Sketch(axis=1), Sketch(axis=1, detail="range", track=True)):
        with pytest.raises(ValueError, match="under the key"):
            cache.save({SketchKey("t", 1): sketch})
        with pytest.raises(ValueError, match="under the key"):
            cache.save_checkpoint(1, {SketchKey("t", 1): sketch}, "run")


# --- identity of a cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"model": "n.onnx", "model_digest": "cc" * 16}, "which differs in model:"),
        ({"data": "the list", "data_digest": "dd" * 16}, "which differs in data:"),
        ({"model_digest": "cc" * 16, "data_digest": "dd" * 16}, "which differs in model and data:"),
    ],
)
def test_the_cache_of_another_model_or_data_is_refused_by_name(
    tmp_path: Path, other: dict[str, str], differ: str
) -> None:
    opened(tmp_path / "c").save({KEYS[0]: seen(KEYS[0])})
    with pytest.raises(DataError, match="was made from") as caught:
        opened(tmp_path / "c", SETTINGS, **other)
    identity = {**IDENTITY, **other}
    text = str(caught.value)
    assert f"'{tmp_path / 'c'}'" in text and differ in text and text.count("\n") == 0
    assert "from model 'm.onnx' (digest aaaaaaaaaaaa) and data folder 'calib' (digest bbbbbbbbbbbb)" in text
    assert f"not from model '{identity['model']}' (digest {identity['model_digest'][:12]})" in text
    assert "name another folder, or delete it" in text
    assert_same(one(opened(tmp_path / "c"), KEYS[0]), seen(KEYS[0]))


def test_a_renamed_model_is_the_same(tmp_path: Path) -> None:
    opened(tmp_path / "c")
    assert not opened(tmp_path / "c", model="copy.onnx", data="the list").notes


def test_other_settings_have_separate_sketches(tmp_path: Path) -> None:
    opened(tmp_path / "c").save({KEYS[0]: seen(KEYS[0])})
    newer = opened(tmp_path / "c", {**SETTINGS, "onnxruntime": "1.32.0"})
    assert one(newer, KEYS[0]) is None
    assert len(newer.notes) == 1 and "no sketches yet of onnxruntime 1.32.0 (there: 1.31.1)" in newer.notes[0]
    newer.save({KEYS[0]: seen(KEYS[0], seed=1)})
    newer.save_checkpoint(1, {KEYS[0]: seen(KEYS[0])}, "run")
    assert_same(one(opened(tmp_path / "c"), KEYS[0]), seen(KEYS[0]))
    again = opened(tmp_path / "c", {"device": "cpu", "onnxruntime": "1.32.0"})
    assert_same(one(again, KEYS[0]), seen(KEYS[0], seed=1))
    assert not again.notes and opened(tmp_path / "c").load_checkpoint("run") is None


def test_the_identity_can_be_read(tmp_path: Path) -> None:
    opened(tmp_path / "c")
    identity = json.loads((tmp_path / "c" / HEADER).read_text())
    assert identity["model"] == {"name": "m.onnx", "digest": "aa" * 16}
    assert identity["data"] == {"name": "folder 'calib'", "digest": "bb" * 16}
    assert identity["settings"]["onnxruntime"] == "1.31.1"


def test_folders_that_are_not_a_cache(tmp_path: Path) -> None:
    (tmp_path / "photo.npz").touch()
    with pytest.raises(DataError, match=r"contains 'photo\.npz' and is not a calibration cache"):
        opened(tmp_path)
    with pytest.raises(OutputError, match=r"cannot be the folder of the calibration cache \(File exists\): name one"):
        opened(tmp_path / "photo.npz")
    with pytest.raises(OutputError, match="No such file"):
        opened(tmp_path / "a" / "b")
    other = tmp_path / "other"
    other.mkdir()
    (other / "cache.json").write_text('{"mine": 1}')
    with pytest.raises(DataError, match=r"contains 'cache\.json' and is not a calibration cache"):
        opened(other)
    assert (other / "cache.json").read_text() == '{"mine": 1}' and files(other) == ["cache.json"]
    assert files(tmp_path) == ["other", "photo.npz"]


def test_a_header_of_another_application_stays(tmp_path: Path) -> None:
    (tmp_path / HEADER).write_text('{"mine": 1}')
    with pytest.raises(DataError, match="is not of a calibration cache"):
        opened(tmp_path)
    assert (tmp_path / HEADER).read_text() == '{"mine": 1}'


def test_a_cache_of_a_later_version_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    header = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps({**header, "format": 99}))
    with pytest.raises(DataError, match=r"another version of sbonnx \(format 99, this one has 3\)"):
        opened(tmp_path)


def test_the_database_of_an_earlier_version_is_measured_again(tmp_path: Path) -> None:
    """One note, and the file stays."""
    (tmp_path / "sketches.sqlite").write_bytes(b"old")
    cache = opened(tmp_path)
    (note,) = cache.notes
    assert "was written by an earlier version of sbonnx" in note and "measured again" in note
    assert one(cache, KEYS[0]) is None
    cache.save({KEYS[0]: seen(KEYS[0])})
    again = opened(tmp_path)
    assert not again.notes and one(again, KEYS[0]) is not None
    assert (tmp_path / "sketches.sqlite").read_bytes() == b"old"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    opened(tmp_path).save({KEYS[0]: seen(KEYS[0])})
    tmp_path.chmod(0o555)
    try:
        cache = opened(tmp_path)
        assert_same(one(cache, KEYS[0]), seen(KEYS[0]))
        cache.save({KEYS[0]: seen(KEYS[0])})  # nothing to write
        cache.clear_checkpoint("run")
        with pytest.raises(OutputError, match=r"cannot be written: Permission denied"):
            cache.save({KEYS[1]: seen(KEYS[1])})
    finally:
        tmp_path.chmod(0o755)


# --- interrupted runs ----------------------------------------------------------------------------------------------


def test_a_run_is_resumed_by_its_own_tensors_only(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    run, other = run_key(KEYS), run_key(KEYS[:2])
    assert cache.load_checkpoint(run) is None
    cache.save_checkpoint(3, {key: seen(key, samples=3) for key in KEYS}, run)
    cache.save_checkpoint(4, {key: seen(key) for key in KEYS}, run)
    assert checkpoints(tmp_path) == 1, "the earlier one is replaced"
    cache.save_checkpoint(9, {KEYS[0]: seen(KEYS[0])}, other)
    again = opened(tmp_path)
    found = again.load_checkpoint(run)
    assert found is not None and found[0] == 4 and set(found[1]) == set(KEYS)
    for key, sketch in found[1].items():
        assert_same(sketch, seen(key))
    assert not complete(tmp_path)
    again.clear_checkpoint(run)
    assert again.load_checkpoint(run) is None and again.load_checkpoint(other) is not None
    again.clear_checkpoint(other)
    assert checkpoints(tmp_path) == 0


def test_the_checkpoint_with_the_most_samples_is_resumed(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.save_checkpoint(100, {KEYS[0]: seen(KEYS[0])}, "run")
    cache.save_checkpoint(20, {KEYS[1]: seen(KEYS[1])}, "run")  # a second process, behind the first
    found = cache.load_checkpoint("run")
    assert found is not None and found[0] == 100
    (latest,) = tmp_path.glob(f"*100{CHECKPOINT}")
    latest.write_bytes(latest.read_bytes()[:-1])
    again = opened(tmp_path)
    found = again.load_checkpoint("run")
    assert found is not None and found[0] == 20
    assert "damaged" in again.notes[0]


def test_the_key_of_a_run() -> None:
    first = run_key(KEYS)
    assert run_key(reversed(KEYS)) == first == run_key([*KEYS, *KEYS])
    assert len({first, run_key(KEYS[1:]), run_key([KEYS[0]._replace(axis=1), *KEYS[1:]])}) == 3
