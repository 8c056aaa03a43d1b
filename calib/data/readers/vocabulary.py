"""Vocabularies: tokens.txt, vocab.json, tokenizer.json, and the metadata of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx.calib.data.readers.tokenizer_file import TokenizerFile
from sbonnx.errors import DataError
from sbonnx.metrics.transcription import BLANKS, Vocabulary
from sbonnx.system.input_files import read_regular

LARGEST: Final = 1 << 27
"""Maximum size of a vocabulary in bytes."""

CHARACTERS: Final = "character"
"""Metadata of PaddleOCR's recognizers: the characters, one a line, between the blank and a space."""

BLANK_KEYS: Final = ("blank_id", "blank")
"""Metadata that holds the number of the blank."""

BYTE_LEVEL: Final = "\u0120"
"""Character that begins a word in byte-level vocabularies, whose texts only a tokenizer can join."""


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary: ``.json`` of numbers by token or of tokens, a tokenizer.json, or text with a token a line.

    A line of text is a token, or a token and its number; without numbers, the first line is token 0.

    Raises:
        DataError: the file cannot be read or is no vocabulary.
    """
    source = f"vocabulary '{path}'"
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig")
        values = json.loads(text) if path.suffix.lower() == ".json" else _lines(text)
    except OSError as error:
        raise DataError(f"the {source} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the {source} cannot be read: {str(error).splitlines()[0][:200]}") from error
    if isinstance(values, dict) and "model" in values:
        tokenizer = TokenizerFile(path)
        names = ((tokenizer.id_of(name), name) for name in BLANKS)
        blanks = {number: name for number, name in names if number is not None}
        return _named(Vocabulary(source, {tokenizer.size - 1: "", **blanks}, join=tokenizer.decode))
    if isinstance(values, list) and all(isinstance(token, str) for token in values):
        values = {token: number for number, token in enumerate(values)} if len(set(values)) == len(values) else {}
    numbers = list(values.values()) if isinstance(values, dict) else []
    if not numbers or not all(type(number) is int and 0 <= number < LARGEST for number in numbers):
        raise DataError(f"the {source} is none: it holds a token a line, or JSON numbers by token, each once")
    if any(str(token).startswith(BYTE_LEVEL) for token in values):
        raise DataError(f"the {source} has byte-level tokens: give the tokenizer.json of the model instead")
    return _named(Vocabulary(source, {number: str(token) for token, number in values.items()}))


def vocabulary_in(metadata: Mapping[str, str]) -> Vocabulary | None:
    """Return the vocabulary in the metadata of a model; None without one."""
    if CHARACTERS not in metadata:
        return None
    tokens = [BLANKS[0], *metadata[CHARACTERS].splitlines(), " "]
    return Vocabulary(f"the metadata '{CHARACTERS}' of the model", dict(enumerate(tokens)), 0)


def with_blank(vocabulary: Vocabulary, given: int | None, metadata: Mapping[str, str]) -> Vocabulary:
    """Return a vocabulary with the blank that is given, else with that of the metadata, else with its own."""
    recorded = next((metadata[key] for key in BLANK_KEYS if key in metadata), "")
    if given is None and recorded.isdecimal():
        given = int(recorded)
    return vocabulary if given is None else replace(vocabulary, blank=given)


def _named(vocabulary: Vocabulary) -> Vocabulary:
    numbers = {token: number for number, token in vocabulary.tokens.items()}
    return replace(vocabulary, blank=next((numbers[name] for name in BLANKS if name in numbers), None))


def _lines(text: str) -> dict[str, Any]:
    """Parse lines of tokens, with or without numbers.

    Raises:
        ValueError: a token or a number occurs twice.
    """
    lines = re.split(r"\r?\n", text.rstrip("\r\n"))
    numbered = [re.fullmatch(r"(.*?)[ \t]+(\d+)\s*", line) for line in lines]
    rows = [(pair[1] or " ", int(pair[2])) for pair in numbered if pair]
    if len(rows) < len(lines):
        rows = [(line, number) for number, line in enumerate(lines)]
    if len({token for token, _ in rows}) < len(rows) or len({number for _, number in rows}) < len(rows):
        raise ValueError("a token or a number occurs twice")
    return dict(rows)
