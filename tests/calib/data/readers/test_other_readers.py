"""Texts against tokenizers, audio against soundfile and soxr, feeds of Python files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.data import DataPath, InputSpec
from sbonnx.calib.data.dataset import read
from sbonnx.errors import DataError, RecipeError
from tests.calib.data.test_dataset import X, sample

I64, F32 = np.dtype(np.int64), np.dtype(np.float32)


def bert(length: Any = "T", batch: Any = "N") -> tuple[InputSpec, ...]:
    return tuple(InputSpec(name, I64, (batch, length)) for name in ("input_ids", "attention_mask", "token_type_ids"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A tokenizer of words, and texts with labels next to it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {name: number for number, name in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "[PAD]"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": "a cat", "text_pair": "sat", "label": 1}, {"text": "dog", "label": 0}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_texts_become_the_inputs_by_name(texts: Path) -> None:
    data = read(DataPath(texts / "t.jsonl", texts / "tokenizer.json"), bert())
    found = [
        ({name: x.tolist() for name, x in one.feed.items()}, one.labels["label"].tolist()) for _, one in data.labelled()
    ]
    assert found == [
        ({"input_ids": [[1, 3, 4, 2, 5, 2]], "attention_mask": [[1] * 6], "token_type_ids": [[0, 0, 0, 0, 1, 1]]}, [1]),
        ({"input_ids": [[1, 0, 2]], "attention_mask": [[1] * 3], "token_type_ids": [[0] * 3]}, [0]),
    ]
    (feed,) = read(DataPath(texts / "t.jsonl", texts), bert(length=5, batch=2))  # cut and padded to the model's length
    assert feed["input_ids"].tolist() == [[1, 3, 2, 5, 2], [1, 0, 2, 6, 6]]
    assert feed["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    (texts / "s").mkdir()
    (texts / "s" / "1.txt").write_text("cat sat\n\na\n")
    ids = [InputSpec("tokens", np.dtype(np.int32), ("N", "T"))]
    settings = {"tokenizer": str(texts), "max_length": 4, "pad": True}
    short = [feed["tokens"].tolist() for feed in read(DataPath(texts / "s", settings), ids)]
    assert short == [[[1, 4, 5, 2]], [[1, 3, 2, 6]]]


def test_wrong_texts(texts: Path) -> None:
    pixels = InputSpec("pixels", F32, ("N", 3))
    for settings, inputs, says in (
        ("imagenet", bert(), "the preset 'imagenet' has a key .*for texts there are max_length, pad, tokenizer"),
        ({"max_length": 4}, bert(), "has no tokenizer: set tokenizer"),
        ({"tokenizer": "none.json"}, bert(), r"the tokenizer 'none\.json' cannot be read: No such file"),
        ({"tokenizer": str(texts / "t.jsonl")}, bert(), r"t\.jsonl' cannot be read as a tokenizer"),
        (
            {"tokenizer": str(texts), "max_length": 9},
            bert(8),
            "max_length is 9, and the inputs of the model have 8 tokens",
        ),
        (texts, (*bert(), pixels), "texts fill input_ids, .*, and the model needs 'pixels'"),
        (texts, bert(batch=3), "holds 2 texts, and a batch of the model has 3"),
        (None, bert(), r"holds texts, which need --preprocess .*: the tokenizer.json of the model"),
    ):
        with pytest.raises(DataError, match=says) as caught:
            read(DataPath(texts / "t.jsonl", settings), inputs)
        assert "\n" not in str(caught.value)
    for content, says in (("{", "line 1 of .* is no JSON"), ('{"body": 1}', 'must be an object with a string "text"')):
        (texts / "t.jsonl").write_text(content)
        with pytest.raises(DataError, match=says):
            read(DataPath(texts / "t.jsonl", texts), bert())


@pytest.mark.parametrize("pad", [{}, {"truncation": {"stride": 99, "max_length": -4}, "padding": {"strategy": "x"}}])
@pytest.mark.parametrize(
    ("text", "more", "inputs", "says"),
    [
        (
            "a",
            {"max_length": 1 << 20, "pad": True},
            bert(),
            "max_length is 1048576, and texts have at most 65536 tokens",
        ),
        ("a", {}, bert(1 << 30), "number of tokens of the model's inputs is 1073741824, and texts have at most 65536"),
        ("\\ud800", {}, bert(), "tokenizer.json' cannot encode a text: "),
        ("a " * (1 << 23), {}, bert(), "a text has 16777216 characters, and at most 8388608 are tokenized at once"),
    ],
)
def test_hostile_texts(
    pad: dict[str, Any], text: str, more: dict[str, Any], inputs: tuple[InputSpec, ...], says: str, texts: Path
) -> None:
    """Also with a truncation and a padding in the file that the package does not read."""
    path = texts / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **pad}))
    (texts / "t.jsonl").write_text(f'{{"text": "{text}"}}')
    with pytest.raises(DataError, match=says):
        list(read(DataPath(texts / "t.jsonl", {"tokenizer": str(path), **more}), inputs))
    (texts / "t.jsonl").write_text('{"text": "a cat"}')
    (feed,) = read(DataPath(texts / "t.jsonl", {"tokenizer": str(path)}), bert())
    assert feed["input_ids"].tolist() == [[1, 3, 4, 2]]


def test_a_tokenizer_that_panics(texts: Path) -> None:
    """Its exception is no `Exception`."""
    path = texts / "tokenizer.json"
    values = json.loads(path.read_text())
    values["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"tokenizer\.json' cannot encode a text: PanicException"):
        list(read(DataPath(texts / "t.jsonl", {"tokenizer": str(path)}), bert()))


def test_audio_is_mono_resampled_and_in_windows(tmp_path: Path) -> None:
    soundfile, soxr = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    stereo = np.random.default_rng(0).uniform(-0.5, 0.5, (2500, 2)).astype(np.float32)
    for label, name in enumerate(("no", "yes")):
        (tmp_path / name).mkdir()
        soundfile.write(tmp_path / name / "1.wav", stereo[: 2500 - 1900 * label], 8000, subtype="FLOAT")
    waves = [InputSpec("wave", F32, ("N", 1, 2000)), InputSpec("sr", I64, ())]
    data = read(DataPath(tmp_path, {"sample_rate": 16000}), waves)
    rows = [(where, one.feed["wave"][0, 0], one.feed["sr"], one.labels["label"]) for where, one in data.labelled()]
    long = soxr.resample(stereo.mean(axis=1), 8000, 16000)
    short = soxr.resample(stereo[:600].mean(axis=1), 8000, 16000)
    assert len(rows) == len(data) == 3 and rows[1][0].endswith("1.wav' from 0.125 s")
    for (_, wave, rate, label), wanted, number in zip(
        rows, (long[:2000], long[2000:4000], np.pad(short, (0, 800))), (0, 0, 1), strict=True
    ):
        np.testing.assert_allclose(wave, wanted, atol=1e-6)
        assert rate == 16000 and label == [number]
    wav2vec = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 8000, "do_normalize": True}
    (feed,) = read(DataPath(tmp_path / "no" / "1.wav", wav2vec), [InputSpec("x", F32, ("N", "T"))])
    mono = stereo.mean(axis=1)
    np.testing.assert_allclose(feed["x"][0], (mono - mono.mean()) / np.sqrt(mono.var() + 1e-7), atol=1e-5)
    (tmp_path / "no" / "1.wav").write_bytes(b"RIFF")
    for settings, says in (
        ({"sample_rate": 16000}, r"audio '.*1\.wav' cannot be read: .*; copy it again or remove it"),
        ({"window": 3}, "has no sample_rate"),
        ({"sample_rate": 8000, "window": 3}, "and window is 3: leave it out"),
    ):
        with pytest.raises(DataError, match=says):
            read(DataPath(tmp_path, settings), waves)


def test_python_files(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text("import numpy as np\ndef one(n): return np.full((n, 3, 4), n, np.float32)\n")
    (tmp_path / "data.py").write_text(
        "from shapes import one\n"
        "def pairs():\n    for n in (1, 2):\n        yield {'x': one(n)}, n\n"
        "def listed():\n    return [one(3)]\n"
        "def nothing():\n    pass\n"
        "def late():\n    yield {'x': one(1)}\n    raise ValueError('no\\nmore')\n"
        "def failing():\n    return 1 / 0\n"
    )
    named = str(tmp_path / "data.py")
    data = read(f"{named}:pairs", X)
    for _ in range(2):  # the function is called again
        assert [(len(one.feed["x"]), one.labels["label"]) for _, one in data.labelled()] == [(1, 1), (2, 2)]
    assert len(data) == 2 and [len(feed["x"]) for feed in read(f"{named}:pairs", X, limit=1, pick="random", seed=3)]
    assert [len(feed["x"]) for feed in read(tmp_path / "data.py:listed", X)] == [3]
    for function, says in (
        ("nothing", "must yield or return feeds, dicts of arrays by input name; it returns None"),
        ("failing", "data.py:failing' failed: ZeroDivisionError: division by zero"),
        ("late", "data.py:late' failed: ValueError: no more; --debug shows where"),
    ):
        with pytest.raises(DataError, match=says):
            list(read(f"{named}:{function}", X))
    with pytest.raises(RecipeError, match="has no function 'other'"):
        read(f"{named}:other", X)
    assert str(tmp_path) not in sys.path and len(sample()) == 2
