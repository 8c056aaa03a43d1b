"""Prune the bundled digits network, quantize it, and compare all files: accuracy, size, latency.

python examples/prune/prune_and_quantize.py OUT_FOLDER [--macs 0.5] [--finetune EPOCHS]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

import sbonnx
from sbonnx import digits, verify

PATHS = digits()


def evaluation() -> tuple[np.ndarray, np.ndarray]:
    """Return 450 images (450, 1, 8, 8) that the network was not trained on, and their labels."""
    with np.load(PATHS.eval) as arrays:
        return arrays["image"], arrays["label"]


def accuracy(model: Path) -> float:
    """Return the share of evaluation images that a file classifies correctly in onnxruntime."""
    images, labels = evaluation()
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return float((session.run(None, {"image": images})[0].argmax(axis=1) == labels).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pruned.onnx, int8.onnx and pruned_int8.onnx, and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--macs", type=float, default=0.5, help="share of the multiplications that may remain")
    parser.add_argument("--finetune", type=int, help="epochs of training towards the float network; needs torch")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)

    pruned, int8, both = (given.folder / name for name in ("pruned.onnx", "int8.onnx", "pruned_int8.onnx"))
    report = sbonnx.prune(
        PATHS.model, PATHS.calib, macs=given.macs, finetune=given.finetune, output=pruned, split=1, force=True
    )
    problems = [*report.problems]
    print(f"{100 * report.macs:.0f} % of the multiplications remain; by dimension:")
    for row in report.dimensions:
        print(f"  {', '.join(row.writers)}: {row.before} -> {row.after} channels")
    for source, target in ((PATHS.model, int8), (pruned, both)):
        made = sbonnx.quantize(source, PATHS.calib, backend="onnxruntime", output=target, split=1, force=True)
        problems += made.problems

    print(f"{'file':20} {'accuracy':>8} {'kB':>6} {'latency':>8}")
    print(f"{'float':20} {accuracy(PATHS.model):8.4f} {PATHS.model.stat().st_size / 1000:6.1f} {1:8.2f}")
    for path in (pruned, int8, both):
        compared = verify.compare(PATHS.model, path, [{"image": evaluation()[0]}])
        print(f"{path.name:20} {accuracy(path):8.4f} {path.stat().st_size / 1000:6.1f} {compared.latency_ratio:8.2f}")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
