"""Data that does not fit: one line that names where, what was found, what is wanted and the mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.calib.data import InputSpec
from sbonnx.calib.data.dataset import read
from sbonnx.errors import DataError
from sbonnx.spec import Array
from tests.calib.data.test_dataset import F32, TWO, X, sample


def bad(**arrays: Array) -> list[dict[str, Array]]:
    return [{"x": sample()}, arrays]


NAN = sample()
NAN[1, 2, 3] = np.nan
INF = sample(3)
INF[2, 0, 0] = -np.inf


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (bad(xx=sample()), r"feed 1 holds an array 'xx' and none for the model's input 'x': name it 'x'"),
        (bad(), r"feed 1 holds no array for input 'x': add it; it wants float32 \(N, 3, 4\)"),
        (bad(x=sample()[0]), r"wants float32 \(N, 3, 4\); feed 1 holds float32 \(3, 4\)\. Is the batch axis missing"),
        (bad(x=sample()[None]), r"the number of axes differs"),
        (bad(x=sample()[:, :2]), r"axis 1 must be 3; resize or transpose"),
        (bad(x=sample()[:0]), r"there is no sample in it"),
        (bad(x=np.zeros((1, 3, 4), np.uint8)), r"feed 1 holds uint8 \(1, 3, 4\): preprocess it as for inference"),
        (bad(x=np.zeros((1, 3, 4), np.int64)), r"save it as float32"),
        (bad(x=np.full((1, 3, 4), 1e300)), r"largest value 1e\+300 does not fit float32"),
        (bad(x=NAN), r"input 'x' of feed 1 holds 1 NaN and 0 infinite values, first in sample 1"),
        (bad(x=INF), r"input 'x' of feed 1 holds 0 NaN and 1 infinite values, first in sample 2"),
        (bad(x=np.array([[object()]])), r"not an array of numbers"),
        ([], r"the list holds no feeds"),
        (7, r"a value of type int gives no feeds: give a folder"),
        (sample, r"a value of type function gives no feeds: give the result of calling it"),
    ],
)
def test_mistakes_in_objects(source: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        list(read(source, X))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([np.zeros((2, 3), np.int64)], r"feed 0 is a single array and the model has 2 inputs: give a dict with 'ids'"),
        ([(np.zeros((2, 3), np.int64),)], r"feed 0 holds 1 items and the model has 2 inputs: ids, mask"),
        ([{"ids": np.zeros((2, 3), np.int64), "masks": np.zeros((2, 3), np.int64)}], r"'masks'.*name it 'mask'"),
        ([{"ids": np.full((1, 1), 2.0), "mask": np.zeros((1, 1), np.int64)}], r"round it on purpose"),
    ],
)
def test_mistakes_with_several_inputs(source: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        list(read(source, TWO))


def test_integers_out_of_range() -> None:
    with pytest.raises(DataError, match=r"its values 0 \.\. 4294967296 do not fit int32"):
        list(read([{"x": np.array([0, 2**32])}], (InputSpec("x", np.dtype(np.int32), ("N",)),)))


def write_missing(folder: Path) -> Path:
    return folder / "nowhere"


def write_empty_folder(folder: Path) -> Path:
    return folder


def write_mixed(folder: Path) -> Path:
    np.save(folder / "a.npy", sample())
    np.savez(folder / "b.npz", x=sample())
    return folder


def write_images(folder: Path) -> Path:
    (folder / "cat.jpg").write_bytes(b"jpg")
    return folder


def write_wrong_suffix(folder: Path) -> Path:
    (folder / "x.dat").write_text("1,2")
    return folder / "x.dat"


def write_truncated(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=sample())
    (folder / "x.npz").write_bytes((folder / "x.npz").read_bytes()[:150])
    return folder


def write_zero_bytes(folder: Path) -> Path:
    (folder / "x.npz").write_bytes(b"")
    return folder / "x.npz"


def write_text(folder: Path) -> Path:
    (folder / "x.npz").write_text("hello")
    return folder / "x.npz"


def write_pickled(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.array([{}], object))
    return folder / "x.npz"


def write_no_arrays(folder: Path) -> Path:
    np.savez(folder / "x.npz")
    return folder / "x.npz"


def write_bad_json(folder: Path) -> Path:
    (folder / "x.json").write_text("{")
    return folder / "x.json"


def write_other_json(folder: Path) -> Path:
    (folder / "x.json").write_text('[{"x": [1, 2]}]')
    return folder / "x.json"


def write_bad_pb(folder: Path) -> Path:
    (folder / "test_data_set_0").mkdir()
    (folder / "test_data_set_0" / "input_0.pb").write_bytes(b"\xff\xff\xff")
    return folder


def write_too_many_pb(folder: Path) -> Path:
    (folder / "test_data_set_0").mkdir()
    for number in range(2):
        tensor: onnx.TensorProto = numpy_helper.from_array(sample())
        (folder / "test_data_set_0" / f"input_{number}.pb").write_bytes(tensor.SerializeToString())
    return folder


def write_uneven_folders(folder: Path) -> Path:
    (folder / "x").mkdir()
    return folder


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_missing, "there is no file or folder"),
        (write_empty_folder, r"is empty: put \.npz files"),
        (write_mixed, r"mixes \.npz and \.npy"),
        (write_images, r"holds images, which need --preprocess"),
        (write_wrong_suffix, r"is no data file: give \.npz"),
        (write_truncated, r"x\.npz' cannot be read"),
        (write_zero_bytes, r"x\.npz' cannot be read"),
        (write_text, r"x\.npz' cannot be read"),
        (write_pickled, r"pickled objects.*save plain arrays"),
        (write_no_arrays, r"holds no arrays"),
        (write_bad_json, r"is no readable JSON"),
        (write_other_json, r"is no array in Polygraphy's form"),
        (write_bad_pb, r"input_0\.pb' is no readable TensorProto"),
        (write_too_many_pb, r"holds more inputs than the model's 1"),
        (write_uneven_folders, r"equally many \.npy files"),
    ],
)
def test_mistakes_in_files(write: Callable[[Path], Path], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says) as caught:
        list(read(write(tmp_path), X))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "inputs", "split", "says"),
    [
        ({"ids": np.zeros((4, 2), np.int64), "mask": np.zeros((6, 2), np.int64)}, TWO, 2, r"'ids' 4, 'mask' 6"),
        ({"x": sample(5)}, (InputSpec("x", F32, (2, 3, 4)),), 2, r"holds 5 samples; split in 2 does not fit input 'x'"),
        ({"x": sample(4)}, (InputSpec("x", F32, (1, 3, 4)),), 2, r"whose batch is fixed at 1: use a split of 1"),
        ({"x": sample(4)}, X, 0, r"a split of 0 samples"),
    ],
)
def test_splits_that_cannot_be(
    arrays: dict[str, Array], inputs: tuple[InputSpec, ...], split: int, says: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "all.npz", **arrays)  # type: ignore[arg-type]  # numpy 2.4: its stub has allow_pickle in the way
    with pytest.raises(DataError, match=says):
        list(read(tmp_path / "all.npz", inputs, split=split))
