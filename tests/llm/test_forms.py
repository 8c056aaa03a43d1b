"""One trained decoder in three export forms: a folder of onnxruntime-genai, one of optimum, and a merged decoder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx import llm
from tests.conftest import PACK

CLASSICS = PACK / "classics_llama"
MERGE = PACK / "llm_structures" / "merge.py"
BRANCHES = {"genai": 1, "optimum": 1, "merged": 2}
"""How often each form reads a weight."""


def source(form: str, folder: Path) -> Path:
    """Folder of a form; the merged decoder is made from optimum's."""
    if form != "merged":
        return CLASSICS / form
    shutil.copytree(CLASSICS / "optimum", folder)
    model = folder / "model.onnx"
    subprocess.run([sys.executable, MERGE, model, folder / "decoder_model_merged.onnx"], check=True)
    model.unlink()
    return folder


def written_rows(graph: onnx.GraphProto, known: dict[str, onnx.TensorProto] | None = None) -> Counter[bytes]:
    """Count the rows (codes and scales of one output channel) of each MatMulNBits with stored weights."""
    known = {**(known or {}), **{tensor.name: tensor for tensor in graph.initializer}}
    rows: Counter[bytes] = Counter()
    for node in graph.node:
        if node.op_type == "MatMulNBits" and node.input[1] in known:
            codes, scales = (numpy_helper.to_array(known[name]) for name in node.input[1:3])
            pairs = zip(codes, scales.reshape(len(codes), -1), strict=True)
            rows.update(code.tobytes() + scale.tobytes() for code, scale in pairs)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                rows += written_rows(attribute.g, known)
    return rows


@pytest.mark.slow
def test_the_same_values_in_every_form(tmp_path: Path) -> None:
    """One form has q, k and v in one weight, the others in three; a merged decoder reads each weight twice."""
    if not (CLASSICS.is_dir() and MERGE.is_file()):
        pytest.skip(f"no models in {PACK}")
    found = {}
    for form, reads in BRANCHES.items():
        output = tmp_path / form
        llm.quantize(source(form, tmp_path / "source"), output=output, latency=False)
        (path,) = output.glob("*.onnx")
        rows = written_rows(onnx.load(path).graph)
        assert all(count % reads == 0 for count in rows.values())
        found[form] = Counter({row: count // reads for row, count in rows.items()})
    assert found["genai"].total() == 6144
    assert found["optimum"] == found["merged"] == found["genai"]


@pytest.mark.slow
def test_compensated_weights_are_as_good_in_every_form(tmp_path: Path) -> None:
    """Sums of the same inputs differ in the last bits, which decides codes but not their quality."""
    if not CLASSICS.is_dir():
        pytest.skip(f"no models in {PACK}")
    ids, held_out = (np.load(CLASSICS / f"{name}.npz")["ids"][:25].astype(np.int64) for name in ("calib", "eval"))
    kl = []
    for form in ("genai", "optimum"):
        llm.quantize(CLASSICS / form, ids, output=tmp_path / form, latency=False)
        figures = llm.evaluate(tmp_path / form, held_out, against=CLASSICS / form, latency=False)
        assert figures.kl is not None
        kl.append(figures.kl)
    assert max(kl) < 0.006
    assert max(kl) < 1.15 * min(kl), kl
