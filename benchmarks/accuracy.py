"""The trained models of the pack, and 8-bit quantization of them with the defaults of sbonnx and of quantize_static."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx

import sbonnx

HEADLINE = {
    "cifar_resnet20": ("clean:top1", "jpeg:top1"),
    "mobilenetv2_tin200": ("val:top1", "val:top5"),
    "squeezenet11": ("sample:top1", "sample:top5"),
    "minilm_l6": ("spearman", "mean_cosine_with_float"),
    "fastestdet": ("map50", "f1_with_float"),
    "ultraface_rfb320": ("f1_with_float", "n_detections"),
    "silero_vad": ("decision_agree_with_float", "prob_correlation"),
}
BATCH = 8
Run = Callable[[Path], None]


def load_pack(folder: Path) -> Any:
    """Import the evaluation module of the model pack."""
    spec = importlib.util.spec_from_file_location("pack_eval", folder / "eval.py")
    if spec is None or spec.loader is None:
        sys.exit(f"{folder} holds no eval.py: give the data folder with --pack")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Feeds:
    """Calibration data reader for onnxruntime.quantization."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds: Iterator[dict[str, Any]] = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


PEERS_OPSET = 13
"""Lowest opset in which peers quantize by channel."""


def lifted(path: Path, folder: Path) -> Path:
    """Return the float file for peers: itself, or in `folder` one of opset 13 without weights among the inputs."""
    model = onnx.load(str(path))
    held = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in held]
    if model.opset_import[0].version >= PEERS_OPSET and len(inputs) == len(model.graph.input):
        return path
    model.ir_version = max(model.ir_version, 7)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    done = folder / f"{path.stem}.lifted.onnx"
    onnx.save(onnx.version_converter.convert_version(model, PEERS_OPSET), str(done))
    return done


def peer_input(path: Path, folder: Path) -> Path:
    """Prepare the model for onnxruntime's quantization: `lifted`, and its preprocessing."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    start, done = lifted(path, folder), folder / "preprocessed.onnx"
    try:
        quant_pre_process(str(start), str(done), skip_symbolic_shape=True)
    except Exception as error:
        logging.warning("peer's preprocessing fails on %s: %s", path.name, error)
        return start
    return done


def peer(
    model: Path,
    feeds: list[dict[str, Any]],
    output: Path,
    *,
    per_channel: bool,
    tensorrt: bool = False,
    signed: bool = False,
) -> None:
    """Quantize with quantize_static; `signed`: int8 activations."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    options: dict[str, Any] = {}
    kind = QuantType.QInt8 if signed or tensorrt else QuantType.QUInt8
    if tensorrt:
        options = {
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": False,
            "AddQDQPairToWeight": True,
        }
    quantize_static(
        str(model),
        str(output),
        Feeds(feeds),
        quant_format=QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=kind,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        extra_options=options,
    )


def ours(path: Path, feeds: list[dict[str, Any]], backend: str, **overrides: Any) -> Run:
    """Return a run of sbonnx for a backend, including verification; problems are printed to stderr."""

    def run(output: Path) -> None:
        report = sbonnx.quantize(path, feeds, recipe={"BACKEND": backend}, output=output, force=True, **overrides)
        for problem in report.problems:
            print(f"    {path.name} {backend}: {problem}", file=sys.stderr)

    return run
