"""What each observer costs in accuracy: all of them on every model of the pack, 8 bit, for onnxruntime.

python -m benchmarks.observers [--models NAME ...] [--limit N] [--write]
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.accuracy import BATCH, HEADLINE, load_pack
from benchmarks.results import arguments, table, write_section
from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.options import RunOptions
from sbonnx.pipeline import MEASURE, prepare, quantized_graph, run
from sbonnx.stages.state import PipelineState, Request, read_recipe

BACKEND: Final = "onnxruntime"

OBSERVERS: Final[Mapping[str, Mapping[str, str]]] = {
    "minmax": {"observer": "minmax"},
    "moving_average": {"observer": "moving_average"},
    "percentile": {"observer": "percentile"},
    "mse": {"observer": "mse"},
    "kl_histogram": {"observer": "kl_histogram"},
    "aciq gaus": {"observer": "aciq", "A.OBSERVER.ACIQ.DISTRIBUTION": "gaus"},
    "aciq laplace": {"observer": "aciq", "A.OBSERVER.ACIQ.DISTRIBUTION": "laplace"},
    "auto": {"observer": "auto"},
}
"""Recipe keys of each observer."""

COUNTS: Final = frozenset({"n_detections"})
"""Metrics for which larger is not better."""

Metrics = Mapping[str, float]


def quantized(model: Path, feeds: list[dict[str, Any]], keys: Mapping[str, str], cache: Path, output: Path) -> None:
    """Quantize `model` with an observer; a calibration cache reuses the statistics of other observers."""
    recipe, backend = read_recipe(None, BACKEND, keys)
    made = prepare(model, recipe, backend)
    samples = Samples.of(feeds, made.graph, RunOptions(cache=cache))
    state = PipelineState(Request(model, recipe, backend), made, data=HeldOutSplit.whole(samples))
    solution = run(MEASURE, state, samples.options).solution
    graphs.save(quantized_graph(made, solution), output, force=True)


def measure(pack: Any, name: str, limit: int | None) -> dict[str, Metrics]:
    """Measure the metrics of one model by observer; those of the float model have the key "float"."""
    path = Path(pack.model_path(name))
    feeds = pack.load_calib(name, batch=BATCH if name != "silero_vad" else 1)
    found: dict[str, Metrics] = {"float": pack.evaluate(name, limit=limit)}
    with tempfile.TemporaryDirectory(prefix="observers-") as folder:
        output = Path(folder) / "quantized.onnx"
        for observer, keys in OBSERVERS.items():
            start = time.monotonic()
            quantized(path, feeds, keys, Path(folder) / "cache", output)
            found[observer] = pack.evaluate(name, str(output), limit=limit)
            shown = " ".join(f"{metric} {found[observer][metric]:.4f}" for metric in HEADLINE[name])
            print(f"{name} {observer}: {shown}, {time.monotonic() - start:.1f} s", file=sys.stderr)
    return found


def rows(name: str, found: Mapping[str, Metrics]) -> list[list[str]]:
    """Return one row per headline metric, the best observer in bold; metrics relative to float have no float value."""
    made = []
    for metric in HEADLINE[name]:
        values = {observer: found[observer].get(metric) for observer in ("float", *OBSERVERS)}
        best = max(value for observer, value in values.items() if observer != "float" and value is not None)
        cells = []
        for observer, value in values.items():
            text = "" if value is None else f"{value:.0f}" if metric in COUNTS else f"{value:.4f}"
            bold = observer != "float" and value == best and metric not in COUNTS
            cells.append(f"**{text}**" if bold else text)
        made.append([name, metric, *cells])
    return made


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(HEADLINE), choices=list(HEADLINE))
    parser.add_argument("--limit", type=int, help="evaluate on so many samples only")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    pack = load_pack(options.pack)
    made = [row for name in options.models for row in rows(name, measure(pack, name, options.limit))]
    samples = "all samples of the evaluation data" if options.limit is None else f"{options.limit} samples"
    text = (
        "## Accuracy by observer\n\n"
        "`python -m benchmarks.observers --write`: the onnxruntime backend's defaults (activations uint8 with a zero "
        "point, one range a tensor; weights int8 per channel, min-max), the observer of the activations changed and "
        f"nothing else. Whole calibration data, {samples}. Bold: the best of the observers. Metrics against float "
        "have no float value.\n\n" + table(["model", "metric", "float", *OBSERVERS], made)
    )
    print(text)
    if options.write:
        write_section("observers", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
