"""Files for the QNN provider beside those of onnxruntime's `get_qnn_qdq_config`: error in onnxruntime on the CPU.

    python -m benchmarks.runtimes.qnn [--models NAME ...] [--write]

Both calibrate on the first half of the calibration samples of the model pack (64 at most), and the error is measured on
as many of the others. The models of onnxruntime's tool are preprocessed by its `qnn_preprocess_model`.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize as quantize_peer
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

import sbonnx
from benchmarks.accuracy import Feeds, load_pack
from benchmarks.results import arguments, table, write_section
from sbonnx.errors import ModelError
from sbonnx.metrics import ratio_db
from sbonnx.verify import session

MODELS: Final = ("cifar_resnet20", "squeezenet11", "mobilenetv2_tin200", "fastestdet", "minilm_l6")
SAMPLES: Final = 64
BITS: Final = {"w8a8": QuantType.QUInt8, "w8a16": QuantType.QUInt16}
HEADER: Final = ("model", "bits", "SQNR dB", "onnxruntime, per channel", "onnxruntime, per tensor")


def sqnr(floats: Path, quantized: Path, feeds: list[dict[str, Any]]) -> list[float]:
    """Return the SQNR of each output in dB."""
    one, other = session(floats), session(quantized)
    sums = np.zeros((2, len(one.get_outputs())))
    for feed in feeds:
        for at, (wanted, found) in enumerate(zip(one.run(None, feed), other.run(None, feed), strict=True)):
            sums[:, at] += np.square(wanted).sum(), np.square(wanted - found).sum()
    return [ratio_db(signal, noise) for signal, noise in sums.T]


def peer(source: Path, target: Path, feeds: list[dict[str, Any]], kind: QuantType, *, per_channel: bool) -> None:
    """Quantize with onnxruntime's tool: int8 weights per channel, or uint8 weights per tensor."""
    weights = QuantType.QInt8 if per_channel else QuantType.QUInt8
    config = get_qnn_qdq_config(
        str(source), Feeds(feeds), activation_type=kind, weight_type=weights, per_channel=per_channel
    )
    quantize_peer(str(source), str(target), config)


def measure(pack: Any, name: str, folder: Path) -> list[tuple[str, ...]]:
    """Return the rows of one model."""
    model, feeds = Path(pack.model_path(name)), list(pack.load_calib(name, batch=1, limit=2 * SAMPLES))
    half = len(feeds) // 2
    seen, held_out = feeds[:half], feeds[half:]
    prepared = folder / f"{name}.onnx"
    source = prepared if qnn_preprocess_model(str(model), str(prepared), fuse_layernorm=True) else model
    rows = []
    for bits, kind in BITS.items():
        target, figures = folder / f"{name}.{bits}.onnx", []
        sbonnx.quantize(model, seen, backend="qnn", bits=bits, output=target, verify=False)
        figures.append(_text(sqnr(model, target, held_out)))
        for per_channel in (True, False):
            target = folder / f"{name}.{bits}.{per_channel}.onnx"
            peer(source, target, seen, kind, per_channel=per_channel)
            try:
                figures.append(_text(sqnr(model, target, held_out)))
            except ModelError:
                figures.append("onnxruntime refuses the file")
        rows.append((name, bits, *figures))
        print(*rows[-1], flush=True)
    return rows


def _text(figures: list[float]) -> str:
    return ", ".join(f"{figure:.1f}" for figure in figures)


def main() -> int:
    """Measure and print a table, and write it to docs/results/ with --write."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    pack = load_pack(options.pack)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in options.models for row in measure(pack, name, Path(folder))]
    text = (
        "## Files for the QNN provider\n\n`python -m benchmarks.runtimes.qnn --write`. SQNR of each output "
        f"against the float model, in onnxruntime {onnxruntime.__version__} on the CPU, "
        "on samples that were not used for calibration; "
        f"beside files of `get_qnn_qdq_config`. Nothing was run on a device.\n\n{table(HEADER, rows)}"
    )
    print(text)
    if options.write:
        write_section("qnn", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
