"""Texts and tokens: text files, chat messages through the chat template, the tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO, final

from sbonnx.errors import DataError
from sbonnx.llm.layout import SENTENCEPIECE, TOKENIZER, TOKENIZER_CONFIG, Decoder

INSTALL: Final = "pip install 'sbonnx[llm]'"
TEMPLATE_FILE: Final = "chat_template.jinja"
TEXT_SUFFIXES: Final = (".txt", ".jsonl")

PIECE: Final = 1 << 20
"""Characters of a text file that are read at a time; pieces end at a line."""

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
        self.size: int = self._tokenizer.get_vocab_size()
        self.bos = self._first_token()
        named = self._named("eos_token")
        self.eos = decoder.eos[0] if decoder.eos else None if named is None else self._tokenizer.token_to_id(named)
        self._template: Any = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def chat(self, messages: list[Any], where: str) -> str:
        """Render messages with the chat template.

        Args:
            messages: mappings with "role" and "content".
            where: place of the messages, for errors.

        Raises:
            DataError: there is no chat template, or it rejects the messages.
        """
        import jinja2

        template = self._chat_template(where)
        names = {name: text for name in SPECIAL if (text := self._named(name)) is not None}
        try:
            return str(template.render(messages=messages, add_generation_prompt=False, **names))
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise DataError(f"{where}: the chat template rejects the messages: {error}") from error

    def _chat_template(self, where: str) -> Any:
        """Compile the chat template, in a sandbox: it comes with the model."""
        if self._template is None:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            path = self._decoder.beside(TEMPLATE_FILE)
            text = self._config.get("chat_template") if path is None else _read(path)
            if isinstance(text, list):  # several by name
                named = (each for each in text if isinstance(each, Mapping) and each.get("name") == "default")
                text = next((each.get("template") for each in named), None)
            if not isinstance(text, str):
                raise DataError(
                    f"{where}: messages need a chat template, and there is none in {TEMPLATE_FILE} or "
                    f"{TOKENIZER_CONFIG}: give texts instead"
                )
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _raise
            try:
                self._template = environment.from_string(text)
            except TemplateError as error:
                raise DataError(
                    f"the chat template of '{self._decoder.model.parent}' has an error: {error}: correct it, or give "
                    "texts"
                ) from error
        return self._template

    def _first_token(self) -> int | None:
        """Return the token that the tokenizer puts before every text, or that its configuration asks for."""
        probe = "a"
        plain, full = self.encode(probe), self._tokenizer.encode(probe, add_special_tokens=True).ids
        if full[:1] != plain[:1] and full:
            return int(full[0])
        named = self._named("bos_token")
        if self._config.get("add_bos_token") and named is not None:
            found: int | None = self._tokenizer.token_to_id(named)
            return found
        return None

    def _named(self, name: str) -> str | None:
        """Return the text of a special token of tokenizer_config.json."""
        value = self._config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None


def _raise(message: str) -> None:
    raise ValueError(message)


def _open(decoder: Decoder) -> Any:
    if decoder.tokenizer is None:
        given = next((name for name in SENTENCEPIECE if decoder.beside(name) is not None), None)
        if given is not None:
            raise DataError(
                f"'{decoder.model.parent}' has a sentencepiece tokenizer ({given}) and no {TOKENIZER}: convert it with "
                "transformers, AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
            )
        raise DataError(f"'{decoder.model.parent}' has no {TOKENIZER}: give it with --tokenizer FILE")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(f"texts need the package tokenizers, which is not installed: {INSTALL}") from error
    try:
        return Tokenizer.from_file(str(decoder.tokenizer))
    except Exception as error:  # the package raises Exception itself
        raise DataError(f"'{decoder.tokenizer}' cannot be read as a tokenizer: {error}") from error


def _optional_json(decoder: Decoder, name: str) -> dict[str, Any]:
    """Return the contents of a file beside the tokenizer; {} if there is none."""
    path = decoder.beside(name)
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
            raise DataError(f"there is no file or folder of texts '{texts[:80]}'; texts themselves go in a list")
        yield from _read_path(path, tokenizer)
        return
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {number} is of type {type(text).__name__}: texts are strings")
        yield [text]


def _read_path(path: Path, tokenizer: TextTokenizer) -> Iterator[Iterable[str]]:
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in TEXT_SUFFIXES)
        if not files:
            raise DataError(f"folder '{path}' has no .txt or .jsonl files")
        for file in files:
            yield from _read_path(file, tokenizer)
        return
    if path.suffix not in TEXT_SUFFIXES:
        raise DataError(f"'{path}' is no text: known are .txt, .jsonl and folders of them")
    with _readable(path), open(path, encoding="utf-8") as opened:
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
        return path.read_text(encoding="utf-8")


def _pieces(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces that end at a line."""
    with _readable(path):
        while text := file.read(PIECE):
            yield text + file.readline()


def _lines(file: Iterable[str], path: Path, tokenizer: TextTokenizer) -> Iterator[Iterable[str]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"'{path}' line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON: {error}") from None
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            yield [row["text"]]
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            yield [tokenizer.chat(row["messages"], where)]
        else:
            raise DataError(f'{where} has neither "text" nor "messages"')
