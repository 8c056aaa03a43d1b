"""Texts and tokens: text files, chat messages through the chat template, the tokenizer."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TextIO, final

from sbonnx.calib.data.readers.tokenizer_file import INSTALL, TokenizerFile
from sbonnx.errors import DataError, MissingDataError, MissingReaderError
from sbonnx.llm.layout import SENTENCEPIECE, TOKENIZER, TOKENIZER_CONFIG, Decoder
from sbonnx.system.chat_template import ChatTemplate, TemplateFault
from sbonnx.system.input_files import open_regular, parse_json, read_json, read_regular

TEMPLATE_FILE: Final = "chat_template.jinja"
TEXT_SUFFIXES: Final = (".txt", ".jsonl")

PIECE: Final = 1 << 20
"""Characters of a text that are tokenized at a time; pieces end at a line, or within a long line at a blank."""

LONGEST_LINE: Final = 1 << 20
"""Characters of a line that a piece may have beyond `PIECE`."""

LARGEST_ROW: Final = 1 << 26
"""Maximum length of a line of .jsonl in characters."""

LARGEST_TEMPLATE: Final = 1 << 20
"""Maximum size of a chat template in bytes."""

SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Special tokens that chat templates may name."""

Texts = str | os.PathLike[str] | Iterable[str]
"""A .txt or .jsonl file, a folder of them, or texts."""


@final
class TextTokenizer:
    """Tokenizer of a decoder, with its special tokens and chat template.

    Attributes:
        bos: token that starts a window; None if the tokenizer adds none.
        eos: token between texts; None if there is none.
        size: number of tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Read tokenizer.json and the files next to it.

        Raises:
            DataError: it is missing or cannot be read, or the package tokenizers is not installed.
        """
        self._tokenizer = _open(decoder)
        self._decoder = decoder
        self._config = _optional_json(decoder, TOKENIZER_CONFIG)
        self.size = self._tokenizer.size
        self.bos = self._first_token()
        named = self._named("eos_token")
        self.eos = decoder.eos[0] if decoder.eos else None if named is None else self._tokenizer.id_of(named)
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode([text], special=False)[0].ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(list(ids))

    def chat(self, messages: list[Any], where: str) -> str:
        """Render messages with the chat template.

        Args:
            messages: mappings with "role" and "content".
            where: place of the messages, for errors.

        Raises:
            DataError: there is no chat template, or it rejects the messages.
        """
        template = self._chat_template(where)
        try:
            return template.render(messages)
        except TemplateFault as error:
            self._template = None  # its process may have ended
            raise DataError(f"{where}: the chat template rejects the messages: {error}") from error

    def _chat_template(self, where: str) -> ChatTemplate:
        """Compile the chat template."""
        if self._template is None:
            if find_spec("jinja2") is None:
                raise MissingReaderError(f"messages need the package jinja2, which is not installed: {INSTALL}")
            path = self._decoder.beside(TEMPLATE_FILE)
            text = self._config.get("chat_template") if path is None else _read(path)
            if isinstance(text, list):  # several by name
                named = (
                    template for template in text if isinstance(template, Mapping) and template.get("name") == "default"
                )
                text = next((template.get("template") for template in named), None)
            if not isinstance(text, str):
                raise DataError(
                    f"{where}: messages need a chat template, and there is none in {TEMPLATE_FILE} or "
                    f"{TOKENIZER_CONFIG}: give texts instead"
                )
            names = {name: token for name in SPECIAL if (token := self._named(name)) is not None}
            try:
                self._template = ChatTemplate(text, names)
            except (TemplateFault, OSError) as error:
                raise DataError(
                    f"the chat template of '{self._decoder.model.parent}' has an error: {error}: correct it, or give "
                    "texts"
                ) from error
        return self._template

    def _first_token(self) -> int | None:
        """Return the token that the tokenizer puts before every text, or that its configuration asks for."""
        probe = "a"
        plain, full = self.encode(probe), self._tokenizer.encode([probe])[0].ids
        if full[:1] != plain[:1] and full:
            return int(full[0])
        named = self._named("bos_token")
        if self._config.get("add_bos_token") and named is not None:
            return self._tokenizer.id_of(named)
        return None

    def _named(self, name: str) -> str | None:
        """Return the text of a special token of tokenizer_config.json."""
        value = self._config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None


def _open(decoder: Decoder) -> TokenizerFile:
    if decoder.tokenizer is None:
        given = next((name for name in SENTENCEPIECE if decoder.beside(name) is not None), None)
        if given is not None:
            raise DataError(
                f"'{decoder.model.parent}' has a sentencepiece tokenizer ({given}) and no {TOKENIZER}: convert it with "
                "transformers, AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
            )
        raise DataError(f"'{decoder.model.parent}' has no {TOKENIZER}: give it with --tokenizer FILE")
    return TokenizerFile(decoder.tokenizer)


def _optional_json(decoder: Decoder, name: str) -> dict[str, Any]:
    """Return the contents of a file beside the tokenizer; {} if there is none."""
    path = decoder.beside(name)
    if path is None:
        return {}
    try:
        value = read_json(path)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"'{path}' cannot be read as JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def read_documents(texts: Texts, tokenizer: TextTokenizer) -> Iterator[Iterable[str]]:
    """Yield documents as pieces of text, lazily and in order: files of a folder by name, lines of .jsonl.

    Args:
        texts: a path, or an iterable of texts.

    Raises:
        DataError: a path does not exist or is of no known kind, or a line has neither text nor messages.
    """
    if isinstance(texts, (str, os.PathLike)):
        path = Path(texts)
        if isinstance(texts, str) and ("\n" in texts or not path.exists()) and path.suffix not in TEXT_SUFFIXES:
            raise MissingDataError(f"there is no file or folder of texts '{texts[:80]}'; texts themselves go in a list")
        yield from _read_path(path, tokenizer)
        return
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {number} is of type {type(text).__name__}: texts are strings")
        yield _pieces(io.StringIO(text), Path())


def _read_path(path: Path, tokenizer: TextTokenizer) -> Iterator[Iterable[str]]:
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.suffix in TEXT_SUFFIXES)
        if not files:
            raise DataError(f"folder '{path}' has no .txt or .jsonl files")
        for file in files:
            yield from _read_path(file, tokenizer)
        return
    if path.suffix not in TEXT_SUFFIXES:
        raise DataError(f"'{path}' is no text: known are .txt, .jsonl and folders of them")
    with _readable(path), io.TextIOWrapper(open_regular(path), encoding="utf-8") as opened:
        if path.suffix == ".txt":
            yield _pieces(opened, path)
        else:
            yield from _lines(opened, path, tokenizer)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise DataError where a file cannot be read as text."""
    try:
        yield
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text: {error}") from None


def _read(path: Path) -> str:
    with _readable(path):
        return read_regular(path, LARGEST_TEMPLATE).decode("utf-8")


def _pieces(file: TextIO, path: Path) -> Iterator[str]:
    """Yield a text in pieces that end at a line, or before a blank of a line that is too long for a piece."""
    rest = ""
    with _readable(path):
        while text := rest + file.read(PIECE):
            rest = ""
            more = file.readline(LONGEST_LINE)
            text += more
            if len(more) == LONGEST_LINE and not more.endswith("\n"):
                cut = max(text.rfind(blank) for blank in " \t\n")
                if cut > 0:
                    text, rest = text[:cut], text[cut:]
            yield text


def _rows(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file.

    Raises:
        DataError: a line is too long.
    """
    number = 0
    while line := file.readline(LARGEST_ROW + 1):
        number += 1
        if len(line) > LARGEST_ROW:
            raise DataError(f"'{path}' line {number} has more than {LARGEST_ROW} characters: cut it into several")
        yield line


def _lines(file: TextIO, path: Path, tokenizer: TextTokenizer) -> Iterator[Iterable[str]]:
    for number, line in enumerate(_rows(file, path), 1):
        if not line.strip():
            continue
        where = f"'{path}' line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON: {error}") from None
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            yield _pieces(io.StringIO(row["text"]), path)
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            yield _pieces(io.StringIO(tokenizer.chat(row["messages"], where)), path)
        else:
            raise DataError(f'{where} has neither "text" nor "messages"')
