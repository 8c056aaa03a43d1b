"""Accuracy of trained models after pruning, without training: rows of docs/pruning.md.

python -m benchmarks.pruning --pack FOLDER [MODEL ...] [--shares 0.75 0.5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx.pruning.verified import PruningReport

MODELS: Final = ("cifar_resnet20", "squeezenet11", "mobilenetv2_tin200")

Way = Callable[[str, Any, float, dict[str, Any]], PruningReport]


def by_budget(strategy: str) -> Way:
    """Numbers of channels by sensitivity curves, weights refitted."""

    def run(model: str, feeds: Any, share: float, more: dict[str, Any]) -> PruningReport:
        return sbonnx.prune(model, feeds, macs=share, strategy=strategy, threads=1, **more)

    return run


def uniform(strategy: str, *, refit: bool) -> Way:
    """One ratio for all dimensions, which leaves about this share of the multiplications: 1 - sqrt(share)."""

    def run(model: str, feeds: Any, share: float, more: dict[str, Any]) -> PruningReport:
        ratio = 1 - float(np.sqrt(share))
        return sbonnx.prune(model, feeds, ratio=ratio, strategy=strategy, refit=refit, threads=1, **more)

    return run


WAYS: Final[dict[str, Way]] = {
    "l1norm, uniform, no refit": uniform("l1norm", refit=False),
    "l1norm, uniform": uniform("l1norm", refit=True),
    "obs, uniform": uniform("obs", refit=True),
    "l1norm": by_budget("l1norm"),
    "obs": by_budget("obs"),
}
"""Ways to prune, plainest first."""


def main() -> None:
    """Print one row for each model, share and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--pack", type=Path, required=True, help="folder of the trained models")
    parser.add_argument("--shares", nargs="*", type=float, default=(0.75, 0.5))
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=("obs",))
    parser.add_argument("--samples", type=int, help="calibration samples; default: all of the pack")
    parser.add_argument("--multiple", type=int, default=1)
    given = parser.parse_args()
    pack = load_pack(given.pack)
    print(
        "| model | way | multiplications | stored values | metrics | latency | CPU s |\n|---|---|---|---|---|---|---|"
    )
    for name in given.models:
        feeds = pack.load_calib(name, limit=given.samples)
        for share in given.shares:
            for way in given.ways:
                print(row(pack, name, feeds, way, share, {"multiple": given.multiple}), flush=True)


def row(pack: Any, name: str, feeds: Any, way: str, share: float, more: dict[str, Any]) -> str:
    """Prune one model and evaluate the file."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "pruned.onnx"
        begin = time.process_time()
        report = WAYS[way](pack.model_path(name), feeds, share, {**more, "output": output})
        seconds = time.process_time() - begin
        metrics = pack.evaluate(name, str(output))
    figures = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if key.endswith(("top1", "db")))
    latency = report.metrics.get("latency_ratio")
    told = "-" if latency is None else f"{latency:.2f}"
    return f"| {name} | {way} | {report.macs:.3f} | {report.weights:.3f} | {figures} | {told} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
