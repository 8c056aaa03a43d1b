"""Nothing that acts on a terminal leaves in a line, and lines that are too long keep their begin and end."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.system.terminal import LINE_LENGTH, escaped, json_escaped, one_line, relative_paths

TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)
"""Any code points, halves of surrogate pairs too."""

BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Classes of the controls that reorder text (UAX 9)."""


def acts(character: str) -> bool:
    """Whether a character acts on a terminal or has no encoding, by the Unicode database."""
    kind = unicodedata.category(character)
    return kind in ("Cc", "Cs") or unicodedata.bidirectional(character) in BIDIRECTIONAL


@given(TEXTS)
def test_no_character_that_acts(text: str) -> None:
    assert not [one for one in escaped(text) if acts(one)]
    line = one_line(text)
    assert not [one for one in line if acts(one)] and len(line.splitlines()) <= 1
    line.encode()


@given(st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS)))
def test_json_stays_the_same_value(value: dict[str, object]) -> None:
    written = json_escaped(json.dumps(value, ensure_ascii=False))
    assert not [one for one in written if acts(one)]
    assert json.loads(written) == value


@given(TEXTS, st.integers(0, 3000), TEXTS)
def test_never_longer_than_the_limit(head: str, length: int, tail: str) -> None:
    assert len(one_line(head + "name" * length + tail, LINE_LENGTH)) <= LINE_LENGTH


@pytest.mark.parametrize(("name", "shown"), [("ab" * 5000, "abab"), ("\x1b[2J" * 5000, r"\x1b[2J")])
def test_a_long_name_loses_its_middle(name: str, shown: str) -> None:
    """Cause and fix stay in the line."""
    line = one_line(f"ModelError: node '{name}' has no type: run onnx.shape_inference on it", LINE_LENGTH)
    assert line.startswith(f"ModelError: node '{shown}") and "…" in line
    assert line.endswith("has no type: run onnx.shape_inference on it")


def test_ordinary_text_stays() -> None:
    text = "größer 层 שלום مرحبا 🙂 a\\b [red] 'layer/1'"
    assert escaped(text) == one_line(text) == text
    assert escaped("a\nb\x9bc\u202ed\U000e0041", keep="\n") == "a\nb\\x9bc\\u202ed\\U000e0041"


def test_paths_below_the_working_folder_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    assert relative_paths(f"'{here}/a/m.onnx' and {here}/b: {here}x/c, /other{here}/d, {here}") == (
        f"'a/m.onnx' and b: {here}x/c, /other{here}/d, {here}"
    )
    monkeypatch.chdir("/")
    assert relative_paths("/a/b") == "/a/b"
