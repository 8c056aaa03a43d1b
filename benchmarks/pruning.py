"""Accuracy and cost of structured pruning, without training, with other ways and peers: section of docs/results.md.

python -m benchmarks.pruning --pack FOLDER [MODEL ...] [--shares 0.75 0.5] [--ways WAY ...] [--write]

All ways get the same file and calibration samples, and leave at most the same share of the multiplications, counted on
the written file. Peers run in their own environments (`make peers`); one that is not there leaves its reason.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.lowbit_peers.environments import FOLDER, PEERS, ROOT, absent, python_of
from benchmarks.pruning_files import Feed, correct_statistics, float_pass, latency_ratio, sizes
from benchmarks.results import arguments, table, write_section
from sbonnx import graph as graphs
from sbonnx.pruning.verified import load_for_pruning

MODELS: Final = ("cifar_resnet20", "squeezenet11", "mobilenetv2_tin200")

MULTIPLES: Final = {"squeezenet11": 16}
"""Multiple of the remaining channels, by model; 1 for others."""

ONNXSIM: Final = "onnxsim"
SCRIPT: Final = "benchmarks.lowbit_peers.onnxsim_pruning"

STEPS: Final = 7
"""Bisections of the ratio of uniform ways."""

HEADER: Final = ("model", "way", "multiplications", "stored values", "top-1", "latency", "CPU s", "float passes")


class NotRun(Exception):
    """A way that cannot be had, with the reason."""


@dataclass(frozen=True)
class Subject:
    """A float model, its calibration samples, and a folder for files.

    Attributes:
        multiple: of the remaining channels, where a way knows multiples.
        share: of the multiplications that may remain.
    """

    model: Path
    feeds: list[Feed]
    folder: Path
    multiple: int
    share: float

    def path(self, name: str) -> Path:
        """Return a path in the folder that does not exist."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path

    def left(self, path: Path) -> float:
        """Return the share of the multiplications in a file."""
        return sizes(path, self.feeds[0])[0] / sizes(self.model, self.feeds[0])[0]


Way = Callable[[Subject], tuple[Path, float]]
"""Returns the pruned file and the CPU seconds that it took."""


def by_budget(strategy: str) -> Way:
    """Numbers of channels by sensitivity curves, weights refitted."""

    def run(subject: Subject) -> tuple[Path, float]:
        output, begin = subject.path("pruned.onnx"), time.process_time()
        sbonnx.prune(
            subject.model,
            subject.feeds,
            macs=subject.share,
            strategy=strategy,
            multiple=subject.multiple,
            output=output,
            threads=1,
        )
        return output, time.process_time() - begin

    return run


def by_time(subject: Subject) -> tuple[Path, float]:
    """Prune by sensitivity curves and the estimated time; the share is one of the time."""
    output, begin = subject.path("pruned.onnx"), time.process_time()
    sbonnx.prune(subject.model, subject.feeds, latency=subject.share, output=output, threads=1)
    return output, time.process_time() - begin


def uniform(strategy: str, *, refit: bool) -> Way:
    """One ratio for all dimensions."""

    def run(subject: Subject) -> tuple[Path, float]:
        ratio = _ratio(subject)
        output, begin = subject.path("pruned.onnx"), time.process_time()
        sbonnx.prune(
            subject.model, subject.feeds, ratio=ratio, strategy=strategy, refit=refit, output=output, threads=1
        )
        return output, time.process_time() - begin

    return run


def tuned(subject: Subject) -> tuple[Path, float]:
    """Prune by norms with one ratio; mean and variance of each output as in the float model.

    The file has unchanged shapes; its multiplications are those of the file without the channels.
    """
    plain, masked, output = (subject.path(name) for name in ("float.onnx", "masked.onnx", "pruned.onnx"))
    graphs.save(load_for_pruning(subject.model)[0], plain)
    ratio, begin = _ratio(subject), time.process_time()
    sbonnx.prune(subject.model, ratio=ratio, strategy="l1norm", masked=True, output=masked, threads=1)
    correct_statistics(plain, masked, output, subject.feeds)
    return output, time.process_time() - begin


def _ratio(subject: Subject) -> float:
    """Return the least ratio that leaves at most the share of the multiplications."""

    def left(ratio: float) -> float:
        output = subject.path("tried.onnx")
        sbonnx.prune(subject.model, ratio=ratio, strategy="l1norm", output=output, threads=1)
        return subject.left(output)

    return bisected(left, subject.share)


def bisected(left: Callable[[float], float], share: float) -> float:
    """Return the least ratio in (0, 1), up to 1/128, for which a decreasing function is at most `share`."""
    low, high = 0.0, 1 - 2.0**-STEPS
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if left(middle) <= share else (middle, high)
    return high


def onnxsim(method: str) -> Way:
    """Prune with onnxsim: the least sparsity that leaves at most the share of the multiplications."""

    def run(subject: Subject) -> tuple[Path, float]:
        reason = absent(FOLDER, ONNXSIM)
        if reason is not None:
            raise NotRun(reason)
        data, output = subject.folder / "samples.npz", subject.path("pruned.onnx")
        arrays: dict[str, Any] = {
            key: np.concatenate([feed[key] for feed in subject.feeds]) for key in subject.feeds[0]
        }
        np.savez(data, **arrays)
        costs = []

        def left(sparsity: float) -> float:
            job = {"model": str(subject.model), "data": str(data), "output": str(output), "batch": 1}
            told = json.dumps({**job, "method": method, "sparsity": sparsity})
            command = [str(python_of(FOLDER, ONNXSIM)), "-m", SCRIPT, told]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                raise NotRun((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
            costs.append(float(json.loads(done.stdout.strip().splitlines()[-1])["cpu"]))
            return subject.left(output)

        sparsity = bisected(left, subject.share)
        remains = left(sparsity)
        if remains > subject.share:
            raise NotRun(f"its highest sparsity leaves {remains:.2f} of the multiplications")
        return output, costs[-1]

    return run


WAYS: Final[dict[str, Way]] = {
    "onnxsim, l2 norm": onnxsim("l2"),
    "onnxsim, l1 norm": onnxsim("l1"),
    "onnxsim, Wanda": onnxsim("wanda"),
    "l1norm, uniform, no refit": uniform("l1norm", refit=False),
    "l1norm, uniform, mean and variance": tuned,
    "l1norm, uniform": uniform("l1norm", refit=True),
    "obs, uniform": uniform("obs", refit=True),
    "l1norm": by_budget("l1norm"),
    "obs": by_budget("obs"),
    "latency": by_time,
}
"""Ways to prune, peers first, then the plainest."""

STANDARD: Final = tuple(way for way in WAYS if way != "latency")
"""Ways of the table."""


def main() -> None:
    """Print one row for each model, share and way."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--shares", nargs="*", type=float, default=(0.75, 0.5))
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=STANDARD)
    parser.add_argument("--samples", type=int, help="calibration samples; default: all of the pack")
    given = parser.parse_args()
    pack = load_pack(given.pack)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            feeds = pack.load_calib(name, limit=given.samples)
            model = Path(pack.model_path(name))
            once = float_pass(model, feeds)
            rows.append((name, "float", "1", "1", _figures(pack.evaluate(name)), "1", "", "1"))
            for share in given.shares:
                subject = Subject(model, feeds, Path(folder), MULTIPLES.get(name, 1), share)
                for way in given.ways:
                    rows.append(row(pack, name, subject, way, once))
                    print(" | ".join(rows[-1]), flush=True)
    if given.write:
        write_section("pruning", text_of(rows, given.ways))


def row(pack: Any, name: str, subject: Subject, way: str, once: float) -> tuple[str, ...]:
    """Prune one model, evaluate and time the file.

    Args:
        once: CPU seconds of one pass of the float model over the samples.
    """
    label = f"{way}, at most {subject.share:g}"
    try:
        path, seconds = WAYS[way](subject)
    except NotRun as reason:
        return (name, label, "", "", f"not run: {reason}", "", "", "")
    told = "-"
    before, after = (sizes(each, subject.feeds[0]) for each in (subject.model, path))
    shares = [f"{new / old:.3f}" for old, new in zip(before, after, strict=True)]
    if WAYS[way] is tuned:
        shares = [f"{subject.left(subject.folder / 'tried.onnx'):.3f}", "-"]
    else:
        told = f"{latency_ratio(subject.model, path, subject.feeds[0]):.2f}"
    figures = _figures(pack.evaluate(name, str(path)))
    return (name, label, *shares, figures, told, f"{seconds:.1f}", f"{seconds / once:.0f}")


def _figures(metrics: dict[str, float]) -> str:
    return " / ".join(f"{value:.4g}" for key, value in metrics.items() if key.endswith(":top1"))


def text_of(rows: Sequence[Sequence[str]], ways: Sequence[str]) -> str:
    """Return the section: what was run, and the table."""
    versions = PEERS[ONNXSIM].versions if any(way.startswith(ONNXSIM) for way in ways) else "none"
    multiples = ", ".join(f"{name} {multiple}" for name, multiple in MULTIPLES.items())
    return (
        "## Structured pruning\n\n`python -m benchmarks.pruning --write`. No training, no labels; obs is the default "
        "of `sbonnx prune`. All ways get the same float file and calibration samples, of which ours holds out a "
        "tenth for verification; multiplications and stored values are counted on the written files. Uniform: one "
        "ratio for all dimensions, the least that meets the share. Mean and variance: of each output of each layer as "
        "in the float network (batch-norm tuning). Latency: relative to float, runs alternating, one thread. CPU s: of "
        "pruning, verification included; float passes: the same in passes of the float network over all calibration "
        f"samples. Remaining channels are multiples where ours can choose: {multiples}. Peers: {versions}.\n\n"
        + table(HEADER, rows)
    )


if __name__ == "__main__":
    main()
