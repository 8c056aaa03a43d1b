"""The cache of sketches: what comes out is what went in, or nothing; another model's or data's is refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sbonnx.calib.cache import sketch_files
from sbonnx.calib.cache.sketch_cache import SketchKey, plan_key
from sbonnx.calib.cache.sketch_files import Packed
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError, OutputError
from sbonnx.spec import Array
from tests.calib.cache.caching import IDENTITY, KEYS, SETTINGS, assert_same, everything, files, opened, seen

# --- what goes in comes out ----------------------------------------------------------------------------------------


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    for key, sketch in everything().items():
        cache.put(key, sketch)
        assert_same(cache.get(key), sketch)
    cache.flush()
    again = opened(tmp_path / "c")
    assert len(again) == len(everything()) and not again.notes
    for key, sketch in everything().items():
        assert_same(again.get(key), sketch)
    assert again.get(SketchKey("unknown")) is None


@pytest.mark.parametrize("key", [*KEYS, SketchKey("raw")])
def test_what_was_restored_goes_on_as_if_nothing_had_happened(key: SketchKey, tmp_path: Path) -> None:
    straight = seen(key, samples=6)
    cache = opened(tmp_path / "c")
    cache.save_partial(4, {key: seen(key)}, "plan")
    found = opened(tmp_path / "c").load_partial("plan")
    assert found is not None and found[0] == 4
    resumed, rest = found[1][key], seen(key, samples=6)
    assert_same(resumed, seen(key))
    rng = np.random.default_rng([0, *key.tensor.encode()])
    data = [rng.standard_normal((1, 4, 1500)).astype(np.float32) for _ in range(6)]
    for index in (4, 5):
        resumed.observe(data[index], index)
    assert_same(resumed, straight)
    assert_same(resumed, rest)


def test_a_sketch_is_fresh_each_time(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    cache.put(KEYS[0], seen(KEYS[0]))
    first = cache.get(KEYS[0])
    assert first is not None
    first.observe(np.full(9, 100, np.float32))
    assert_same(cache.get(KEYS[0]), seen(KEYS[0]))


def test_more_detail_serves_a_wish_for_less(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    key = SketchKey("t", None, "histogram", True)
    cache.put(key, seen(key))
    for wish in (SketchKey("t"), SketchKey("t", None, "range"), SketchKey("t", None, "range", True), key):
        assert_same(cache.get(wish), seen(key))
    assert cache.get(SketchKey("t", 1)) is None
    cache.put(SketchKey("u", None, "range"), seen(SketchKey("u", None, "range")))
    assert cache.get(SketchKey("u")) is None and cache.get(SketchKey("u", None, "range", True)) is None
    cache.put(SketchKey("t", None, "range"), seen(SketchKey("t", None, "range")))
    exact = cache.get(SketchKey("t", None, "range"))
    assert exact is not None and exact.detail == "range", "the least that will do"


def test_a_sketch_under_a_wrong_key(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    with pytest.raises(ValueError, match="under the key"):
        cache.put(SketchKey("t", 1), Sketch())
    with pytest.raises(ValueError, match="under the key"):
        cache.save_partial(1, {SketchKey("t", track=True): Sketch()}, "plan")


ARRAYS = npst.arrays(
    st.sampled_from([np.int64, np.int16, np.uint8, np.float32, np.float64, np.bool_]), npst.array_shapes(min_dims=0)
) | npst.arrays(np.int64, npst.array_shapes(), elements=st.integers(0, 1 << 34))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=4), st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4), max_size=3))
def test_any_arrays_are_packed_without_loss(tmp_path: Path, entries: dict[str, dict[str, Array]]) -> None:
    name = sketch_files.save_packed(tmp_path, "x", {"of": "é"}, {key: Packed.of(one) for key, one in entries.items()})
    loaded = sketch_files.load_packed(tmp_path / name)
    assert loaded is not None and loaded[0] == {"of": "é"}
    assert [key for key, _ in loaded[1]] == list(entries)
    for key, packed in loaded[1]:
        found = packed.arrays()
        assert list(found) == list(entries[key])
        for part, values in entries[key].items():
            assert found[part].dtype == values.dtype and found[part].shape == values.shape
            assert found[part].tobytes() == values.tobytes()


def test_counts_take_few_bytes(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    cache.put(KEYS[1], seen(KEYS[1]))
    cache.flush()
    (name,) = files(tmp_path / "c")
    plain = sum(values.nbytes for values in seen(KEYS[1]).to_arrays().values())
    assert (tmp_path / "c" / name).stat().st_size < plain / 2


def test_a_second_run_reads_in_milliseconds(tmp_path: Path) -> None:
    """200 sketches; the whole second run may take 5 % of some 1.5 s."""
    cache = opened(tmp_path / "c")
    sketch = seen(KEYS[0])
    keys = [SketchKey(f"{number:032x}") for number in range(200)]
    for key in keys:
        cache.put(key, sketch)
    cache.flush()

    def second_run() -> None:
        again = opened(tmp_path / "c")
        assert all(again.get(key) for key in keys)

    assert min(_time(second_run) for _ in range(5)) < 0.06


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- whose cache it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"model": "n.onnx", "model_digest": "cc" * 16}, "which differs in model:"),
        ({"data": "the list", "data_digest": "dd" * 16}, "which differs in data:"),
        ({"model_digest": "cc" * 16, "data_digest": "dd" * 16}, "which differs in model and data:"),
    ],
)
def test_another_models_or_datas_cache_is_refused_by_name(tmp_path: Path, other: dict[str, str], differ: str) -> None:
    cache = opened(tmp_path / "c")
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    with pytest.raises(DataError, match="was made from") as caught:
        opened(tmp_path / "c", SETTINGS, **other)
    said = {**IDENTITY, **other}
    text = str(caught.value)
    assert f"'{tmp_path / 'c'}'" in text and differ in text and text.count("\n") == 0
    assert "from model 'm.onnx' (digest aaaaaaaaaaaa) and data folder 'calib' (digest bbbbbbbbbbbb)" in text
    assert f"not from model '{said['model']}' (digest {said['model_digest'][:12]})" in text
    assert "name another folder, or delete it" in text
    assert_same(opened(tmp_path / "c").get(KEYS[0]), seen(KEYS[0]))


def test_a_renamed_model_is_the_same(tmp_path: Path) -> None:
    opened(tmp_path / "c")
    assert not opened(tmp_path / "c", model="copy.onnx", data="the list").notes


def test_other_settings_stand_beside(tmp_path: Path) -> None:
    cache = opened(tmp_path / "c")
    cache.put(KEYS[0], seen(KEYS[0]))
    cache.flush()
    newer = opened(tmp_path / "c", {**SETTINGS, "onnxruntime": "1.32.0"})
    assert newer.get(KEYS[0]) is None
    assert len(newer.notes) == 1 and "nothing yet of onnxruntime 1.32.0 (there: 1.31.1)" in newer.notes[0]
    newer.put(KEYS[0], seen(KEYS[0], seed=1))
    newer.save_partial(1, {}, "plan")
    newer.flush()
    assert_same(opened(tmp_path / "c").get(KEYS[0]), seen(KEYS[0]))
    again = opened(tmp_path / "c", {"device": "cpu", "onnxruntime": "1.32.0"})
    assert_same(again.get(KEYS[0]), seen(KEYS[0], seed=1))
    assert not again.notes and opened(tmp_path / "c").load_partial("plan") is None


def test_the_header_can_be_read(tmp_path: Path) -> None:
    opened(tmp_path / "c")
    header = json.loads((tmp_path / "c" / "cache.json").read_text())
    assert header["model"] == {"name": "m.onnx", "digest": "aa" * 16}
    assert header["data"] == {"name": "folder 'calib'", "digest": "bb" * 16}
    assert header["settings"]["onnxruntime"] == "1.31.1"


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "photo.npz").touch()
    with pytest.raises(DataError, match=r"holds 'photo\.npz' and is no calibration cache"):
        opened(tmp_path)
    with pytest.raises(OutputError, match=r"cannot be the folder of the calibration cache \(File exists\): name one"):
        opened(tmp_path / "photo.npz")
    with pytest.raises(OutputError, match="No such file"):
        opened(tmp_path / "a" / "b")
    other = tmp_path / "other"
    other.mkdir()
    (other / "cache.json").write_text('{"mine": 1}')
    with pytest.raises(DataError, match="is not of a calibration cache"):
        opened(other)
    assert (other / "cache.json").read_text() == '{"mine": 1}'
    assert files(tmp_path) == ["other", "photo.npz"]


def test_a_folder_of_another_version(tmp_path: Path) -> None:
    opened(tmp_path)
    header = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps({**header, "format": 99}))
    with pytest.raises(DataError, match=r"another version of sbonnx \(format 99, this one has 1\)"):
        opened(tmp_path)


# --- going on ------------------------------------------------------------------------------------------------------


def test_a_run_is_resumed_by_its_own_plan_only(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    plan, other = plan_key(KEYS), plan_key(KEYS[:2])
    assert cache.load_partial(plan) is None
    cache.save_partial(3, {key: seen(key, samples=3) for key in KEYS}, plan)
    cache.save_partial(4, {key: seen(key) for key in KEYS}, plan)
    assert len(files(tmp_path)) == 1, "a run is remembered once"
    cache.save_partial(9, {}, other)
    again = opened(tmp_path)
    found = again.load_partial(plan)
    assert found is not None and found[0] == 4 and set(found[1]) == set(KEYS)
    for key, sketch in found[1].items():
        assert_same(sketch, seen(key))
    assert again.load_partial(plan_key(KEYS, "shard 1 of 2")) is None and len(again) == 0
    again.clear_partial(plan)
    assert again.load_partial(plan) is None and again.load_partial(other) == (9, {})
    again.clear_partial()
    assert files(tmp_path) == []


def test_the_run_that_came_farthest_is_resumed(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.save_partial(100, {KEYS[0]: seen(KEYS[0])}, "plan")
    cache.save_partial(20, {}, "plan")  # a second process, behind the first
    found = cache.load_partial("plan")
    assert found is not None and found[0] == 100
    path = next(tmp_path / name for name in files(tmp_path) if "-000000100-" in name)
    path.write_bytes(b"damaged")
    again = opened(tmp_path)
    assert again.load_partial("plan") == (20, {})
    assert "was damaged" in again.notes[0]


def test_the_key_of_a_plan() -> None:
    first = plan_key(KEYS)
    assert plan_key(reversed(KEYS)) == first == plan_key([*KEYS])
    others = [plan_key(KEYS[1:]), plan_key(KEYS, "a"), plan_key(KEYS, "a", "b"), plan_key(KEYS, "ab")]
    changed = [key._replace(track=not key.track) for key in KEYS[:1]]
    assert len({first, *others, plan_key([*changed, *KEYS[1:]])}) == 6
