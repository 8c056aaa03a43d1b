"""Bad input of the commands of decoders: one line with exit code 2, and every file as before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import llm
from sbonnx.cli import main
from sbonnx.errors import ModelError
from sbonnx.llm.layout import read_decoder
from sbonnx.reconstruct.layer_fit import LayerFitter
from tests.conftest import PACK
from tests.llm.tiny_decoder import decoder_model, perplexity, token_windows, write_folder
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
    "no such file": (described(filename="n.onnx"), (), "check the path. Models there: model.onnx"),
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
    "empty arrays": (stored(b"", "t.npz"), ("--text", "t.npz"), "'t.npz' cannot be read: it is empty or cut off"),
    "no archive": (stored(b"PK\x03\x04x", "t.npz"), ("--text", "t.npz"), "it is cut off or damaged"),
    "other array": (arrays(x=token_windows()), ("--text", "t.npz"), "'t.npz' has no array 'ids' of token windows"),
    "long windows": (arrays(ids=token_windows(9, 65)), ("--text", "t.npz"), "LLM.WINDOW is 65 tokens, and the context"),
    "negative tokens": (arrays(ids=token_windows() - 9), ("--text", "t.npz"), "is negative: token ids are 0 and above"),
    "tokenizer is no tokenizer": (bool, ("--tokenizer", "m/model.onnx"), "cannot be read as a tokenizer"),
    "output in the input": (bool, ("-o", "m/q"), "'m/q' is in an input folder"),
    "output around the input": (bool, ("-o", "."), "'.' is or contains the input"),
    "output in a file": (bool, ("-o", "t.txt"), "'t.txt' is or contains the input"),
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


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_written(case: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    edit, arguments, text = CASES[case]
    edit(place)
    before = contents(place)
    options = {"--text": "t.txt", "-o": "q"} | dict(zip(arguments[::2], arguments[1::2], strict=True))
    line = said(["quantize", "m", "--no-latency", *chain.from_iterable(options.items())], capsys)
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
    monkeypatch.setattr("sbonnx.llm.decoder_stages.read_windows", None)
    assert "'q' cannot be written: no permission in" in said(["quantize", "m", "--text", "t.txt", "-o", "q"], capsys)


@pytest.mark.parametrize("name", ["cifar_resnet20", "minilm_l6"])
def test_a_model_that_is_no_decoder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = PACK / "models" / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"no model {path}")
    assert "for models that are no decoders there are sbonnx inspect and" in said(["inspect", str(path)], capsys)


def on_full_disk(words: Sequence[str], size: int) -> list[str]:
    """Run a command that fails, in which no file may be larger than `size` bytes; return the lines of stderr."""
    done = subprocess.run(
        limited([sys.executable, "-m", "sbonnx", "llm", *words], RLIMIT_FSIZE=size),
        env={**unmeasured(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr.splitlines()


@pytest.mark.slow
def test_a_full_disk(place: Path) -> None:
    """The written model has 30 kB."""
    before = contents(place)
    said = on_full_disk(["quantize", "m", "-o", "q", "--quiet", "--set", "MIN_WEIGHT_SIZE=0"], 16384)
    assert said == ["OutputError: 'q/model.onnx' cannot be written: File too large"]
    assert contents(place) == before


@pytest.mark.slow
def test_a_full_disk_and_the_run_after_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while layers are stored, then while the model is written: both runs go on where they ended."""
    np.savez(place / "ids.npz", ids=token_windows())
    before = contents(place)
    words = ["quantize", "m", "--text", "ids.npz", "-o", "q", "--quiet", "--no-latency", "--set", "MIN_WEIGHT_SIZE=0"]
    cached, output, take, rounded = [*words, "--cache", "c"], place / "q", LayerFitter._take, []

    def counted(self: LayerFitter, one: Any, layer: Any, choice: Any) -> None:
        rounded.append(layer.node.name)
        take(self, one, layer, choice)

    def written(words: Sequence[str]) -> tuple[bytes, int]:
        rounded.clear()
        assert main(["llm", *words]) == 0
        content = (output / "model.onnx").read_bytes()
        shutil.rmtree(output)
        return content, len(rounded)

    monkeypatch.setattr(LayerFitter, "_take", counted)
    whole, layers = written(words)
    assert contents(place) == before
    (said,) = on_full_disk(cached, 1024)
    assert said.startswith("OutputError: 'c/") and said.endswith(".rounded' cannot be written: File too large")
    assert not [path for path in contents(place).keys() - before.keys() if path.endswith(".rounded")]
    assert on_full_disk(cached, 16384) == ["OutputError: 'q/model.onnx' cannot be written: File too large"]
    stored = contents(place)
    assert len([path for path in stored.keys() - before.keys() if path.endswith(".rounded")]) == layers
    assert written(cached) == (whole, 0)
    assert contents(place) == stored


def externally(folder: Path) -> Path:
    """Move the weights of a folder's model to a data file, and return that."""
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return folder / "model.onnx.data"


@pytest.mark.parametrize("verb", ["quantize", "evaluate", "inspect"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_data_that_is_cut_off(verb: str, kept: float, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = externally(place / "m")
    content = data.read_bytes()
    data.write_bytes(content[: int(kept * len(content))])
    np.savez(place / "ids.npz", ids=token_windows())
    before = contents(place)
    more = {"quantize": ["--text", "ids.npz", "-o", "q"], "evaluate": ["--text", "ids.npz"], "inspect": []}[verb]
    line = said([verb, "m", *more], capsys)
    assert "of 'model.onnx.data', which has only" in line and "the file is cut off" in line, line
    assert contents(place) == before


def mixed_model(*, casts: bool) -> onnx.ModelProto:
    """Return the tiny decoder with float16 weights in one layer, and with casts also in its embedding and another."""
    model = decoder_model()
    halves = {"l0_wo", *(("embedding", "l1_wo") if casts else ())}
    for one in model.graph.initializer:
        if one.name in halves:
            one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one).astype(np.float16), one.name))
    if not casts:
        return model
    nodes, wide, narrow = [], TensorProto.FLOAT, TensorProto.FLOAT16
    for node in model.graph.node:
        weight = next((name for name in node.input if name in halves), None)
        output = node.output[0]
        if weight == "l1_wo":  # the product is of float32, by a Cast of its weight
            nodes.append(helper.make_node("Cast", [weight], ["wide"], to=wide))
            node.input[1] = "wide"
        if weight == "l0_wo":  # the product is of float16
            nodes.append(helper.make_node("Cast", [node.input[0]], ["narrow"], to=narrow))
            node.input[0] = "narrow"
        if weight in ("l0_wo", "embedding"):
            node.output[0] = f"{output}_narrow"
        nodes.append(node)
        if weight in ("l0_wo", "embedding"):
            nodes.append(helper.make_node("Cast", [f"{output}_narrow"], [output], to=wide))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def test_weights_of_two_types(tmp_path: Path) -> None:
    """With casts all are quantized; without, the product of two types is named."""
    write_folder(tmp_path / "wrong", mixed_model(casts=False))
    write_folder(tmp_path / "right", mixed_model(casts=True))
    with pytest.raises(
        ModelError, match=r"node 'n_l0_y' \(MatMul\) takes .* of float32 and 'l0_wo' of float16, .* insert a Cast"
    ):
        llm.quantize(tmp_path / "wrong", token_windows(), output=tmp_path / "q", overrides={"MIN_WEIGHT_SIZE": 0})
    assert not (tmp_path / "q").exists()
    llm.quantize(
        tmp_path / "right", token_windows(), output=tmp_path / "q", overrides={"MIN_WEIGHT_SIZE": 0}, latency=False
    )
    weights = read_decoder(tmp_path / "q").structure.weights
    assert Counter(weight.bits for weight in weights) == {4: 8, 8: 2}
    one, other = (perplexity(tmp_path / name / "model.onnx", token_windows(4))[1] for name in ("right", "q"))
    assert np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1] > 0.95
