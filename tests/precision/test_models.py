"""Half precision on trained models: typed, run at every level, as near to float as float16 is, clean for TensorRT."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.linting import lint
from sbonnx.metrics import sqnr_db
from sbonnx.spec import Array
from tests.precision.converting import assert_few_casts, types
from tests.support.models import run

MODELS = (
    "cifar_resnet20",
    "mobilenetv2_tin200",
    "minilm_l6",
    "fastestdet",
    "ultraface_rfb320",
    "silero_vad",
)
WITHIN_DB = {"mobilenetv2_tin200": 36.0, "fastestdet": 40.0, "silero_vad": 40.0}
"""Signal to noise against float, decibel, that float16 leaves at least; 50 where nothing is said. MobileNetV2 and
FastestDet lose what they lose by rounding their weights alone."""


def feeds_of(name: str, pack: Path, count: int) -> list[dict[str, Array]]:
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.load_calib(name))[:count]


def outputs(proto: onnx.ModelProto | str, feeds: list[dict[str, Array]], level: str) -> dict[str, Array]:
    """Outputs of all feeds, end to end; all finite."""
    each = [run(proto, feed, level=level) for feed in feeds]
    found = {name: np.concatenate([row[name].ravel() for row in each]) for name in each[0]}
    assert all(np.isfinite(value).all() for value in found.values())
    return found


def assert_nothing_overflows(path: Path, feeds: list[dict[str, Array]]) -> None:
    """Every half-precision tensor of the main graph, as onnxruntime computes it without optimisation, is finite."""
    proto = onnx.load(str(path))
    kinds = types(proto)
    outputs = {value.name for value in proto.graph.output}
    inside = [name for node in proto.graph.node for name in node.output if kinds.get(name) == "fp16"]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inside if name not in outputs)
    for feed in feeds:
        found = run(proto, feed)
        assert not [name for name, value in found.items() if value.dtype.kind == "f" and not np.isfinite(value).all()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, pack: Path, tmp_path: Path) -> None:
    feeds = feeds_of(name, pack, 8)
    path = pack / "models" / f"{name}.onnx"
    floats = outputs(str(path), feeds[:4], "all")
    half = tmp_path / "half.onnx"
    report = sbonnx.quantize(path, feeds, backend="tensorrt", bits="w0a0", high_precision="fp16", output=half)
    assert report.ok, report.problems
    assert_few_casts(onnx.load(str(half)))
    for level in ("off", "all"):
        for output, value in outputs(str(half), feeds[:4], level).items():
            assert sqnr_db(floats[output], value) > WITHIN_DB.get(name, 50.0), output
    both = []
    for kind in ("fp32", "fp16"):
        target = tmp_path / f"{kind}.onnx"
        report = sbonnx.quantize(
            path, feeds, backend="tensorrt", high_precision=kind, output=target, verify=kind == "fp16", effort="fast"
        )
        assert report.ok, report.problems
        both.append(outputs(str(target), feeds[:4], "all"))
    loaded = onnx.load(str(target))
    assert "fp16" in types(loaded).values()
    assert_few_casts(loaded)
    for output, value in floats.items():
        wide, narrow = (sqnr_db(value, one[output]) for one in both)
        assert narrow > wide - 3, f"{output}: {narrow:.1f} dB in fp16, {wide:.1f} dB in fp32"
    for path in (half, target):
        assert_nothing_overflows(path, feeds[:4])
    for version in ("11", "10"):
        found = lint(target, f"tensorrt@{version}")
        assert not [one for one in found if one.rule in ("T05", "T15", "T18", "T19") or one.severity == "error"]
