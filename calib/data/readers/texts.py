"""Texts as feeds: tokenized with tokenizer.json, padded or cut to the length of the model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.labels import LABEL, LabelledFeed, batched_labels
from sbonnx.calib.data.objects import Source
from sbonnx.calib.data.readers.media_files import MediaFiles
from sbonnx.calib.data.readers.preprocess_values import PreprocessValues, truth, whole
from sbonnx.calib.data.readers.tokenizer_file import TokenizerFile
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError
from sbonnx.report.codes import Note
from sbonnx.system.input_files import parse_json, read_regular

KEYS: Final = ("tokenizer", "max_length", "pad")
LARGEST: Final = 1 << 28
"""Maximum size in bytes of a file of texts."""

MOST_TOKENS: Final = 1 << 16
"""Maximum number of tokens of a sample, at about 1 KB of memory each."""

DEFAULT_LENGTH: Final = 128
"""Maximum number of tokens where neither the model, the settings nor the tokenizer limits it."""

PADDING: Final = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")
"""Padding tokens of common vocabularies, for a tokenizer that names none."""

ID: Final = "_id"
"""Key of the id of a text in retrieval data (BEIR), whose "title" is put before the text."""

ROLES: Final = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "input_mask": "attention_mask",
    "token_type_ids": "type_ids",
    "segment_ids": "type_ids",
}
"""Attribute of tokenizers.Encoding by input name."""


@dataclass(frozen=True)
class Text:
    """One sample: a text or a pair of texts, with its labels by name."""

    where: str
    text: str
    pair: str | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)


def open_texts(files: MediaFiles, inputs: Sequence[InputSpec], settings: PreprocessValues) -> Source:
    """Open text files: each line of .txt is a sample, each row of .jsonl one with "text", "text_pair", "label".

    Raises:
        DataError: a file cannot be read, or see `tokenized`.
    """
    return tokenized(files.name, [text for path in files.paths for text in _read(path)], inputs, settings, files.notes)


def tokenized(
    name: str,
    texts: Sequence[Text],
    inputs: Sequence[InputSpec],
    settings: PreprocessValues,
    notes: Sequence[Note] = (),
) -> Source:
    """Open texts: one sample a feed, or as many as the model's fixed batch size, padded to equal length.

    Args:
        name: origin, for messages.
        notes: one sentence each about data that is not used.

    Raises:
        DataError: the settings or the inputs do not fit, or the package tokenizers is missing.
    """
    settings.check_keys(KEYS, "texts")
    roles = _roles(inputs)
    length, batch = _fixed(inputs, roles, 1), _fixed(inputs, roles, 0) or 1
    tokenizer = _tokenizer(settings, length)
    count = len(texts) // batch
    if not count:
        raise DataError(f"{name} holds {len(texts)} texts, and a batch of the model has {batch}: add texts")
    if len(texts) % batch:
        notes = (
            *notes,
            Note(
                "data-not-used",
                f"the last {len(texts) % batch} texts of {name} are no whole batch of {batch}: not used",
            ),
        )

    def at(place: int) -> tuple[str, LabelledFeed]:
        rows = texts[place * batch : (place + 1) * batch]
        encodings = tokenizer.encode([row.text if row.pair is None else (row.text, row.pair) for row in rows])
        feed = {
            key: np.array([getattr(encoding, role) for encoding in encodings], np.int64) for key, role in roles.items()
        }
        return rows[0].where, LabelledFeed(feed, batched_labels([row.labels for row in rows]))

    return Source(
        name,
        lambda: (at(place) for place in range(count)),
        count,
        at,
        lambda: [batch] * count,
        notes=tuple(notes),
    )


def _roles(inputs: Sequence[InputSpec]) -> dict[str, str]:
    """Return what fills each input, by its name.

    Raises:
        DataError: a required input has another name, or none takes token ids.
    """
    roles = {spec.name: ROLES[spec.name] for spec in inputs if spec.name in ROLES}
    other = [spec.name for spec in inputs if spec.name not in roles and not spec.optional]
    if len(other) == 1 and "ids" not in roles.values():
        roles[other.pop()] = "ids"
    if other or "ids" not in roles.values():
        names = ", ".join(f"'{name}'" for name in other or [spec.name for spec in inputs])
        raise DataError(f"texts fill {', '.join(ROLES)}, and the model needs {names}: give a Python file, data.py:f")
    return roles


def _fixed(inputs: Sequence[InputSpec], roles: dict[str, str], axis: int) -> int | None:
    """Return the fixed size of an axis of the inputs; None if it is dynamic.

    Raises:
        DataError: an input is no matrix (samples, tokens).
    """
    sizes = set()
    for spec in inputs:
        if spec.name in roles:
            if spec.shape is not None and len(spec.shape) != 2:
                raise DataError(f"input '{spec.name}' wants {spec}, and texts become (samples, tokens): data.py:f can")
            size = None if spec.shape is None else spec.shape[axis]
            sizes.add(size if isinstance(size, int) and size > 0 else None)
    return next((size for size in sizes if size is not None), None)


def _tokenizer(settings: PreprocessValues, length: int | None) -> TokenizerFile:
    """Open the tokenizer, with truncation and padding for inputs of a fixed length (None: dynamic)."""
    name = settings.value("tokenizer", "", _path, "the path of a tokenizer.json")
    if not name:
        raise DataError(f"{settings.where} has no tokenizer: set tokenizer to the path of a tokenizer.json")
    path = settings.folder / name
    tokenizer = TokenizerFile(path / "tokenizer.json" if path.is_dir() else path)
    given = settings.value("max_length", None, whole, "an integer above 0")
    if given is not None and length is not None and given > length:
        raise DataError(f"{settings.where}: max_length is {given}, and the inputs of the model have {length} tokens")
    if max(given or 0, length or 0) > MOST_TOKENS:
        what = "max_length" if length is None else "the number of tokens of the model's inputs"
        raise DataError(f"{settings.where}: {what} is {given or length}, and texts have at most {MOST_TOKENS} tokens")
    own = tokenizer.truncation.get("max_length")
    own = min(own, MOST_TOKENS) if isinstance(own, int) and own > 0 else DEFAULT_LENGTH
    padding = tokenizer.padding
    token = padding.get("pad_token") or next(
        (candidate for candidate in PADDING if tokenizer.id_of(candidate) is not None), None
    )
    number = padding.get("pad_id", (tokenizer.id_of(token) or 0) if token else 0)
    pads = length or (given if settings.value("pad", False, truth, "true or false") else None)
    tokenizer.limit(given or length or own, pads, number, token or "[PAD]")
    return tokenizer


def _path(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no path")
    return value


def _read(path: Path) -> Iterator[Text]:
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"line {number} of '{path}'"
            yield Text(where, line) if path.suffix.lower() == ".txt" else _row(line, where)


def _row(line: str, where: str) -> Text:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {str(error)[:100]}") from error
    text, pair = (row.get("text"), row.get("text_pair")) if isinstance(row, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(pair, (str, type(None))):
        raise DataError(f'{where} must be an object with a string "text", and "text_pair" and "label" if it has them')
    title = row.get("title")
    if ID in row and isinstance(title, str):
        text = f"{title} {text}".strip()
    return Text(where, text, pair, {name: row[name] for name in (LABEL, ID) if name in row})
