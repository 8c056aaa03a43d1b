"""Labels: arrays that no input has, items past the inputs, second items of pairs; and other names of the only input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.data import LabelledFeed
from sbonnx.calib.data.dataset import read
from sbonnx.errors import DataError
from tests.calib.data.test_dataset import TWO, X, sample

Y = np.array([3, 1])


@pytest.mark.parametrize(
    "raw",
    [
        {"x": sample(), "label": Y},
        (sample(), Y),
        [sample(), Y],
        ({"x": sample()}, Y),
        ({"x": sample()}, {"label": Y}),
        {"arr_0": sample(), "arr_1": Y},
        LabelledFeed({"x": sample()}, {"label": Y}),
    ],
)
def test_every_form_of_a_labelled_feed(raw: Any) -> None:
    data = read([raw], X)
    assert [list(feed) for feed in data] == [["x"]]
    ((where, labelled),) = data.labelled()
    assert where == "feed 0" and np.array_equal(labelled.feed["x"], sample())
    assert {name: value.tolist() for name, value in labelled.labels.items()} == {"label": [3, 1]}


def test_labels_of_files_are_cut_with_the_feed_and_sampled_with_it(tmp_path: Path) -> None:
    x = sample(6)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(6), classes=np.array(["a", "b"]))
    data = read(tmp_path / "d.npz", X, split=2, limit=2, pick="random", seed=1)
    for feed, (_, labelled) in zip(data, data.labelled(), strict=True):
        rows = labelled.labels["y"]
        assert len(rows) == 2 and np.array_equal(feed["x"], x[rows]) and np.array_equal(labelled.feed["x"], x[rows])
        assert labelled.labels["classes"].tolist() == ["a", "b"]
    again = read(data, X, limit=1)  # a part of a data set keeps the labels
    assert next(again.labelled())[1].labels.keys() == {"y", "classes"}
    assert data.notes == (
        "arrays 'y', 'classes' of the data are no inputs of the model: labels, not used for calibration",
    )


def test_labels_are_read_only_if_they_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_bytes(_with_damaged_label())
    data = read(tmp_path / "d.npz", X)
    assert len(list(data)) == 1
    with pytest.raises(DataError, match=r"array 'y' of '.*d\.npz' cannot be read"):
        list(data.labelled())


def test_a_single_array_is_the_only_input_under_any_name_of_the_first_feed() -> None:
    data = read([{"pixels": sample()}, {"pixels": sample(1)}, {"typo": sample()}], X)
    assert data.notes == ("array 'pixels' of the data is taken as input 'x'",)
    walk = iter(data)
    assert [len(next(walk)["x"]), len(next(walk)["x"])] == [2, 1]
    with pytest.raises(DataError, match="feed 2 holds an array 'typo' and none"):
        next(walk)
    with pytest.raises(DataError, match="feed 0 holds an array 'a' and none for the model's input"):
        read([{"a": Y}], TWO)


def _with_damaged_label() -> bytes:
    import io
    import zipfile

    buffer = io.BytesIO()
    np.savez(buffer, x=sample(), y=np.arange(5000))
    content = bytearray(buffer.getvalue())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        offset = archive.getinfo("y.npy").header_offset
    content[offset + 20000] ^= 0xFF
    return bytes(content)
