"""Files of a downloaded decoder, and texts, that end the process, run without end or change calibration texts."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.cli import main
from sbonnx.errors import DataError, ModelError
from sbonnx.llm.layout import read_decoder
from sbonnx.llm.token_texts import TextTokenizer, read_documents
from sbonnx.llm.windows import read_windows
from sbonnx.system import chat_template
from tests.llm.tiny_decoder import WORDS, write_folder

pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

TEXT = " ".join(f"w{number % 62}" for number in range(600))
DEEP = "[" * 100_000


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a decoder "m" and texts; templates have a second."""
    write_folder(tmp_path / "m")
    (tmp_path / "t.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    return tmp_path


def edit(name: str, **values: Any) -> Callable[[Path], object]:
    """Change keys of a JSON file of the decoder."""

    def change(place: Path) -> None:
        path = place / "m" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def charsmap(data: bytes) -> Callable[[Path], object]:
    text = base64.b64encode(data).decode()
    normalizers = [{"type": "NFKC"}, {"type": "Precompiled", "precompiled_charsmap": text}]
    return edit("tokenizer.json", normalizer={"type": "Sequence", "normalizers": normalizers})


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda place: (place / name).write_text(content)


def template(text: str) -> Callable[[Path], object]:
    def change(place: Path) -> None:
        (place / "m" / "chat_template.jinja").write_text(text)
        (place / "t.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n")

    return change


def linked(name: str, to: str) -> Callable[[Path], object]:
    def change(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(to)

    return change


def fifo(name: str) -> Callable[[Path], object]:
    def change(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    return change


def sparse(name: str) -> Callable[[Path], object]:
    return lambda place: os.truncate(place / name, 3 << 30)


def genai(**decoder: Any) -> Callable[[Path], object]:
    return write("m/genai_config.json", json.dumps({"model": {"decoder": {"filename": "model.onnx", **decoder}}}))


SINGLE = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
TOKENIZER = "tokenizer.json"
LIMIT = "it needs more than 1 s or 1024 MiB"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NO_TOKEN = {"type": "TemplateProcessing", "single": SINGLE, "pair": SINGLE, "special_tokens": {}}
NO_UNK = {"type": "WordLevel", "vocab": {"w0": 0}, "unk_token": "[UNK]"}

CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "charsmap larger than its text": (
        charsmap(b"\xff\xff\xff\xff" + b"x" * 64),
        "t.txt",
        "precompiled_charsmap is damaged",
    ),
    "charsmap with wrong offsets": (charsmap(b"\x04\0\0\0" + b"\xff" * 4 + b"abc"), "t.txt", "tokenizer.json' cannot"),
    "charsmap of nothing": (charsmap(b""), "t.txt", "precompiled_charsmap is damaged"),
    "template without its token": (edit(TOKENIZER, post_processor=NO_TOKEN), "t.txt", "tokenizer.json' cannot"),
    "no unknown token": (edit(TOKENIZER, model=NO_UNK), "t.txt", "tokenizer.json' cannot encode a text"),
    "deep tokenizer": (write("m/tokenizer.json", DEEP), "t.txt", "nested too deeply"),
    "large tokenizer": (sparse("m/tokenizer.json"), "t.txt", "at most 134217728 are read"),
    "deep configuration": (write("m/config.json", DEEP), "t.txt", "nested too deeply"),
    "deep genai configuration": (write("m/genai_config.json", DEEP), "t.txt", "nested too deeply"),
    "deep tokenizer configuration": (write("m/tokenizer_config.json", DEEP), "t.txt", "nested too deeply"),
    "large configuration": (sparse("m/config.json"), "t.txt", "at most 67108864 are read"),
    "configuration without end": (linked("m/config.json", "/dev/zero"), "t.txt", "config.json"),
    "deep row": (write("t.jsonl", DEEP), "t.jsonl", "line 1 is no JSON: it is nested too deeply"),
    "half a surrogate pair": (write("t.jsonl", '{"text": "\\ud800"}'), "t.jsonl", "cannot encode a text"),
    "row without end": (
        lambda place: os.truncate(os.open("t.jsonl", os.O_CREAT | os.O_RDWR), 1 << 28),
        "t.jsonl",
        "has more than",
    ),
    "texts without end": (linked("t.txt", "/dev/zero"), "t.txt", "it is a device, not a regular file"),
    "texts in a FIFO": (fifo("t.txt"), "t.txt", "it is a FIFO (named pipe), not a regular file"),
    "rows in a FIFO": (fifo("t.jsonl"), "t.jsonl", "it is a FIFO (named pipe), not a regular file"),
    "windows in a FIFO": (fifo("t.npz"), "t.npz", "it is a FIFO (named pipe), not a regular file"),
    "a loop": (template(LOOPS), "t.jsonl", LIMIT),
    "a large number": (template("{{ 9 ** (9 ** 9) }}"), "t.jsonl", LIMIT),
    "a long number": (template("{{ (9 ** 99999) | string }}"), "t.jsonl", "Exceeds the limit (4300 digits)"),
    "a wide field": (template("{{ '%1000000000s' % 1 }}"), "t.jsonl", "the chat template of 'm' has an error"),
    "a long text": (template("{{ 'x' * 30000000 }}"), "t.jsonl", "becomes longer than 16777216 characters"),
    "recursion": (template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "t.jsonl", "rejects the messages"),
    "a deep template": (
        template("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}"),
        "t.jsonl",
        "chat template of 'm' has an error",
    ),
    "a large template": (
        lambda place: (template("x")(place), sparse("m/chat_template.jinja")(place)),
        "t.jsonl",
        "at most 1048576 are read",
    ),
    "half a pair in a name": (genai(filename="\ud800.onnx"), "t.txt", "names a model outside of its folder"),
    "a huge size": (genai(hidden_size=10**30), "t.txt", "'hidden_size' in 'm/genai_config.json' is 1000"),
    "truth as size": (genai(num_hidden_layers=True), "t.txt", "is true: a whole number above 0 is needed"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_one_line(case: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, text, message = CASES[case]
    change(place)
    assert main(["llm", "quantize", "m", "--text", text, "-o", "q", "--no-latency"]) == 2
    *native, line = capfd.readouterr().err.splitlines()  # packages in Rust print their stack, which the program hides
    assert message in line
    assert line.startswith(("DataError: ", "ModelError: "))
    assert not [each for each in native if each.startswith("Traceback")]
    assert not Path("q").exists()


def test_truncation_and_padding_of_the_file_have_no_effect(place: Path) -> None:
    """Trainers store those that they used last."""
    plain = read_windows(read_decoder("m"), "t.txt", window=16).ids
    assert plain.shape == (37, 16)
    edit(
        TOKENIZER,
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 9},
        padding={
            "strategy": {"Fixed": 900},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<s>",
        },
    )(place)
    assert np.array_equal(read_windows(read_decoder("m"), "t.txt", window=16).ids, plain)


def test_long_lines_are_cut_at_blanks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files and in rows: the tokens are those of the whole, and no piece is longer than both limits and a word."""
    monkeypatch.setattr("sbonnx.llm.token_texts.PIECE", 10)
    monkeypatch.setattr("sbonnx.llm.token_texts.LONGEST_LINE", 20)
    (place / "t.jsonl").write_text(json.dumps({"text": TEXT}))
    tokenizer = TextTokenizer(read_decoder("m"))
    whole = tokenizer.encode(TEXT)
    for texts in ("t.txt", "t.jsonl", [TEXT]):
        (pieces,) = [list(document) for document in read_documents(texts, tokenizer)]
        assert "".join(pieces) == TEXT
        assert max(map(len, pieces)) <= 10 + 20 + len(" w61")
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == whole


def test_windows_are_read_as_far_as_they_are_used(place: Path) -> None:
    """An archive of 65 kB with 64 MiB of tokens."""
    np.savez_compressed(place / "t.npz", ids=np.zeros((1 << 17, 64), np.int64))
    assert (place / "t.npz").stat().st_size < 1 << 17
    decoder = read_decoder("m")
    tracemalloc.start()
    found = read_windows(decoder, "t.npz", tokens=640).ids
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (10, 64)
    assert peak < 4 << 20


@pytest.mark.parametrize(("flags", "method", "message"), [(1, 8, "it is encrypted"), (0, 97, "by method 97 of zip")])
def test_archives_that_cannot_be_unpacked(flags: int, method: int, message: str, place: Path) -> None:
    np.savez(place / "t.npz", ids=np.zeros((9, 8), np.int64))
    content = bytearray((place / "t.npz").read_bytes())
    with zipfile.ZipFile(place / "t.npz") as archive:
        entry = archive.start_dir
    content[entry + 8], content[entry + 10] = flags, method
    (place / "t.npz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_windows(read_decoder("m"), "t.npz")


def test_sizes_are_those_of_the_file(place: Path) -> None:
    """A configuration of another model does not change what the file shows; ids that are none are errors."""
    edit("config.json", hidden_size=77, vocab_size=99, num_hidden_layers=9, bos_token_id=True)(place)
    decoder = read_decoder("m")
    assert (decoder.hidden, decoder.vocabulary, decoder.layers, decoder.bos) == (32, len(WORDS), 2, None)
    for value in ("1", [1, "2"], 1 << 40):
        model = {"decoder": {"filename": "model.onnx"}, "eos_token_id": value}
        (place / "m" / "genai_config.json").write_text(json.dumps({"model": model}))
        with pytest.raises(ModelError, match=r"'eos_token_id' in .* token ids are needed"):
            read_decoder("m")
