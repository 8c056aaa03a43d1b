"""Accuracy against measured latency of pruning, quantization, and both: a table and docs/results/pruning_front.svg.

    python -m benchmarks.pruning.front [--models NAME ...] [--shares 0.85 0.7 0.55] [--kept FILE] [--write]

Each model is pruned to shares of its estimated time; the float model and each pruned one are quantized to 8 bits with
the defaults for onnxruntime. Files run in turn with the float model on one thread. The chart needs matplotlib.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import sbonnx
from benchmarks import scores
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.pruning.files import latency_ratio
from benchmarks.results import RESULTS, arguments, table, write_section
from benchmarks.scores import Estimate

MODELS: Final = ("cifar_resnet20", "mobilenetv2_tin200", "squeezenet11")
SHARES: Final = (0.85, 0.7, 0.55)
FLOAT, INT8 = "float32", "W8A8"
CHART: Final = RESULTS / "pruning_front.svg"
HEADER: Final = ("model", "estimated time", "type", "latency ÷ float", "top-1", "as float", "SQNR, dB", "front")

ABOUT: Final = """`python -m benchmarks.pruning.front --write`. Networks pruned to a share of their estimated time \
(`--latency`; 1: not pruned), without training and without labels, in float32 and with the default W8A8 for \
onnxruntime on top. Latency: median of runs that alternate with the float model, one thread. top-1, and the share of \
samples whose class is that of the float model, with 95 % intervals. Front: no other row of the model is both faster \
and at least as accurate."""


def measured(pack: Any, name: str, share: float, kept: Kept, folder: Path) -> dict[str, Record]:
    """Return the records of a pruned network in float and in 8 bits."""
    model = Path(pack.model_path(name))
    found = {kind: kept.get(name, f"{share:g}", kind) for kind in (FLOAT, INT8)}
    if all(found.values()):
        return {kind: record for kind, record in found.items() if record is not None}
    feeds = pack.load_calib(name)
    pruned, quantized = folder / f"{name}.pruned.onnx", folder / f"{name}.int8.onnx"
    source = model
    if share < 1:
        sbonnx.prune(model, feeds, latency=share, output=pruned, force=True)
        source = pruned
    sbonnx.quantize(source, feeds, output=quantized, force=True, verify=False)
    reference = scores.outputs(pack, name)
    feed = {key: value[:1] for key, value in feeds[0].items()}

    def record(path: Path) -> Record:
        scored = scores.evaluate(pack, name, reference, scores.outputs(pack, name, path))
        return {"latency": 1.0 if path == model else latency_ratio(model, path, feed), **asdict(scored)}

    files = {FLOAT: source, INT8: quantized}
    return {kind: kept.record((name, f"{share:g}", kind), partial(record, path)) for kind, path in files.items()}


Points = Mapping[tuple[str, float, str], Record]
"""Records by model, share and type."""


def on_front(points: Points, key: tuple[str, float, str]) -> bool:
    """Return whether no other point of the model is faster and at least as accurate."""
    mine = points[key]
    others = (record for other, record in points.items() if other[0] == key[0] and other != key)
    return not any(
        record["latency"] <= mine["latency"] and record["metric"]["value"] >= mine["metric"]["value"]
        for record in others
    )


def lines(points: Points) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for key, record in points.items():
        name, share, kind = key
        metric, agreement = (Estimate(**record[what]) for what in ("metric", "agreement"))
        is_float = share == 1 and kind == FLOAT
        rows.append(
            [
                *(name, f"{share:g}", kind, f"{record['latency']:.2f}"),
                f"{metric.value:.4f} ({metric.low:.4f} to {metric.high:.4f})",
                "" if is_float else f"{agreement.value:.4f}",
                "" if is_float else f"{record['sqnr']['value']:.1f}",
                "yes" if on_front(points, key) else "",
            ]
        )
    return rows


def draw(points: Points, path: Path) -> None:
    """Draw accuracy against latency, one panel for each model.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "sbonnx", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for name, _, _ in points))
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.6 * len(names), 3.4), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        for kind, marker, colour in ((FLOAT, "o", "#1b6ca8"), (INT8, "s", "#c8553d")):
            found = [
                (share, record) for (model, share, type_), record in points.items() if (model, type_) == (name, kind)
            ]
            found.sort(key=lambda one: one[0])
            x, y = [one["latency"] for _, one in found], [one["metric"]["value"] for _, one in found]
            low = [one["metric"]["value"] - one["metric"]["low"] for _, one in found]
            high = [one["metric"]["high"] - one["metric"]["value"] for _, one in found]
            axis.errorbar(x, y, yerr=[low, high], marker=marker, color=colour, label=kind, capsize=2, linewidth=1)
            for (share, _), left, top in zip(found, x, y, strict=True):
                axis.annotate(f"{share:g}", (left, top), textcoords="offset points", xytext=(4, 5), color=colour)
        axis.set(title=name, xlabel="measured latency ÷ float", ylabel="top-1")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/ and the chart."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--kept", type=Path, help="file of records of an interrupted run")
    options = parser.parse_args()
    pack, kept = load_pack(options.pack), Kept(options.kept)
    points: dict[tuple[str, float, str], Record] = {}
    with tempfile.TemporaryDirectory(prefix="front-") as folder:
        for name in options.models:
            for share in (1.0, *options.shares):
                for kind, record in measured(pack, name, share, kept, Path(folder)).items():
                    points[name, share, kind] = record
                print("\n".join(" | ".join(row) for row in lines(points)[-2:]), flush=True)
    text = f"## Pruning and quantization\n\n![accuracy against latency](pruning_front.svg)\n\n{ABOUT}\n\n"
    text += table(HEADER, lines(points))
    print(text)
    if options.write:
        draw(points, CHART)
        write_section("pruning front", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
