"""Rows with pictures or texts: equal to files of the same contents; labels; rows that do not fit."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbonnx
from sbonnx.calib.data import DataRows, InputSpec
from sbonnx.calib.data.dataset import read
from sbonnx.errors import DataError
from tests.support.values import some

Image = pytest.importorskip("PIL.Image")

COUNT = 5
INPUTS = (InputSpec("x", np.dtype(np.float32), ("N", 3, 16, 16)),)
PAIRS = (InputSpec("x", np.dtype(np.float32), (2, 3, 16, 16)),)
TOKENS = (InputSpec("input_ids", np.dtype(np.int64), ("N", "L")),)


def pictures() -> list[Any]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)) for _ in range(COUNT)]


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Rows:
    """A dataset of Hugging Face by its form: a length, a mapping by position, no other methods."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._rows[place]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.mark.parametrize("form", ["images", "bytes", "paths", "arrays"])
def test_pictures_are_those_of_files(form: str, tmp_path: Path) -> None:
    images = pictures()
    for place, image in enumerate(images):
        image.save(tmp_path / f"{place}.png")
    forms: dict[str, Any] = {
        "images": lambda place: images[place],
        "bytes": lambda place: {"bytes": png(images[place]), "path": None},
        "paths": lambda place: {"bytes": None, "path": str(tmp_path / f"{place}.png")},
        "arrays": lambda place: np.asarray(images[place]),
    }
    rows = Rows([{"image": forms[form](place), "label": place % 3, "id": f"n{place}"} for place in range(COUNT)])
    found = list(read(DataRows(rows, "imagenet"), INPUTS).labelled())
    files = list(read(sbonnx.DataPath(tmp_path, "imagenet"), INPUTS))
    assert len(found) == COUNT
    for place, ((where, row), file) in enumerate(zip(found, files, strict=True)):
        np.testing.assert_array_equal(row.feed["x"], file["x"])
        assert (where, row.labels["label"].tolist(), row.labels["id"]) == (f"row {place}", [place % 3], [f"n{place}"])


def test_whole_batches_and_the_column() -> None:
    images = pictures()
    rows = Rows([{"left": image, "right": images[0], "label": place} for place, image in enumerate(images)])
    data = read(DataRows(rows, "imagenet", column="left"), PAIRS)
    found = list(data.labelled())
    assert [each.labels["label"].tolist() for _, each in found] == [[0, 1], [2, 3]]
    assert "the last 1 images of the Rows are no whole batch of 2: not used" in data.notes
    single = list(read(DataRows(Rows([{"image": image} for image in images]), "imagenet"), INPUTS))
    np.testing.assert_array_equal(found[1][1].feed["x"], np.concatenate([single[2]["x"], single[3]["x"]]))


def test_texts_and_pairs(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": "a b", "label": 1}, {"text": "c", "label": 0}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = str(tmp_path / "tokenizer.json")
    found = [each for _, each in read(DataRows(Rows(rows), settings), TOKENS).labelled()]
    files = [each for _, each in read(sbonnx.DataPath(tmp_path / "t.jsonl", settings), TOKENS).labelled()]
    for mine, theirs in zip(found, files, strict=True):
        np.testing.assert_array_equal(mine.feed["input_ids"], theirs.feed["input_ids"])
        np.testing.assert_array_equal(mine.labels["label"], theirs.labels["label"])
    pairs = [{"first": "a", "second": "b c", "score": 0.5}]
    ((_, pair),) = read(DataRows(pairs, settings, column=("first", "second")), TOKENS).labelled()
    assert pair.feed["input_ids"].tolist() == [[2, 3, 4]] and pair.labels["score"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        ([], None, "the list has no rows"),
        ([{"image": None, "label": 1}], None, "no picture: their columns are 'image' (nothing), 'label' (of type int)"),
        ([{"a": pictures()[0], "b": pictures()[0]}], None, "several columns have a picture"),
        ([{"a": pictures()[0]}], "b", "no column 'b': there are 'a' (of type Image)"),
        ([{"a": pictures()[0]}, {"a": None}], None, "row 1 has no picture but nothing: leave the row out"),
        ([{"a": {"bytes": b"no image", "path": None}}], None, "the picture of row 0 cannot be decoded: it is no image"),
        (iter([{"a": 1}]), None, "has no length, and rows are read by position"),
        ([1], None, "row 0 of the list is of type int"),
    ],
)
def test_rows_that_do_not_fit(rows: Any, column: str | None, message: str) -> None:
    with pytest.raises(DataError) as found:
        list(read(DataRows(rows, "imagenet", column=column), INPUTS))
    assert message in str(found.value)


def test_quantize_takes_rows(tmp_path: Path) -> None:
    """With `preprocess=`, and labelled rows in an evaluation."""
    from sbonnx.assets import digits

    with np.load(digits().eval) as arrays:
        images, labels = arrays["image"][:48], arrays["label"][:48]
    gray = np.round(images[:, 0] * 255).astype(np.uint8)
    rows = Rows([{"image": Image.fromarray(one), "label": int(label)} for one, label in zip(gray, labels, strict=True)])
    settings = {"scale": 1 / 255, "resize": "none"}
    report = sbonnx.quantize(
        digits().model,
        rows,
        preprocess=settings,
        evaluation=sbonnx.EvaluationData(DataRows(rows, settings), "top1"),
        rounding="nearest",
        advise=False,
    )
    evaluation = some(some(report.metrics).evaluation)
    assert evaluation.samples == 48 and evaluation.rows[0].metric.value > 0.9


def test_a_dataset_of_the_package() -> None:
    datasets = pytest.importorskip("datasets")
    images = pictures()
    columns = {"image": [{"bytes": png(image), "path": None} for image in images], "label": list(range(COUNT))}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    real = datasets.Dataset.from_dict(columns, features=features)
    rows = Rows([{"image": image, "label": place} for place, image in enumerate(images)])
    mine, theirs = (list(read(DataRows(each, "imagenet"), INPUTS).labelled()) for each in (rows, real))
    assert len(theirs) == COUNT
    for (_, one), (_, other) in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(one.feed["x"], other.feed["x"])
        np.testing.assert_array_equal(one.labels["label"], other.labels["label"])
