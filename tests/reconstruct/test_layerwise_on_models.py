"""Rounding by second moments and bias correction on trained networks: neither undoes what the other gains."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import sbonnx


@pytest.mark.slow
def test_together_they_are_best_with_depthwise_convolutions(pack: Path, tmp_path: Path) -> None:
    """Some channels have scales raised for their biases, which once undid the rounding of the whole weight."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    own: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    feeds = list(own.load_calib("mobilenetv1_tin200", limit=32))
    found = []
    for rounding in ("nearest", "gptq"):
        for correction in ("none", "empirical"):
            out = tmp_path / f"{rounding}-{correction}.onnx"
            wishes: dict[str, Any] = {"w.rounding.type": rounding, "bias_correction": correction}
            sbonnx.quantize(own.model_path("mobilenetv1_tin200"), feeds, output=out, verify=False, **wishes)
            found.append(own.evaluate("mobilenetv1_tin200", str(out), limit=100)["val:logit_sqnr_db"])
    nearest, corrected, rounded, both = found
    assert min(corrected, rounded) > nearest + 3
    assert both > max(corrected, rounded) - 0.3


@pytest.mark.slow
def test_four_bits_of_both_on_a_residual_net(pack: Path, tmp_path: Path) -> None:
    """Not more than 4 points below float, where the nearest codes lose twice that."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    own: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    out = tmp_path / "q.onnx"
    wishes: dict[str, Any] = {"a.observer.type": "mse", "w.rounding.type": "gptq"}
    sbonnx.quantize(
        own.model_path("cifar_resnet20"),
        list(own.load_calib("cifar_resnet20")),
        backend="virtual",
        output=out,
        verify=False,
        bits="w4a4",
        **wishes,
    )
    wanted, found = own.entry("cifar_resnet20")["float_metric"], own.evaluate("cifar_resnet20", str(out))
    for kind in ("clean", "jpeg"):
        assert found[f"{kind}:top1"] >= wanted[f"{kind}:top1"] - 0.04
