"""A recipe that sets nothing, or repeats defaults, changes no byte of the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx.assets import digits
from sbonnx.quant_model import QuantModel
from tests.ancestor.qconfigs import virtual, written

Files = tuple[Path, list[dict[str, Any]]]
"""A float model and its samples."""


def digest(files: Files, path: Path, recipe: Any = None, **wishes: Any) -> str:
    """SHA-256 of the quantized file."""
    model, feeds = files
    sbonnx.quantize(model, feeds, recipe=recipe, output=path, force=True, verify=False, **wishes)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def small() -> Files:
    """The bundled model with 16 samples."""
    images = np.load(digits().calib)["image"][:16]
    return Path(digits().model), [{"image": images[:8]}, {"image": images[8:]}]


@pytest.fixture(scope="module")
def resnet(pack: Path) -> Files:
    """ResNet-20 with 16 samples."""
    name = "cifar_resnet20"
    return Path(load_pack(pack).model_path(name)), load_pack(pack).load_calib(name, limit=16)


WIDTHS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "w8a8": ({}, ("onnxruntime", "tensorrt", "virtual")),
    "w3a4": ({"bits": "w3a4"}, ("virtual",)),
    "weight only": ({"mode": "weight_only"}, ("tensorrt",)),
    "dynamic": ({"mode": "dynamic"}, ("onnxruntime",)),
    "fp16": ({"high_precision": "fp16"}, ("tensorrt",)),
    "fp8": ({"bits": "fp8"}, ("tensorrt",)),
}
"""Wishes by name, and some of the backends that support them."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "backend"), [(w, b) for w, (_, backends) in WIDTHS.items() for b in backends])
def test_an_empty_recipe_writes_the_same_bytes_as_none(small: Files, tmp_path: Path, width: str, backend: str) -> None:
    wishes = dict(WIDTHS[width][0])
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "backend.yaml").write_text(f"BACKEND: {backend}\n")
    plain = digest(small, tmp_path / "q.onnx", backend=backend, **wishes)
    assert digest(small, tmp_path / "q.onnx", tmp_path / "empty.yaml", backend=backend, **wishes) == plain
    assert digest(small, tmp_path / "q.onnx", tmp_path / "backend.yaml", **wishes) == plain


@pytest.mark.slow
def test_step_by_step_too(small: Files, tmp_path: Path) -> None:
    model, feeds = small
    found = set()
    for config in (None, {}, {"A": {"QUANTIZER": {"BIT": 8}}}):
        with QuantModel(model, config) as quantized:
            quantized.prepare_calibration()
            for feed in feeds:
                quantized(feed)
            quantized.calc_qparams()
            quantized.export_onnx(tmp_path / "q.onnx", force=True)
            found.add((tmp_path / "q.onnx").read_bytes())
    assert len(found) == 1


def test_the_report_of_a_recipe_for_sparsebit_names_its_other_defaults(small: Files, tmp_path: Path) -> None:
    model, feeds = small
    config = written(tmp_path, virtual(8))
    theirs = sbonnx.quantize(model, feeds, recipe=config, defaults="sparsebit", verify=False)
    ours = sbonnx.quantize(model, feeds, recipe=config, verify=False)
    (added,) = [note for note in ours.notes if note not in theirs.notes and "qconfig.yaml" in note]
    assert "SCALE_RULE: sparsebit" in added
    assert (ours.settings["SCALE_RULE"], theirs.settings["SCALE_RULE"]) == ("exact", "sparsebit")


REPEATED: Mapping[str, Mapping[str, Any]] = {
    "sides": {
        "DEFAULTS": "sbonnx",
        "SCHEDULE": {"FUSE_BN": True},
        "W": {
            "QUANTIZER": {"BIT": 4},
            "QSCHEME": "per-channel-affine",
            "ROUNDING": {"TYPE": "gptq", "SCALE": "search"},
        },
        "A": {"QUANTIZER": {"BIT": 8}, "OBSERVER": {"TYPE": "mse"}},
        "FIRST_BITS": "w4a8",
        "LAST_BITS": {"W": 4},
    },
    "layers": {"W.SPECIFIC": [{"op:*": ["QUANTIZER.BIT", 4]}], "A.SPECIFIC": [{"op:*": {"QUANTIZER": {"BIT": 8}}}]},
}


@pytest.mark.slow
def test_repeating_defaults_changes_no_byte(small: Files, tmp_path: Path) -> None:
    plain = digest(small, tmp_path / "q.onnx", bits="w4a8")
    found = {name: digest(small, tmp_path / "q.onnx", recipe, bits="w4a8") for name, recipe in REPEATED.items()}
    assert found == dict.fromkeys(REPEATED, plain)


@pytest.mark.slow
def test_raising_layers_to_8_bits_never_lowers_the_signal_to_noise(pack: Path, resnet: Files, tmp_path: Path) -> None:
    """At W4A4. Layers raised to 8 bits and rounded to nearest lost up to 5.5 dB; chance on 64 samples is up to 0.6."""
    name, evaluated = "cifar_resnet20", load_pack(pack)
    model, feeds = resnet
    convs = {node.name for node in onnx.load(model).graph.node if node.op_type == "Conv"}

    def sqnr(layers: list[str], **wishes: Any) -> tuple[float, list[str]]:
        """SQNR of the logits on 500 images, dB; and the layers, the worst first."""
        specific = [{f"node:{layer}": {"QUANTIZER": {"BIT": 8}}} for layer in layers]
        path = tmp_path / "q.onnx"
        report = sbonnx.quantize(
            model, feeds, recipe={"W.SPECIFIC": specific}, output=path, force=True, bits="w4a4", **wishes
        )
        worst = [str(row.node) for row in report.layers if row.node in convs]
        return evaluated.evaluate(name, str(path), limit=500)["clean:logit_sqnr_db"], worst

    plain, worst = sqnr([])
    assert len(worst) > 8
    for count in (3, len(worst)):
        assert sqnr(worst[:count], verify=False)[0] > plain - 1
