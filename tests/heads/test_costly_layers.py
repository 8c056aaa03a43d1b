"""The few layers that lose the outputs of a network without a head stay float; nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.heads.costly_layers import MOST_LAYERS, MOST_RUNS, largest_first
from sbonnx.metrics import sqnr_db
from tests.support.models import model, run

LAYERS, WIDTH = 5, 16
FEEDS = [{"x": np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32)} for seed in range(14)]


def network(factor: float, layer: int = 3) -> onnx.ModelProto:
    """Convolutions with Elu. `factor`: scale of a channel that the layer reads; Elu keeps it from being absorbed."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {}
    nodes, source = [], "x"
    for index in range(LAYERS):
        inputs = WIDTH if index else 3
        values = rng.standard_normal((WIDTH, inputs, 3, 3)) * np.sqrt(2 / (9 * inputs))
        values[0] *= factor if index == layer - 1 else 1.0
        values[:, 0] /= factor if index == layer else 1.0
        weights[f"w{index}"] = values.astype(np.float32)
        nodes.append(f"[conv{index}] c{index} = Conv <pads = [1,1,1,1]> ({source}, w{index})")
        nodes.append(f"[act{index}] a{index} = Elu (c{index})")
        source = f"a{index}"
    weights["last"] = (rng.standard_normal((4, WIDTH, 1, 1)) / 4).astype(np.float32)
    text = f"{' '.join(nodes)} [last] y = Conv ({source}, last)"
    return model(f"agraph (float[N,3,8,8] x) => (float[N,4,8,8] y) {{ {text} }}", **weights)


def quantize(proto: onnx.ModelProto, backend: str, heads: str) -> sbonnx.Report:
    keys: dict[str, Any] = {"backend": backend, "heads": heads}
    if backend != "tensorrt":
        keys["kernel_costs"] = "none"
    return sbonnx.quantize(proto, FEEDS[:8], verify=False, **keys)


def quality(report: sbonnx.Report, proto: onnx.ModelProto) -> float:
    """SQNR on other samples, by onnxruntime running the file."""
    assert report.quantized is not None
    return sqnr_db(*(np.stack([run(which, feed)["y"] for feed in FEEDS[8:]]) for which in (proto, report.quantized)))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("onnxruntime", {"conv2", "conv3"}),  # a kernel in integers writes integers: the writer stays float too
        ("tensorrt", {"conv3"}),
    ],
)
def test_the_layers_at_an_outlier_stay_float(backend: str, expected: set[str]) -> None:
    proto = network(factor=300.0)
    before, after = (quantize(proto, backend, heads) for heads in ("none", "auto"))
    assert {refusal.where for refusal in after.refusals if refusal.code == "head-worth-float"} == expected
    assert quality(before, proto) < 10 < 20 < quality(after, proto)
    assert any("left in float" in note and "'conv3'" in note for note in after.notes)


def test_a_network_that_loses_nothing_keeps_its_bytes() -> None:
    files = [quantize(network(factor=1.0), "onnxruntime", heads).quantized for heads in ("none", "auto")]
    assert files[0] is not None and files[1] is not None
    assert files[0].SerializeToString() == files[1].SerializeToString()


def test_costly_layers_are_found_in_few_runs() -> None:
    errors = dict.fromkeys([f"layer{index}" for index in range(500)], 1e-6) | {"layer7": 1.0, "layer300": 2.0}
    runs: list[int] = []

    def error(names: Any) -> float:
        runs.append(len(names))
        return sum(errors[name] for name in names)

    names = largest_first(tuple(errors), error)
    assert names[:2] == ["layer300", "layer7"] and len(names) <= MOST_LAYERS
    assert len(runs) <= MOST_RUNS + 1
    assert largest_first((), error) == [] and largest_first(("only",), error) == ["only"]
