"""Tokenizers from tokenizer.json, which is checked before native code reads it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, final

from sbonnx.calib.data.readers.normalizers import TREE_HEADER, normalized_length, normalizers_of
from sbonnx.errors import DataError, MissingReaderError, foreign_code
from sbonnx.system.input_files import read_json

INSTALL: Final = "pip install 'sbonnx[llm]'"

LARGEST: Final = 1 << 27
"""Maximum size of the file in bytes; that of a vocabulary of 256,000 tokens has 35 MB."""

LONGEST_TEXT: Final = 1 << 23
"""Maximum length in characters of a text that is tokenized at once, normalized or not, at up to 140 bytes of memory
each.
"""


@final
class TokenizerFile:
    """Tokenizer of the package tokenizers, without the truncation and the padding of its file.

    Trainers store those that they used last. They would cut calibration texts, or fill them with padding.

    Attributes:
        truncation, padding: of the file; {} if there is none.
        size: number of tokens.
    """

    def __init__(self, path: Path) -> None:
        """Read a file.

        Raises:
            DataError: it cannot be read or is no tokenizer, or the package tokenizers is not installed.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingReaderError(f"texts need the package tokenizers, which is not installed: {INSTALL}") from error
        self._path = path
        try:
            values = read_json(path, LARGEST)
        except OSError as error:
            raise DataError(f"the tokenizer '{path}' cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise DataError(f"'{path}' cannot be read as a tokenizer: {error}") from error
        if not isinstance(values, dict):
            raise DataError(f"'{path}' cannot be read as a tokenizer: it is no JSON object")
        self.truncation, self.padding = (
            section if isinstance(section := values.pop(key, None), dict) else {} for key in ("truncation", "padding")
        )
        for charsmap in _charsmaps(values.get("normalizer")):
            self._check_charsmap(charsmap)
        with self._native("cannot be read as a tokenizer"):
            self._tokenizer = Tokenizer.from_str(json.dumps({**values, "truncation": None, "padding": None}))
            self.size: int = self._tokenizer.get_vocab_size()
        self._normalizers = list(normalizers_of(values.get("normalizer")))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary does not have it."""
        with self._native("does not take a token"):
            number: int | None = self._tokenizer.token_to_id(token)
        return number

    def encode(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[Any]:
        """Return the encodings (`tokenizers.Encoding`) of texts or pairs of texts.

        Args:
            special: with special tokens around each.

        Raises:
            DataError: the tokenizer fails, or a text is too long.
        """
        for text in texts:
            parts = [text] if isinstance(text, str) else text
            length = sum(map(len, parts))
            with self._native("cannot normalize a text"):
                longest = sum(normalized_length(part, self._normalizers, LONGEST_TEXT) for part in parts)
            if longest > LONGEST_TEXT:
                what = f"has {length} characters"
                if length <= LONGEST_TEXT:
                    what += f", which the normalizer of '{self._path}' makes more than {LONGEST_TEXT}"
                raise DataError(f"a text {what}, and at most {LONGEST_TEXT} are tokenized at once: split it")
        with self._native("cannot encode a text"):
            encodings: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return encodings

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids.

        Raises:
            DataError: the tokenizer fails.
        """
        with self._native("cannot decode tokens"):
            text: str = self._tokenizer.decode(ids)
        return text

    def limit(self, most: int, pads: int | None, pad_id: int, pad_token: str) -> None:
        """Truncate encodings to `most` tokens, and pad those of one call to `pads`, or to the longest.

        Raises:
            DataError: the tokenizer does not take a value.
        """
        with self._native("does not take its padding"):
            self._tokenizer.enable_truncation(most)
            self._tokenizer.enable_padding(length=pads, pad_id=pad_id, pad_token=pad_token)

    def _check_charsmap(self, text: Any) -> None:
        """Check the size of the tree in a precompiled charsmap, for which native code allocates memory.

        Raises:
            DataError: the tree is larger than the map.
        """
        try:
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError):
            data = b""
        if int.from_bytes(data[:TREE_HEADER], "little") + TREE_HEADER > len(data):
            raise DataError(f"'{self._path}' cannot be read as a tokenizer: its precompiled_charsmap is damaged")

    def _native(self, fails: str) -> AbstractContextManager[None]:
        return foreign_code(lambda reason: DataError(f"'{self._path}' {fails}: {reason}"))


def _charsmaps(normalizer: Any) -> Iterator[Any]:
    """Yield the precompiled charsmaps of a normalizer and those within it."""
    left = [normalizer]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            if part.get("precompiled_charsmap") is not None:
                yield part["precompiled_charsmap"]
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
