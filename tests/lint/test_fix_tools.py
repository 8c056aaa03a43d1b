"""What onnxruntime's quantizer writes, mended for TensorRT: no errors left, and the same answers within rounding."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks import models as nets
from sbonnx import graph as graphs
from sbonnx.linting import TARGETS, Finding
from sbonnx.linting import lint as lint_for
from sbonnx.linting.fix import FixedModel
from sbonnx.linting.fix import fix as fix_for
from sbonnx.metrics import sqnr_db
from sbonnx.spec import Array
from tests.lint.test_tensorrt_tools import SWITCHES, Reader
from tests.support.models import residual, run

Feeds = list[dict[str, Array]]


def lint(model: Any, target: str) -> list[Finding]:
    """For kernels that are exact, whatever those of this machine are."""
    return lint_for(model, target, cpu="vnni")


def fix(model: Any, target: str) -> FixedModel:
    """For kernels that are exact, whatever those of this machine are."""
    return fix_for(model, target, cpu="vnni")


TENSORRT = [target for target in TARGETS if target.startswith("tensorrt")]

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "default per channel": {"per_channel": True},
    "switches": {"extra_options": SWITCHES},
    "switches per channel": {"per_channel": True, "extra_options": SWITCHES},
    "qoperator": {"quant_format": "QOperator"},
    "qoperator per channel": {"quant_format": "QOperator", "activation_type": "QUInt8", "per_channel": True},
    "unsigned": {"activation_type": "QUInt8", "weight_type": "QUInt8"},
}
KINDS = {"quant_format": "QuantFormat", "activation_type": "QuantType", "weight_type": "QuantType"}


def by_onnxruntime(source: Path, feeds: Feeds, form: str) -> Path:
    quantization = pytest.importorskip("onnxruntime.quantization")
    options = {
        name: getattr(quantization, KINDS[name])[value] if name in KINDS else value
        for name, value in FORMS[form].items()
    }
    target = source.with_name("q.onnx")
    quantization.quantize_static(str(source), str(target), Reader(feeds), **options)
    return target


def answers(path: Path, feeds: Feeds, level: str = "off") -> Array:
    """The first output of a file for all feeds."""
    return np.concatenate([next(iter(run(str(path), feed, level=level).values())) for feed in feeds])


def mended(path: Path, target: str) -> Path:
    """The mended file: valid, and with nothing left to do."""
    made = path.with_name(f"{target}.onnx")
    graphs.save(fix(path, target).graph, made)
    onnx.checker.check_model(str(made), full_check=True)
    assert not fix(made, target).done
    return made


def as_good(source: Path, feeds: Feeds, form: str, target: str, least: float) -> None:
    """Mended without errors; next to the file as it was, and no worse against float."""
    given = by_onnxruntime(source, feeds, form)
    made = mended(given, target)
    left = Counter((one.rule, one.severity) for one in lint(made, target))
    assert not [one for one in left if one[1] == "error"], left
    assert not {rule for rule, _ in left} & {"P02", "P03", "P04", "P05", "P10"}
    reference, before, after = (answers(path, feeds) for path in (source, given, made))
    assert sqnr_db(before, after) > least
    assert sqnr_db(reference, after) > sqnr_db(reference, before) - 3
    assert sqnr_db(after, answers(made, feeds, "all")) > 30


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", TENSORRT)
def test_a_residual_block(form: str, target: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    onnx.save(residual(), str(tmp_path / "f.onnx"))
    as_good(tmp_path / "f.onnx", feeds, form, target, 15)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["default per channel", "switches", "qoperator per channel", "unsigned"])
def test_a_trained_resnet(form: str, pack: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    source = tmp_path / "f.onnx"
    source.write_bytes((pack / "models" / "cifar_resnet20.onnx").read_bytes())
    as_good(source, data.load_calib("cifar_resnet20", limit=4), form, "tensorrt@11", 20)


def resnet(folder: Path) -> tuple[Path, Feeds]:
    """ResNet-18, and two smooth random images."""
    rng = np.random.default_rng(0)
    coarse = rng.standard_normal((2, 1, 3, 14, 14)).astype(np.float32)
    onnx.save(nets.resnet(), str(folder / "f.onnx"))
    return folder / "f.onnx", [{"image": np.repeat(np.repeat(one, 16, axis=2), 16, axis=3)} for one in coarse]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["default", "switches per channel", "qoperator"])
def test_resnet18(form: str, tmp_path: Path) -> None:
    source, feeds = resnet(tmp_path)
    as_good(source, feeds, form, "tensorrt@11", 12)


def facts(path: Path) -> Counter[str]:
    return Counter(one.rule for one in lint(path, "tensorrt@11"))


@pytest.mark.slow
def test_facts_of_the_default(tmp_path: Path) -> None:
    """Zero points, an int32 bias a layer, a pair behind every convolution, all eight sums with two, a rounded output.

    ResNet-18 has 20 convolutions (three of them down-sample), one Gemm and eight sums.
    """
    source, feeds = resnet(tmp_path)
    found = facts(by_onnxruntime(source, feeds, "default"))
    assert found["T17"] == 21
    assert found["T03"] == 21
    assert found["T02"] > 20
    assert found["P04"] == 8
    assert found["P10"] == 1


@pytest.mark.slow
def test_facts_of_the_switches(tmp_path: Path) -> None:
    """Nothing refused; all eight sums have two quantized inputs, and Relu is split from its convolution."""
    source, feeds = resnet(tmp_path)
    path = by_onnxruntime(source, feeds, "switches per channel")
    found = facts(path)
    assert not [one for one in lint(path, "tensorrt@11") if one.severity == "error"]
    assert found["P04"] == 8
    assert found["P02"] >= 9
    assert found["P10"] == 1
    assert not found["T02"] + found["T03"] + found["T17"]


@pytest.mark.parametrize("form", ["default", "unsigned"])
def test_for_onnxruntime_types_change_and_values_do_not(form: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    onnx.save(residual(), str(tmp_path / "f.onnx"))
    given = by_onnxruntime(tmp_path / "f.onnx", feeds, form)
    assert {"O11", "O12"} & {one.rule for one in lint(given, "onnxruntime")}
    made = mended(given, "onnxruntime")
    left = lint(made, "onnxruntime")
    assert not {"O11", "O12", "O13"} & {one.rule for one in left}
    assert sqnr_db(answers(given, feeds), answers(made, feeds)) > 25
