"""The count against onnxruntime's own profile of a run: which kernels ran, and on which types."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import sbonnx
from sbonnx import verify
from sbonnx.schemes import Scheme
from sbonnx.spec import Array
from tests.support.models import residual

CODES = {"uint8", "int8"}


def executed(path: Path, feeds: dict[str, Array], folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Kernels that ran with codes among their inputs, and the others; without Q, DQ and Cast."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = {entry.name for entry in session.get_inputs()}
    session.run(None, {name: value for name, value in feeds.items() if name in wanted})
    events = json.loads(Path(session.end_profiling()).read_text())
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for event in events:
        about = event.get("args", {})
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        if about["op_name"] in ("QuantizeLinear", "DequantizeLinear", "If"):
            continue
        kinds = {kind for one in about["input_type_shape"] for kind in one}
        counts[not (kinds & CODES and about["op_name"] != "Cast")][about["op_name"]] += 1
    return counts


def compared(path: Path, output: Path, feeds: list[dict[str, Array]]) -> verify.Kernels:
    depth = verify.Depth(latency=False, kernels=True)
    kernels = verify.compare(path, output, feeds, depth=depth).kernels
    assert kernels is not None and not kernels.skipped
    return kernels


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cifar_resnet20", "squeezenet11", "fastestdet", "minilm_l6"])
def test_the_kernels_counted_are_those_that_run(name: str, pack: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(pack))
    try:
        import eval as data  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(pack))
    feeds: list[dict[str, Array]] = data.load_calib(name, limit=2)
    path, output = pack / "models" / f"{name}.onnx", tmp_path / "q.onnx"
    sbonnx.quantize(path, feeds, backend="onnxruntime", output=output, verify=False, effort="fast")
    kernels = compared(path, output, feeds[:1])
    integer, floating = executed(output, feeds[0], tmp_path)
    assert dict(integer) == dict(kernels.integer)
    assert dict(floating) == dict(kernels.floating)
    assert kernels.in_integers == kernels.with_kernel > 20


@pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-tensor-symmetric"])
def test_on_a_small_model_with_and_without_what_keeps_it_from_integers(scheme: Scheme, tmp_path: Path) -> None:
    """Symmetric activations put the zero point in the middle, so that no Relu folds."""
    rng = np.random.default_rng(0)
    feeds: list[dict[str, Any]] = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    path, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    path.write_bytes(residual().SerializeToString())
    sbonnx.quantize(path, feeds, backend="onnxruntime", output=output, verify=False, a_qscheme=scheme)
    kernels = compared(path, output, feeds[:1])
    integer, floating = executed(output, feeds[0], tmp_path)
    assert dict(integer) == dict(kernels.integer)
    assert dict(floating) == dict(kernels.floating)
    assert bool(kernels.left_float) is (scheme == "per-tensor-symmetric")
