"""Damaged and hostile data files: one line that names the file, at once, in little memory."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.calib.data import InputSpec, files, without_defaults
from sbonnx.calib.data.dataset import read
from sbonnx.calib.data.readers.media_files import natural
from sbonnx.calib.data.stored_arrays import open_stored
from sbonnx.errors import DataError
from tests.calib.data.test_dataset import X, sample

BIG = 32 << 20
"""Bytes of values that must not be read."""


def npy(array: Any = None) -> bytes:
    file = io.BytesIO()
    np.save(file, sample() if array is None else array)
    return file.getvalue()


def headed(text: str, values: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """A .npy file whose header is `text`."""
    return (
        b"\x93NUMPY" + version + struct.pack("<H" if version == b"\1\0" else "<I", len(text)) + text.encode() + values
    )


def described(shape: str, dtype: str = "'<f4'", values: bytes = bytes(48)) -> bytes:
    return headed(f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n", values)


def npz(member: bytes, name: str = "x.npy", method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as archive:
        archive.writestr(name, member)
    return file.getvalue()


def patched(offset_local: int, offset_central: int, value: bytes) -> bytes:
    """A .npz file with another field in both headers of its member."""
    content = bytearray(npz(npy()))
    central = content.index(b"PK\1\2")
    content[offset_local : offset_local + len(value)] = value
    content[central + offset_central : central + offset_central + len(value)] = value
    return bytes(content)


def in_json(content: bytes) -> bytes:
    return json.dumps([{"x": {"array": base64.b64encode(content).decode()}}]).encode()


def external() -> bytes:
    tensor = onnx.TensorProto(dims=[1, 3, 4], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    return bytes(tensor.SerializeToString())


ZEROS = npy(np.zeros(BIG // 4, np.float32))
BOMB = npz(ZEROS, method=zipfile.ZIP_DEFLATED)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.npz", b"", r"is empty or cut off"),
        ("d.npz", b"PK", r"is empty or cut off"),
        ("d.npz", b"hello", r"no \.npy or \.npz file"),
        ("d.npz", npz(npy())[:150], r"'.*d\.npz' cannot be read: it is cut off or damaged"),
        ("d.npz", patched(6, 8, b"\1"), r"array 'x' of '.*d\.npz' cannot be read: it is encrypted"),
        ("d.npz", patched(8, 10, b"\x61"), r"compressed by method 97"),
        ("d.npz", patched(14, 16, b"zzzz"), r"cut off or damaged \(Bad CRC-32"),
        ("d.npz", npz(npy(), method=zipfile.ZIP_DEFLATED).replace(b"\x93", b"\x94", 1), r"cannot be read"),
        ("d.npz", npz(b"text"), r"array 'x' of '.*' cannot be read"),
        ("d.npz", npz(npy()[:-1]), r"is cut off \(223 bytes, and its header says 224\)"),
        ("d.npz", npz(npy(np.array([{}], object))), r"pickled objects"),
        ("d.npz", BOMB, r"float32 \(8388608\): the number of axes differs"),
        ("d.npz", npz(ZEROS, "label.npy", zipfile.ZIP_DEFLATED), r"number of axes"),
        ("d.npz", npz(npy(np.zeros((1, 3, 4, BIG // 12), np.int8)), method=zipfile.ZIP_DEFLATED), r"number of axes"),
        (
            "d.npz",
            npz(npy(np.zeros((BIG // 12, 3, 4), np.uint8)), method=zipfile.ZIP_DEFLATED),
            r"preprocess it as for",
        ),
        ("d.npz", npz(headed("x" * BIG, version=b"\2\0"), method=zipfile.ZIP_DEFLATED), r"EOF: reading array header"),
        ("d.npy", npy()[:40], r"its header is damaged .*EOF: reading array header"),
        ("d.npy", npy()[:-8], r"is cut off \(216 bytes"),
        ("d.npy", headed("junk"), r"its header is damaged"),
        ("d.npy", headed("(" * 3000), r"its header is damaged"),
        ("d.npy", headed("", version=b"\7\0"), r"version 7\.0 of the \.npy format"),
        ("d.npy", described("(-1, 3, 4)"), r"which no array has"),
        ("d.npy", described("(1099511627776, 3, 4)"), r"is cut off"),
        ("d.npy", described("(0, 1" + "0" * 30 + ", 4)"), r"which no array has"),
        ("d.npy", described("(1, 3, 4)", "'<U0'"), r"which no array has"),
        ("d.npy", described("(2147483648, 3, 0)"), r"which no array has"),
        ("d.npy", described("(1, 3, 4)", "'|O'"), r"pickled objects"),
        ("d.npy", described("(1, 3, 4)", "[('a', '<f4')]"), r"save it as float32"),
        ("d.npy", described("(1, 3, 4)", "'<M8[s]'", bytes(96)), r"save it as float32"),
        ("d.npy", described("(1, 3, 4)", "'<c8'", bytes(96)), r"save it as float32"),
        ("d.json", b"[" * 100_000, r"nested too deeply"),
        ("d.json", b'{"a":' * 100_000, r"nested too deeply"),
        ("d.json", b"[" + b"9" * 5000 + b"]", r"no readable JSON|no list of feeds"),
        ("d.json", b"\xff\xfe", r"no readable JSON"),
        ("d.json", b"[]", r"holds no feeds"),
        ("d.json", in_json(b"PK\5\6" + bytes(18)), r"'x' in feed 0 of '.*d\.json' holds no arrays"),
        ("d.json", in_json(npz(npy())[:150]), r"cut off or damaged"),
        ("d.json", in_json(patched(14, 16, b"zzzz")), r"Bad CRC-32"),
        ("d.json", in_json(b""), r"is empty or cut off"),
        ("d.json", in_json(BOMB), r"number of axes differs"),
        ("d.json", b'[{"x": {"array": "\xc3\xa9"}}]', r"cannot be decoded"),
        ("test_data_set_0/input_0.pb", b"\xff\xff\xff", r"no readable TensorProto"),
        ("test_data_set_0/input_0.pb", b"", r"holds no tensor"),
        ("test_data_set_0/input_0.pb", external(), r"values lie in another file"),
        (
            "test_data_set_0/input_0.pb",
            onnx.TensorProto(dims=[1, 3, 4], data_type=1, raw_data=b"1234").SerializeToString(),
            r"no readable TensorProto",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("split", [None, 1])
def test_damaged_files(name: str, content: bytes, says: str, split: int | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=says) as caught:
            list(read(path if path.parent == tmp_path else tmp_path, X, split=split))
        assert tracemalloc.get_traced_memory()[1] < BIG // 4
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert "\n" not in text and len(text.replace(str(tmp_path), "")) < 500


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        os.chdir(path.parent)  # names of sockets are short
        end.bind(path.name)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_link_to_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def as_loop(path: Path) -> None:
    path.symlink_to(path.name)


def as_broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.fixture
def working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sampled
@pytest.mark.parametrize("whole_folder", [False, True])
@pytest.mark.parametrize("name", ["d.npz", "d.npy", "d.json", "x/d.npy", "test_data_set_0/input_0.pb"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (as_fifo, r"it is a FIFO"),
        (as_socket, r"it is a socket"),
        (as_device, r"it is a device"),
        (as_link_to_fifo, r"it is a FIFO"),
        (as_loop, r"symbolic links"),
        (as_broken_link, r"No such file|there is no file"),
    ],
)
def test_special_files(
    make: Callable[[Path], None], says: str, name: str, whole_folder: bool, working_folder: Path
) -> None:
    path = working_folder / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    if name.endswith(".pb") and make in (as_broken_link, as_loop):
        says += "|no input_0"
    with pytest.raises(DataError, match=says):
        list(read(working_folder if whole_folder or path.parent != working_folder else path, X))


@pytest.mark.parametrize("name", ["a" * 300 + ".npz", "a\0.npz", "\ud800.npz"])
def test_names_that_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read|there is no file"):
        read(tmp_path / name, X)


def test_natural_order_of_any_digits(tmp_path: Path) -> None:
    names = ["²1.npy", "٣.npy", "10.npy", "9.npy", "a.npy"]
    assert [path.name for path in sorted(map(Path, names), key=natural)] == [
        "٣.npy",
        "9.npy",
        "10.npy",
        "a.npy",
        "²1.npy",
    ]


def test_more_than_the_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=sample(8))
    monkeypatch.setattr("sbonnx.calib.data.stored_arrays._machine_memory", lambda: 100)
    with pytest.raises(DataError, match="more than the memory of this machine"):
        read(tmp_path / "d.npz", X)


def test_defaults_are_compared_by_shape_first(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_bytes(BOMB)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="other values than its default"):
            without_defaults(open_stored(tmp_path / "d.npz"), {"x": sample}, "d")
        assert tracemalloc.get_traced_memory()[1] < BIG // 4
    finally:
        tracemalloc.stop()


def test_test_sets_hold_the_model_s_inputs_in_order(tmp_path: Path) -> None:
    """A missing optional input is left out."""
    (tmp_path / "test_data_set_0").mkdir()
    tensor = numpy_helper.from_array(sample())
    (tmp_path / "test_data_set_0" / "input_1.pb").write_bytes(tensor.SerializeToString())
    inputs = (InputSpec("other", np.dtype(np.float32), (1,), optional=True), *X)
    (feed,) = read(tmp_path, inputs)
    assert list(feed) == ["x"] and np.array_equal(feed["x"], sample())


@pytest.mark.sampled
@pytest.mark.parametrize("suffix", [".npy", ".npz", "compressed.npz"])
@pytest.mark.parametrize("dtype", ["f4", ">f8", "f2", "i1", "u8", "?", "U5", "S3"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (70, 80, 9)])
def test_arrays_are_those_that_numpy_reads(shape: tuple[int, ...], dtype: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"d{suffix}"
    array = np.asarray(np.random.default_rng(0).integers(0, 100, shape)).astype(dtype)
    array = np.asfortranarray(array) if len(shape) > 2 else array
    save: Any = np.save if suffix == ".npy" else np.savez_compressed if "compressed" in suffix else np.savez
    save(path, array)
    stored = open_stored(path)
    stored = stored["arr_0"] if isinstance(stored, dict) else stored
    want = np.load(path) if suffix == ".npy" else np.load(path)["arr_0"]
    assert (stored.shape, stored.dtype) == (want.shape, want.dtype)
    found = stored.load()
    assert found.flags.writeable and found.dtype == want.dtype
    np.testing.assert_array_equal(found, want, strict=True)


def test_the_only_file_is_read_once_if_it_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    read_array = np.lib.format.read_array

    def counted(*args: Any, **more: Any) -> Any:
        reads.append(args)
        return read_array(*args, **more)

    monkeypatch.setattr(np.lib.format, "read_array", counted)
    values = np.arange(8 * 3000, dtype=np.float32).reshape(8, 3000)
    np.savez(tmp_path / "data.npz", x=values)
    spec = InputSpec("x", np.dtype(np.float32), (None, 3000))
    for kept, expected in ((values.nbytes, 1), (values.nbytes - 1, 4)):  # once more to check the names
        monkeypatch.setattr(files, "KEPT_BYTES", kept)
        reads.clear()
        feeds = read(tmp_path / "data.npz", [spec], split=2)
        for _ in range(3):
            assert np.array_equal(np.concatenate([feed["x"] for feed in feeds]), values)
        assert len(reads) == expected
