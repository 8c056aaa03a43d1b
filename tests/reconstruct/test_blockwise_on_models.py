"""Rounding in blocks at 4 bits of weights and activations, on a trained net."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import sbonnx

pytest.importorskip("torch")


@pytest.mark.slow
def test_four_bits_of_both_on_a_residual_net(pack: Path, tmp_path: Path) -> None:
    """Not more than 4 points below float, where the nearest codes lose twice that."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    own: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    out = tmp_path / "q.onnx"
    wishes: dict[str, Any] = {
        "a.observer.type": "mse",
        "w.rounding.type": "adaround",
        "w.rounding.adaround.loss": "batches",
        "w.rounding.adaround.iterations": 100,
    }
    report = sbonnx.quantize(
        own.model_path("cifar_resnet20"),
        list(own.load_calib("cifar_resnet20")),
        backend="virtual",
        output=out,
        verify=False,
        bits="w4a4",
        **wishes,
    )
    assert not [refusal for refusal in report.refusals if refusal.what == "round in blocks"]
    wanted, found = own.entry("cifar_resnet20")["float_metric"], own.evaluate("cifar_resnet20", str(out))
    for kind in ("clean", "jpeg"):
        assert found[f"{kind}:top1"] >= wanted[f"{kind}:top1"] - 0.04
