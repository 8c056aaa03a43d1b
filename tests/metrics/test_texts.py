"""Word and character error rates equal those of jiwer; greedy CTC, vocabularies, exact match and token accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.data.readers.vocabulary import read_vocabulary, vocabulary_in, with_blank
from sbonnx.errors import DataError
from sbonnx.metrics import task_metric
from sbonnx.metrics.transcription import Transcriber, Vocabulary
from sbonnx.spec import Array

REFERENCE: dict[str, Any] = json.loads(Path(__file__).with_name("reference_values.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["wer", "cer"])
def test_error_rates_equal_jiwer(name: str) -> None:
    for case in REFERENCE["texts"]:
        metric = task_metric(name).make()
        for part in (slice(0, 2), slice(2, 5)):
            outputs, labels = np.array(case["texts"][part], object), {"text": case["references"][part]}
            metric.add({"y": outputs}, labels)
        assert metric.value() == pytest.approx(case[name], abs=1e-12)
        assert metric.count == 5


def test_token_metrics_equal_scikit_learn() -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    scores, labels = rng.random((40, 3, 4)).astype(np.float32), rng.integers(-1, 4, (40, 3))
    guesses, used = scores.argmax(2), labels >= 0
    found = {}
    for name in ("token_accuracy", "exact"):
        metric = task_metric(name).make()
        metric.add({"y": scores[:25]}, {"label": labels[:25]})
        metric.add({"y": guesses[25:]}, {"label": labels[25:]})
        found[name] = metric.value()
    assert found["token_accuracy"] == pytest.approx(sk.accuracy_score(labels[used], guesses[used]))
    whole = [(guess[use] == true[use]).all() for guess, true, use in zip(guesses, labels, used, strict=True)]
    assert found["exact"] == pytest.approx(np.mean(whole))


def test_exact_match_of_generated_tokens() -> None:
    """Padding below 0 is left out, so that sequences of other lengths are compared by their tokens."""
    metric = task_metric("exact").make()
    metric.add({"y": np.array([[5, 6, -1], [5, 6, 7], [5, -1, -1]])}, {"label": np.array([[5, 6], [5, 6], [6, -1]])})
    assert metric.value() == pytest.approx(1 / 3)


def scores_of(path: list[int], classes: int) -> Array:
    """Scores (1, steps, classes) whose largest at each step is that of `path`."""
    return np.eye(classes, dtype=np.float32)[path][None]


@pytest.mark.parametrize(
    ("name", "content", "blank", "path", "expected"),
    [
        ("tokens.txt", "<blk> 0\n\u2581a 1\nb 2\n  3\n", None, [1, 1, 0, 2, 2, 0, 2, 1, 3, 2], "abb a b"),
        ("vocab.json", '{"[PAD]": 3, "|": 0, "A": 1, "B": 2}', None, [1, 3, 1, 0, 0, 2], "AA B"),
        ("chars.txt", "a\nb\n", 2, [0, 2, 0, 1], "aab"),  # NeMo: the blank follows the last token
        ("chars.txt", "a\nb\n", 0, [1, 0, 1, 2], "aab"),  # the blank precedes the first
        ("vocab.json", '["<pad>", "<s>", "un", "##do", "it"]', None, [1, 2, 0, 3, 4], "undo it"),
    ],
)
def test_greedy_decoding(
    name: str, content: str, blank: int | None, path: list[int], expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    vocabulary = with_blank(read_vocabulary(tmp_path / name), blank, {})
    classes = vocabulary.size + (name == "chars.txt")
    found = Transcriber(vocabulary).texts({"logits": scores_of(path, classes)}, 1, "wer")
    assert list(found["text"]) == [expected]
    time_major = scores_of(path, classes).transpose(1, 0, 2)
    assert list(Transcriber(vocabulary).texts({"logits": time_major}, 1, "wer")["text"]) == [expected]


def test_token_numbers_and_lengths() -> None:
    """Numbers, as of a transducer, are not collapsed; positions after the length and numbers below 0 do not count."""
    vocabulary = Vocabulary("v", dict(enumerate(("<blk>", "a", "b"))), 0)
    rows = np.array([[1, 1, 2, 2], [2, -1, -1, -1]])
    outputs = {"tokens": rows, "token_lens": np.array([3, 1])}
    assert list(Transcriber(vocabulary).texts(outputs, 2, "wer")["text"]) == ["aab", "b"]


def test_vocabulary_of_metadata() -> None:
    vocabulary = vocabulary_in({"character": "x\ny"})
    assert vocabulary is not None and (vocabulary.size, vocabulary.blank) == (4, 0)
    assert with_blank(vocabulary, None, {"blank_id": "3"}).blank == 3
    assert vocabulary_in({}) is None


def test_vocabularies_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("a 0\nb 0\n")
    (tmp_path / "bytes.json").write_text('{"\u0120a": 0}')
    (tmp_path / "other.json").write_text('{"a": "b"}')
    for name, message in (("tokens.txt", "occurs twice"), ("bytes.json", "tokenizer.json"), ("other.json", "is none")):
        with pytest.raises(DataError, match=message):
            read_vocabulary(tmp_path / name)
    vocabulary = Vocabulary("v", {0: "a", 1: "b"})
    with pytest.raises(DataError, match=r"blank of CTC.*--blank 0, or --blank 2"):
        Transcriber(vocabulary).texts({"y": scores_of([0], 3)}, 1, "wer")
    with pytest.raises(DataError, match=r"v has 2 tokens, and no axis"):
        Transcriber(with_blank(vocabulary, 0, {})).texts({"y": scores_of([0], 7)}, 1, "wer")
    with pytest.raises(DataError, match="token 9, and v has 0 to 1"):
        Transcriber(vocabulary).texts({"y": np.array([[9]])}, 1, "wer")
    with pytest.raises(DataError, match="takes reference texts and the labels 'label'"):
        task_metric("wer").make().add({"y": np.array(["a"])}, {"label": np.array([1])})
