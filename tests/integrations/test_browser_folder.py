"""Folders for transformers.js: files of each dtype, the choice by bytes, and a pipeline that loads them in Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from sbonnx.errors import OutputError
from sbonnx.integrations.browser_folder import SUFFIXES, choose
from sbonnx.report.outcome import FolderFile
from tests.support.models import model, run

WORDS = 64
IDS = "int64[N,T] input_ids, int64[N,T] attention_mask, int64[N,T] token_type_ids"
NET = (
    f"g ({IDS}) => (float[N,T,64] last_hidden_state) "
    + """{
    e = Gather(table, input_ids)
    s = Cast<to=1>(token_type_ids)
    m = Cast<to=1>(attention_mask)
    p = Add(s, m)
    q = Unsqueeze(p, axis)
    x = Mul(e, q)
    a = MatMul(x, w)
    b = Relu(a)
    last_hidden_state = MatMul(b, v)
}"""
)
SCRIPT = """
import path from 'node:path'; import { createRequire } from 'node:module'; import { pathToFileURL } from 'node:url';
const [modules, folder, ...dtypes] = process.argv.slice(2);
const find = createRequire(path.resolve(modules, '..', 'x.js'));
const t = await import(pathToFileURL(find.resolve('@huggingface/transformers')).href);
t.env.allowRemoteModels = false; t.env.localModelPath = path.dirname(folder) + '/';
const outputs = {};
for (const dtype of dtypes) {
  const named = dtype === 'chosen' ? {} : { dtype };
  const run = await t.pipeline('feature-extraction', path.basename(folder), { ...named, device: 'cpu' });
  const out = await run('w10 w20 w30 w7'); outputs[dtype] = [...out.data]; await run.dispose?.();
}
console.log(JSON.stringify(outputs));
"""


def sqnr(expected: np.ndarray, computed: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / np.square(expected - computed).sum()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written folder, of a small encoder with a tokenizer of words, with a limit that admits q4 and not q8."""
    root = tmp_path_factory.mktemp("browser")
    source = root / "float"
    source.mkdir()
    rng = np.random.default_rng(0)
    table = rng.standard_normal((WORDS, 64)).astype(np.float32)
    encoder = model(NET, table=table, w=(64, 256), v=(256, 64), axis=np.array([2], np.int64))
    onnx.save(encoder, source / "model.onnx")
    vocabulary = {f"w{index}": index for index in range(WORDS)}
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (source / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    ids = rng.integers(0, WORDS, (16, 8))
    np.savez(root / "data.npz", input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))
    command = ["quantize", str(source), "--data", str(root / "data.npz"), "-o", str(root / "web"), "--backend", "web"]
    assert main([*command, "--report", str(root / "report.html"), "-q"]) == 2
    assert main([*command, "--max-download", "60000", "--report", str(root / "report.json"), "-q"]) == 0
    return root / "web"


def test_each_dtype_is_written_and_the_best_that_fits_is_selected(folder: Path) -> None:
    names = {path.name for path in (folder / "onnx").iterdir()}
    assert names == {f"model{suffix}.onnx" for suffix in SUFFIXES.values()}
    report = json.loads((folder.parent / "report.json").read_text())
    rows = {row["dtype"]: row for row in report["variants"]}
    assert {dtype: row["bytes"] for dtype, row in rows.items()} == {
        dtype: (folder / "onnx" / f"model{suffix}.onnx").stat().st_size for dtype, suffix in SUFFIXES.items()
    }
    fitting = [row for row in rows.values() if row["bytes"] <= 60000]
    best = max(fitting, key=lambda row: row["sqnr_db"])
    assert 0 < len(fitting) < len(rows) and [row for row in rows.values() if row["chosen"]] == [best]
    config = json.loads((folder / "config.json").read_text())
    assert config["transformers.js_config"] == {"dtype": {"model": best["dtype"]}} and config["model_type"] == "bert"
    levels = {
        attribute.i
        for dtype in ("q4", "q4f16")
        for node in onnx.load(folder / "onnx" / f"model{SUFFIXES[dtype]}.onnx").graph.node
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    }
    assert levels == {1}


def test_variants_that_quantize_nothing_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of fewer than 256 values are not worth the ops that decode them."""
    text = "g (float[N,3,8,8] x) => (float[N,3,4,4] y) { a = Conv(x, w) b = Relu(a) y = Conv(b, v) }"
    (tmp_path / "float").mkdir()
    (tmp_path / "float" / "config.json").write_text("{}")
    onnx.save(model(text, w=(8, 3, 3, 3), v=(3, 8, 3, 3)), tmp_path / "float" / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
    command = ["quantize", str(tmp_path / "float"), "--data", str(tmp_path / "data.npz"), "-o", str(tmp_path / "web")]
    report = tmp_path / "report.json"
    assert main([*command, "--backend", "web", "--no-verify", "--report", str(report)]) == 0
    names = {path.name for path in (tmp_path / "web" / "onnx").iterdir()}
    assert names == {"model.onnx", "model_fp16.onnx", "model_quantized.onnx"}
    notes = json.loads(report.read_text())["notes"]
    assert [note.split()[0] for note in notes] == ["model_q4.onnx", "model_q4f16.onnx"]
    printed = capsys.readouterr()
    assert all(note in printed.out + printed.err for note in notes)


def test_the_worst_module_decides_the_choice() -> None:
    rows = [
        FolderFile(module, dtype, size, error, None, chosen=False)
        for module in ("encoder_model", "decoder_model")
        for dtype, size, error in (("fp32", 400, None), ("q8", 100, 30.0), ("q4", 60, 15.0))
    ]
    rows[1] = replace(rows[1], sqnr_db=10.0)
    chosen = {row.module: row.dtype for row in choose(rows, 500) if row.chosen}
    assert chosen == {"encoder_model": "fp32", "decoder_model": "q8"}
    with pytest.raises(OutputError, match="120 bytes"):
        choose(rows, 100)


def test_transformers_js_loads_every_file(folder: Path, tmp_path: Path) -> None:
    modules = Path(os.environ.get("SBONNX_NODE_MODULES", "node_modules")).resolve()
    if shutil.which("node") is None or not (modules / "@huggingface" / "transformers").is_dir():
        pytest.skip("needs node, and SBONNX_NODE_MODULES with @huggingface/transformers")
    script = tmp_path / "load.mjs"
    script.write_text(SCRIPT)
    command = ["node", str(script), str(modules), str(folder), *SUFFIXES, "chosen"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    in_node = {dtype: np.array(values) for dtype, values in json.loads(done.stdout.splitlines()[-1]).items()}
    ids = np.array([[10, 20, 30, 7]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    expected = run(onnx.load(folder / "onnx" / "model.onnx"), feeds)["last_hidden_state"].ravel()
    errors = {dtype: sqnr(expected, values) for dtype, values in in_node.items()}
    limits = {"fp32": 100, "fp16": 50, "q8": 20, "q4": 10, "q4f16": 10}
    assert all(errors[dtype] > limit for dtype, limit in limits.items()), errors
    config = json.loads((folder / "config.json").read_text())
    assert errors["chosen"] == errors[config["transformers.js_config"]["dtype"]["model"]]
