"""Massive activations: products that compute in int8 only where it is safe keep the tokens of float arithmetic."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx import llm
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import read_decoder
from sbonnx.spec import Array
from tests.conftest import PACK

CLASSICS = PACK / "classics_llama"
FACTOR = 300.0
PROMPT, DECODED = 32, 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLASSICS.is_dir(), reason=f"no model in {CLASSICS}"),
]


def planted(folder: Path) -> Path:
    """Copy the trained decoder: 3 channels of each norm in front of products are inflated, the function is the same."""
    shutil.copytree(CLASSICS / "genai", folder)
    model, random = onnx.load(folder / "model.onnx"), np.random.default_rng(0)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    norms = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}
    for node in model.graph.node:
        readers = [each for each in model.graph.node if each.op_type == "MatMul" and each.input[0] == node.output[0]]
        if node.op_type not in norms or any("lm_head" in each.input[1] for each in readers):
            continue
        gain = node.input[norms[node.op_type]]
        channels = random.choice(len(numpy_helper.to_array(stored[gain])), 3, replace=False)
        for name, factor in ((gain, FACTOR), *((each.input[1], 1 / FACTOR) for each in readers)):
            values = numpy_helper.to_array(stored[name]).copy()
            values[channels] *= np.float32(factor)
            stored[name].CopyFrom(numpy_helper.from_array(values, name))
    (folder / "model.onnx.data").unlink()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    return folder


def at_level(source: Path, folder: Path, level: int) -> Path:
    """Copy a quantized decoder with one accuracy level for all products of 4-bit weights."""
    shutil.copytree(source, folder)
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        values = {each.name: each for each in node.attribute}
        if node.op_type == "MatMulNBits" and values["bits"].i == 4:
            values["accuracy_level"].i = level
    onnx.save(model, folder / "model.onnx")
    return folder


def decoded(folder: Path, prompts: Array) -> list[list[int]]:
    session = DecoderSession(read_decoder(folder), threads=1)
    return [session.greedy(prompt, DECODED) for prompt in prompts]


def equal_tokens(found: list[list[int]], wanted: list[list[int]]) -> Array:
    """Number of tokens before the first difference, for each prompt."""
    return np.array([int(np.cumprod(np.equal(a, b)).sum()) for a, b in zip(found, wanted, strict=True)])


def test_no_token_flips_that_float_arithmetic_keeps(tmp_path: Path) -> None:
    source = planted(tmp_path / "float")
    ids = np.load(CLASSICS / "calib.npz")["ids"][:32].astype(np.int64)
    prompts = np.load(CLASSICS / "eval.npz")["ids"][:16, :PROMPT].astype(np.int64)
    report = llm.quantize(source, ids, output=tmp_path / "auto", latency=False)
    assert any("compute in float32 (accuracy level 1)" in note for note in report.notes)
    wanted = decoded(source, prompts)
    equal = {"auto": equal_tokens(decoded(tmp_path / "auto", prompts), wanted)}
    for level in (0, 4):
        folder = at_level(tmp_path / "auto", tmp_path / f"level_{level}", level)
        equal[str(level)] = equal_tokens(decoded(folder, prompts), wanted)
    # two tokens that float finds equally likely may change places with the summation order of a CPU
    assert (equal["auto"] < equal["0"]).sum() <= 1
    assert equal["auto"].sum() >= equal["0"].sum()
    assert (equal["4"] < equal["0"]).sum() >= 10
