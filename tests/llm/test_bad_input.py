"""Bad input of the commands of decoders: one line with exit code 2, and every file as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.cli import main
from tests.conftest import PACK
from tests.llm.tiny_decoder import token_windows, write_folder
from tests.support.coverage import unmeasured
from tests.support.limits import limited

ROOT = Path(__file__).resolve().parents[2]
WORDS = " ".join(f"w{number % 62}" for number in range(600))

Edit = Callable[[Path], object]
"""Changes the folder "m" or the texts of a working folder."""


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def genai(value: Any) -> Edit:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda place: (place / "m" / "genai_config.json").write_bytes(text)


def described(*, context: Any = 64, **decoder: Any) -> Edit:
    """Description of the tiny decoder, with other values."""
    names = {"filename": "model.onnx", "inputs": {"input_ids": "input_ids"}, "head_size": 32}
    return genai({"model": {"decoder": {**names, **decoder}, "context_length": context}})


def stored(content: bytes, name: str = "t.txt") -> Edit:
    return lambda place: (place / name).write_bytes(content)


def arrays(**values: Any) -> Edit:
    return lambda place: np.savez(place / "t.npz", **values)


def template(content: bytes) -> Edit:
    def edit(place: Path) -> None:
        (place / "m" / "chat_template.jinja").write_bytes(content)
        row = {"messages": [{"role": "user", "content": "w1"}]}
        (place / "t.jsonl").write_text((json.dumps(row) + "\n") * 9)

    return edit


CASES: dict[str, tuple[Edit, tuple[str, ...], str]] = {
    "configuration is no JSON": (genai(b"{"), (), "genai_config.json' cannot be read as JSON"),
    "configuration is a list": (genai([]), (), "must have a JSON object, and has list"),
    "no decoder": (genai({"model": {}}), (), "has no model.decoder"),
    "no file name": (genai({"model": {"decoder": {}}}), (), "does not name the model"),
    "no such file": (described(filename="n.onnx"), (), "check the path. Similar names there: model.onnx"),
    "file elsewhere": (described(filename="../m.onnx"), (), "outside of its folder (model.decoder.filename is"),
    "absolute file": (described(filename="/m.onnx"), (), "outside of its folder (model.decoder.filename is"),
    "names in a list": (described(inputs=["input_ids"]), (), "model.decoder.inputs of"),
    "size is text": (described(head_size="32"), (), "'head_size' in"),
    "context is text": (described(context="64"), (), 'is "64": a whole number above 0 is needed'),
    "context of nothing": (described(context=0), (), "is 0: a whole number above 0 is needed"),
    "short context": (described(context=40), ("--window", "41"), "has 40: use at most 40"),
    "context of one token": (described(context=1), (), "LLM.WINDOW is 1 tokens: use at least 2"),
    "window of one token": (bool, ("--window", "1"), "LLM.WINDOW is 1 tokens: use at least 2"),
    "empty text": (stored(b""), (), "the texts have 0 tokens: at least 2 are needed"),
    "spaces": (stored(b" \n\n "), (), "the texts have 0 tokens: at least 2 are needed"),
    "binary text": (stored(bytes(range(256))), (), "t.txt' is not UTF-8 text"),
    "binary lines": (stored(bytes(range(128, 256)), "t.jsonl"), ("--text", "t.jsonl"), "t.jsonl' is not UTF-8 text"),
    "template with an error": (template(b"{% for %}"), ("--text", "t.jsonl"), "the chat template of 'm' has an error"),
    "template that fails": (template(b"{{ 1 / 0 }}"), ("--text", "t.jsonl"), "line 1: the chat template rejects"),
    "binary template": (template(b"\xff\xff"), ("--text", "t.jsonl"), "chat_template.jinja' is not UTF-8 text"),
    "empty arrays": (stored(b"", "t.npz"), ("--text", "t.npz"), "'t.npz' has no array 'ids' of token windows"),
    "no archive": (stored(b"PK\x03\x04x", "t.npz"), ("--text", "t.npz"), "'t.npz' has no array 'ids' of token windows"),
    "other array": (arrays(x=token_windows()), ("--text", "t.npz"), "'t.npz' has no array 'ids' of token windows"),
    "long windows": (arrays(ids=token_windows(9, 65)), ("--text", "t.npz"), "LLM.WINDOW is 65 tokens, and the context"),
    "negative tokens": (arrays(ids=token_windows() - 9), ("--text", "t.npz"), "is negative: token ids are 0 and above"),
    "tokenizer is no tokenizer": (bool, ("--tokenizer", "m/model.onnx"), "cannot be read as a tokenizer"),
    "output in the input": (bool, ("-o", "m/q"), "'m/q' is in the input folder"),
    "output around the input": (bool, ("-o", "."), "'.' is or contains the input"),
    "output in a file": (bool, ("-o", "t.txt"), "'t.txt' is not a folder"),
    "output in no folder": (bool, ("-o", "a/q"), "to write 'q' to: create it first"),
    "bits of another runtime": (bool, ("--backend", "tensorrt", "--bits", "w2"), "must be 4 for the backend tensorrt"),
    "caches of another runtime": (bool, ("--backend", "tensorrt", "--kv", "8"), "caches are quantized for kernels of"),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with a decoder and a text."""
    write_folder(tmp_path / "m")
    (tmp_path / "t.txt").write_text(WORDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of a command that ends with exit code 2."""
    assert main(["llm", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal error" not in line
    return line


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_written(case: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    edit, arguments, text = CASES[case]
    edit(place)
    before = contents(place)
    line = said(["quantize", "m", "--text", "t.txt", "-o", "q", "--no-latency", *arguments], capsys)
    assert text in line
    assert contents(place) == before


def test_limits_need_something_to_compare_with(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = ["--max-perplexity", "1%"]
    assert "give the float decoder with --against" in said(["evaluate", "m", "--text", "t.txt", *limit], capsys)
    assert "none were given: give --text" in said(["quantize", "m", "-o", "q", *limit], capsys)


def test_a_folder_without_permission(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Said before the work begins; the superuser may write everywhere, so the answer of the system is replaced."""
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: access(path, mode) and not mode & os.W_OK)
    monkeypatch.setattr("sbonnx.llm.api.read_windows", None)
    assert "'q' cannot be written: no permission in" in said(["quantize", "m", "--text", "t.txt", "-o", "q"], capsys)


@pytest.mark.parametrize("name", ["cifar_resnet20", "minilm_l6"])
def test_a_model_that_is_no_decoder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = PACK / "models" / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"no model {path}")
    assert "for models that are no decoders there are sbonnx inspect and" in said(["inspect", str(path)], capsys)


def test_a_full_disk(place: Path) -> None:
    """No file may be larger than the limit, and the written model has 30 kB."""
    before = contents(place)
    words = ["quantize", "m", "-o", "q", "--quiet", "--set", "MIN_WEIGHT_SIZE=0"]
    done = subprocess.run(
        limited([sys.executable, "-m", "sbonnx", "llm", *words], RLIMIT_FSIZE=16384),
        env={**unmeasured(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["OutputError: 'q/model.onnx' cannot be written: File too large"]
    assert contents(place) == before
