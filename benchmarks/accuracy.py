"""8-bit min-max on real models: sbonnx beside onnxruntime.quantization, same calibration data, same evaluation.

    python benchmarks/accuracy.py [--models NAME ...] [--write]

The peer runs as its documentation advises: its preprocessing first, then quantize_static, in three settings:
its plain uint8/int8 per-tensor one, per-channel, and with the switches documented for TensorRT.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx

import sbonnx
from benchmarks.results import arguments, table, write_section

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
Contestants = Callable[[Path, list[dict[str, Any]], Path], dict[str, Run]]


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


def peer_input(path: Path, folder: Path) -> Path:
    """Prepare the model for the peer: convert to opset 13 or newer and preprocess."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(str(path))
    if model.opset_import[0].version < 13:
        model.ir_version = max(model.ir_version, 7)
        held = {tensor.name for tensor in model.graph.initializer}
        kept = [value for value in model.graph.input if value.name not in held]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model = onnx.version_converter.convert_version(model, 13)
    lifted, done = folder / "lifted.onnx", folder / "preprocessed.onnx"
    onnx.save(model, str(lifted))
    try:
        quant_pre_process(str(lifted), str(done), skip_symbolic_shape=True)
    except Exception as error:
        logging.warning("peer's preprocessing fails on %s: %s", path.name, error)
        return lifted
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
        report = sbonnx.quantize(path, feeds, backend=backend, output=output, force=True, **overrides)
        for problem in report.problems:
            print(f"    {path.name} {backend}: {problem}", file=sys.stderr)

    return run


def runs(path: Path, feeds: list[dict[str, Any]], folder: Path) -> dict[str, Run]:
    """Return the quantizers to compare by name; each writes a quantized model to a given path."""
    prepared = peer_input(path, folder)
    return {
        "sbonnx onnxruntime": ours(path, feeds, "onnxruntime", observer="minmax"),
        "peer per-tensor": lambda out: peer(prepared, feeds, out, per_channel=False),
        "peer per-channel": lambda out: peer(prepared, feeds, out, per_channel=True),
        "sbonnx tensorrt": ours(path, feeds, "tensorrt", observer="minmax"),
        "peer TensorRT switches": lambda out: peer(prepared, feeds, out, per_channel=True, tensorrt=True),
    }


def measure(pack: Any, name: str, contestants: Contestants = runs) -> list[list[str]]:
    """Measure one model and return its table rows."""
    path = Path(pack.model_path(name))
    feeds = pack.load_calib(name, batch=BATCH if name != "silero_vad" else 1)
    metrics = HEADLINE[name]
    rows = []
    floats = pack.evaluate(name)
    shown = [f"{floats[m]:.4f}" if m in floats else "" for m in metrics]
    rows.append([name, "float", *shown, f"{path.stat().st_size / 1e6:.2f}", ""])
    with tempfile.TemporaryDirectory() as folder:
        for who, run in contestants(path, feeds, Path(folder)).items():
            output = Path(folder) / "out.onnx"
            output.unlink(missing_ok=True)
            start = time.process_time()
            try:
                run(output)
            except Exception as error:
                rows.append([name, who, f"fails: {str(error).splitlines()[0][:80]}", "", "", ""])
                continue
            seconds = time.process_time() - start
            result = pack.evaluate(name, str(output))
            size = f"{output.stat().st_size / 1e6:.2f}"
            rows.append([name, who, *(f"{result[m]:.4f}" for m in metrics), size, f"{seconds:.0f}"])
            print("  ".join(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure, print the table and, with --write, update docs/results.md."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(HEADLINE))
    options = parser.parse_args()
    logging.disable(logging.INFO)
    pack = load_pack(options.pack)
    rows = [row for name in options.models for row in measure(pack, name)]
    about = "\n".join(f"- {name}: {first}, {second}" for name, (first, second) in HEADLINE.items())
    text = (
        "## Accuracy, 8-bit min-max\n\n"
        "`python -m benchmarks.accuracy --write`; the peer is onnxruntime.quantization.quantize_static on the same "
        "calibration data, after its own preprocessing. Metric 1 and 2 by model:\n\n"
        f"{about}\n\n"
        "The peer does not enter the branches of silero_vad: its file there is the float network.\n\n"
        + table(["model", "quantizer", "metric 1", "metric 2", "MB", "CPU s (sbonnx: with verification)"], rows)
    )
    print(text)
    if options.write:
        write_section("accuracy", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
