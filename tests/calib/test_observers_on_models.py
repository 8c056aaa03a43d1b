"""Every observed tensor of trained models: what an observer picks, judged on the values themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import read
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.observers import make_observer
from sbonnx.graph.extract import extract
from sbonnx.options import RunOptions
from sbonnx.pipeline import prepare
from sbonnx.spec import Array, QuantSpec, params_from_bounds
from sbonnx.stages.state import read_recipe

MODELS = ("cifar_resnet20", "fastestdet", "minilm_l6", "mobilenetv2_tin200", "squeezenet11", "ultraface_rfb320")
FEEDS = 3

SPECS = (
    QuantSpec(8, signed=False, symmetric=False),
    QuantSpec(8),
    QuantSpec(4, signed=False, symmetric=False),
    QuantSpec(4),
)


def _errors(spec: QuantSpec, sketch: Any, x: Array) -> dict[str, float]:
    """Mean squared error on the data of what each observer picks."""
    found = {}
    for name in ("minmax", "mse", "auto"):
        params = params_from_bounds(make_observer(name).bounds(sketch, spec), spec)
        found[name] = float(np.mean((params.fake_quant(x).astype(np.float64) - x) ** 2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mse_is_never_worse_than_minmax(name: str, pack: Path) -> None:
    sys.path.insert(0, str(pack))
    try:
        import eval as evaluation  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(pack))
    recipe, backend = read_recipe(None, "virtual", {"observer": "mse"})
    prepared = prepare(evaluation.model_path(name), recipe, backend)
    feeds = list(read(evaluation.load_calib(name, limit=FEEDS), prepared.graph))
    with Calibrator(prepared.graph, prepared.plan, RunOptions(granularity="whole")) as calibrator:
        calibrator.observe_all(Samples.of(feeds, prepared.graph))
        sketches = {key[0]: sketch for key, sketch in calibrator.sketches().items() if key[1] is None}
    inputs = [tensor.name for tensor in prepared.graph.inputs]
    computed = [tensor for tensor in sketches if tensor not in inputs]
    values: dict[str, list[Array]] = {tensor: [] for tensor in sketches}
    with LayerRunner(extract(prepared.graph, inputs, computed), threads=1) as run:
        for feed in feeds:
            known = {**feed, **run(feed)}
            for tensor in sketches:
                values[tensor].append(np.asarray(known[tensor], np.float32).ravel())
    compared = 0
    for tensor, sketch in sketches.items():
        x = np.concatenate(values[tensor])
        for spec in SPECS:
            errors = _errors(spec, sketch, x)
            room = errors["minmax"] * (1 + 1e-6) + 1e-30
            assert errors["mse"] <= room, f"'{tensor}' as {spec.label()}: {errors}"
            assert errors["auto"] <= room, f"'{tensor}' as {spec.label()}: {errors}"
            compared += 1
    assert compared >= 40
