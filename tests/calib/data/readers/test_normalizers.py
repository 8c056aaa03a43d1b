"""Lengths of normalized texts: never underestimated, and no text that is too long is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sbonnx.calib.data.readers import tokenizer_file
from sbonnx.calib.data.readers.normalizers import Normalizer, normalized_length, normalizers_of
from sbonnx.calib.data.readers.tokenizer_file import TokenizerFile
from sbonnx.errors import DataError

tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

LONGEST = "\ufdfa"
"""One character of which NFKC and NFKD make 18."""

TEXTS = ("", "a b", "\u0130\ufb2c\u1f82", LONGEST * 9, "\u4e2d\u6587", "e\u0301 \u00e9", "aa a" * 40)


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


KINDS: dict[str, dict[str, Any]] = {
    **{
        kind: {"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Nmt", "StripAccents")
    },
    "Strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "Bert": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": False,
        "lowercase": True,
    },
    "Prepend": {"type": "Prepend", "prepend": "abc"},
    "text": replace("xyz", String="a"),
    "shorter": replace("", String="aa"),
    "expression": replace("xy", Regex="a| |$"),
    "nothing": replace("xy", Regex=""),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_bounds_hold(kind: str, text: str) -> None:
    """Both the bound and the measurement are at least the length that the package makes."""
    normalizer = Normalizer(KINDS[kind])
    made = len(normalizer.apply(text))
    assert normalizer.bound(len(text)) >= made
    for limit in (40, 100, 10_000):
        found = normalizer.length_of(text, limit)
        assert found >= made or found > limit


def opened(folder: Path, *normalizers: dict[str, Any]) -> TokenizerFile:
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    values = {"model": model, "normalizer": {"type": "Sequence", "normalizers": list(normalizers)}}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return TokenizerFile(folder / "tokenizer.json")


@pytest.mark.parametrize(
    "normalizers",
    [
        [replace("a" * 1000, String="a")] * 20,
        [{"type": "Sequence", "normalizers": [replace(" " * 1000, Regex=" *")] * 20}],
        [{"type": "NFKD"}, replace(" " * 1_000_000, String=" "), {"type": "BertNormalizer", **KINDS["Bert"]}],
        [replace("", String=LONGEST), replace("b" * 10_000_000, Regex="a?")],
    ],
)
def test_texts_that_grow_are_refused(normalizers: list[dict[str, Any]], tmp_path: Path) -> None:
    """A hundred characters become more than any memory holds; pairs of texts too."""
    tokenizer = opened(tmp_path, *normalizers)
    for text in ("a " * 50, ("", "a " * 50)):
        with pytest.raises(
            DataError, match=r"a text has 100 characters, which the normalizer .* makes more than 8388608"
        ):
            tokenizer.encode([text])


def test_what_is_long_before_normalization_may_become_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case of a normalizer refuses no text that it does not lengthen."""
    monkeypatch.setattr(tokenizer_file, "LONGEST_TEXT", 1000)
    tokenizer = opened(tmp_path, {"type": "NFKD"}, KINDS["Bert"], replace("_", String=" "))
    assert len(tokenizer.encode(["abc " * 240])[0].ids) == 1
    for text in (LONGEST * 60, "\u4e2d" * 400):
        with pytest.raises(DataError, match="split it"):
            tokenizer.encode([text])
    assert [each.values["type"] for each in normalizers_of({"type": "NFC"})] == ["NFC"]
    assert normalized_length("abc", [], 10) == 3
