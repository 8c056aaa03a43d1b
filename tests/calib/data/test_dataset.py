"""Readers: every kind of source gives the same feeds, in the model's types."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from sbonnx.calib.data import InputSpec
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.errors import DataError
from sbonnx.spec import Array

F32 = np.dtype(np.float32)
I64 = np.dtype(np.int64)
X = (InputSpec("x", F32, ("N", 3, 4)),)
TWO = (InputSpec("ids", I64, ("N", "T")), InputSpec("mask", I64, ("N", "T")))


def sample(batch: int = 2, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((batch, 3, 4)).astype(np.float32)


FEEDS = [sample(2, 0), sample(1, 1), sample(3, 2)]


def as_npz_folder(folder: Path) -> Any:
    for number, x in zip((1, 2, 10), FEEDS, strict=True):  # 10 after 2: natural order
        np.savez(folder / f"{number}.npz", x=x)
    (folder / ".hidden.npz").write_bytes(b"no")
    return folder


def as_npy_folder(folder: Path) -> Any:
    for number, x in enumerate(FEEDS):
        np.save(folder / f"{number}.npy", x)
    return folder


def as_input_folders(folder: Path) -> Any:
    (folder / "x").mkdir()
    as_npy_folder(folder / "x")
    return folder


def as_polygraphy(folder: Path) -> Any:
    def encode(x: Array) -> dict[str, str]:
        buffer = io.BytesIO()
        np.save(buffer, x)
        return {"array": base64.b64encode(buffer.getvalue()).decode(), "polygraphy_class": "ndarray"}

    path = folder / "inputs.json"
    path.write_text(json.dumps([{"x": encode(x)} for x in FEEDS]))
    return path


def as_test_data(folder: Path) -> Any:
    for number, x in enumerate(FEEDS):
        place = folder / f"test_data_set_{number}"
        place.mkdir()
        (place / "input_0.pb").write_bytes(numpy_helper.from_array(x, "x").SerializeToString())
        (place / "output_0.pb").write_bytes(numpy_helper.from_array(x, "y").SerializeToString())
    return folder


def as_list(_: Path) -> Any:
    return [{"x": x} for x in FEEDS]


def as_generator(_: Path) -> Any:
    return ({"x": x} for x in FEEDS)


def as_arrays(_: Path) -> Any:
    return list(FEEDS)


def as_labelled_tuples(_: Path) -> Any:
    return [(x, np.zeros(len(x), np.int64)) for x in FEEDS]


class Tensor:
    """What a torch tensor looks like from outside."""

    def __init__(self, x: Array) -> None:
        self.x = x

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Array:
        return self.x


class Loader:
    """What a DataLoader looks like from outside."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(Tensor(x), Tensor(np.zeros(len(x)))) for x in FEEDS])

    def __len__(self) -> int:
        return len(FEEDS)


def as_loader(_: Path) -> Any:
    return Loader()


class CalibrationReader:
    """onnxruntime's CalibrationDataReader, with rewind or without."""

    def __init__(self) -> None:
        self.left: Iterator[dict[str, Array]] = iter([{"x": x} for x in FEEDS])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.left, None)


class Rewinding(CalibrationReader):
    def rewind(self) -> None:
        self.left = iter([{"x": x} for x in FEEDS])


def as_calibration_reader(_: Path) -> Any:
    return CalibrationReader()


def as_rewinding_reader(_: Path) -> Any:
    return Rewinding()


SOURCES = [
    as_npz_folder,
    as_npy_folder,
    as_input_folders,
    as_polygraphy,
    as_test_data,
    as_list,
    as_generator,
    as_arrays,
    as_labelled_tuples,
    as_loader,
    as_calibration_reader,
    as_rewinding_reader,
]


@pytest.mark.parametrize("make", SOURCES)
def test_every_source_gives_the_same_feeds_twice(make: Callable[[Path], Any], tmp_path: Path) -> None:
    data = read(make(tmp_path), X)
    for _ in range(2):
        feeds = list(data)
        assert len(feeds) == len(data) == 3
        for feed, x in zip(feeds, FEEDS, strict=True):
            np.testing.assert_array_equal(feed["x"], x)
            assert feed["x"].dtype == np.float32


@pytest.mark.parametrize("make", SOURCES)
def test_limit_counts_feeds(make: Callable[[Path], Any], tmp_path: Path) -> None:
    data = read(make(tmp_path), X, limit=2)
    assert [len(feed["x"]) for feed in data] == [2, 1]
    assert len(data) == 2


def test_a_real_data_loader() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    for kind in (torch.float32, torch.bfloat16):
        set_ = torch.utils.data.TensorDataset(torch.ones(5, 3, 4, dtype=kind), torch.zeros(5, dtype=torch.int64))
        data = read(torch.utils.data.DataLoader(set_, batch_size=2), X)
        assert [feed["x"].shape[0] for feed in data] == [2, 2, 1]
        assert data.count == 3


def test_one_feed_as_dict_array_and_files(tmp_path: Path) -> None:
    x = sample()
    np.savez(tmp_path / "named.npz", x=x)
    np.savez(tmp_path / "unnamed.npz", x)
    np.save(tmp_path / "x.npy", x)
    files = [tmp_path / "named.npz", str(tmp_path / "unnamed.npz"), tmp_path / "x.npy"]
    for source in ({"x": x}, x, {"x": x.tolist()}, [[x]], *files):
        (feed,) = read(source, X)
        np.testing.assert_array_equal(feed["x"], x)


def test_several_inputs_by_name_and_position() -> None:
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3), np.int32)
    for source in ([{"mask": mask, "ids": ids}], [(ids, mask)], {"ids": ids, "mask": mask}):
        (feed,) = read(source, TWO)
        assert list(feed) == ["ids", "mask"]
        assert feed["mask"].dtype == np.int64


def test_split_cuts_a_long_axis(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=sample(10), sr=np.array(16000))
    inputs = (*X, InputSpec("sr", I64, ()))
    data = read(tmp_path / "all.npz", inputs, split=4)
    assert [len(feed["x"]) for feed in data] == [4, 4, 2]
    assert all(feed["sr"] == 16000 for feed in data)
    assert len(data) == 3
    assert len(read(tmp_path / "all.npz", inputs, split=4, limit=2)) == 2
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in data]), sample(10))


def test_a_dataset_is_a_source() -> None:
    data = read(as_list(Path()), X, limit=2)
    assert isinstance(data, Dataset)
    assert len(read(data, X)) == 2


@pytest.mark.parametrize(
    ("array", "want"),
    [
        (np.ones((1, 3, 4), np.float64), F32),
        (np.ones((1, 3, 4), np.float16), F32),
        (np.ones((1, 3, 4), ">f4"), F32),
        (np.ones((1, 3, 4), np.float32), np.dtype(np.float16)),
        (np.ones((1, 3, 4), np.int32), I64),
        (np.ones((1, 3, 4), np.int64), np.dtype(np.int32)),
        (np.ones((1, 3, 4), np.bool_), I64),
        (np.ones((1, 3, 4), np.uint8), np.dtype(np.uint8)),
        (np.full((1, 3, 4), "a"), np.dtype(object)),
    ],
)
def test_types_that_are_converted(array: Array, want: np.dtype[Any]) -> None:
    (feed,) = read([{"x": array}], (InputSpec("x", want, ("N", 3, 4)),))
    assert feed["x"].dtype == want
    assert feed["x"].dtype.isnative
    np.testing.assert_array_equal(feed["x"], array.astype(want))


def test_an_endless_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.calib.data.objects.MAX_CACHED", 1000)

    def endless() -> Iterator[dict[str, Array]]:
        while True:
            yield {"x": sample()}

    with pytest.raises(DataError, match="can be walked only once and gave more than"):
        read(endless(), X)
    assert len(read(endless(), X, limit=3)) == 3


def test_the_first_feed_is_checked_at_once_and_later_ones_when_reached() -> None:
    with pytest.raises(DataError):
        read([{"y": sample(), "z": sample()}], X)
    data = read([{"x": sample()}, {"x": sample() * np.float32(np.nan)}], X)
    walk = iter(data)
    next(walk)
    with pytest.raises(DataError, match="feed 1"):
        next(walk)


@pytest.mark.parametrize("again", [False, True], ids=["once", "many times"])
def test_feeds_of_one_buffer_are_copied(again: bool) -> None:
    """A generator, and an object that can be iterated again, fill the same array for every feed."""

    def fill() -> Iterator[dict[str, Array]]:
        buffer = np.empty((1, 3, 4), np.float32)
        for value in range(3):
            buffer[:] = value
            yield {"x": buffer}

    class Loader:
        def __iter__(self) -> Iterator[dict[str, Array]]:
            return fill()

    feeds = list(read(Loader() if again else fill(), X))
    assert [float(feed["x"].mean()) for feed in feeds] == [0.0, 1.0, 2.0]
