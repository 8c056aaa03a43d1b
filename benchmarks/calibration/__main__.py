"""How fast calibration is, and in how much memory: beside the plain float loop, and beside onnxruntime.quantization.

python -m benchmarks.calibration [--write] [--models NAME ...] [--figures speed memory ...] [--repeats 5] [--quick]
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from benchmarks.accuracy import load_pack
from benchmarks.calibration.runs import FIGURES, NOISE_MB, Effort, Findings, measure
from benchmarks.calibration.subjects import Subject, save_feeds
from benchmarks.calibration.table import Cell, rows
from benchmarks.models import mobilenet, resnet
from benchmarks.results import arguments, table, write_section
from sbonnx.system.cpu import cores

MADE: Final[Mapping[str, Callable[[], onnx.ModelProto]]] = {"resnet18": resnet, "mobilenetv2": mobilenet}
"""Models that are generated with seeded random weights; their samples are seeded noise."""

MODELS: Final = (*MADE, "squeezenet11", "minilm_l6")

ABOUT: Final = """## Speed and memory of calibration

`python -m benchmarks.calibration --write`; {count} samples in batches of one, {repeats} repeats on {cores} cores. A \
figure is the median, with the smallest and the largest in brackets, then what it is to reach and whether it does.

Float loop: `session.run(None, feed)` over the same samples in one onnxruntime session with its default options, \
which is there already. Ours counts from a plan to the range of every activation: opening its sessions, running the \
samples, and solving. Weights are not counted, nor is planning. Both run in one process, by turns.

percentile, mse, kl_histogram, aciq and auto read the same statistics: the pass over the samples is timed once a \
repeat, and the search of each added to it.

asym: a float and a quantized stream, layer by layer, `memory="512 MiB"`, weights included.

From the cache: the first run, with minmax, fills a new folder; the next ones read it, digests of model and data \
included.

Workers: calibration with mse to the last number, weights included; how many numbers differ in any bit.

CPU: of all threads; run: the graph with the observed tensors as its outputs; rest: mostly opening sessions. The \
float loop by two threads is what running samples side by side, as ours does, can gain on this machine before \
anything is observed.

Memory: peaks of whole processes (three each), their imports and the samples included; MB are 10**6 bytes. A growth \
of less than {noise:g} MB is none: so far do peaks of equal processes lie apart.

Peer: `onnxruntime.quantization`'s calibrators with their defaults on the same tensors, {peer_count} samples (its \
histogram methods keep all activations of all samples). Both begin with the same fused graph in a file and the choice \
of tensors, and end with ranges, each run in a process of its own.

SqueezeNet has 100 samples and sees the first of them twice. ResNet-18 and MobileNetV2 have random weights and samples.

"""


def lay_out(names: Sequence[str], pack: Path, folder: Path, count: int) -> list[Subject]:
    """Write generated models and all samples to `folder`; models of the pack are used in place."""
    subjects = []
    for name in names:
        data = folder / f"{name}.npz"
        if name in MADE:
            path = folder / f"{name}.onnx"
            onnx.save(MADE[name](), str(path))
            rng = np.random.default_rng(0)
            feeds = [{"image": rng.standard_normal((1, 3, 224, 224), np.float32)} for _ in range(count)]
        else:
            module = load_pack(pack)
            path, feeds = Path(module.model_path(name)), module.load_calib(name, batch=1, limit=count)
        save_feeds(data, feeds)
        subjects.append(Subject(name, path, data))
    return subjects


def result(names: Sequence[str], findings: Sequence[Findings], effort: Effort, cores: int) -> str:
    """Return the section of docs/results/."""
    figures = list(dict.fromkeys(name for one in findings for name in one.cells))
    text = ABOUT.format(
        count=effort.count, repeats=effort.repeats, cores=cores, noise=NOISE_MB, peer_count=effort.peer_count
    )
    text += table(["figure", *names], rows(figures, [one.cells for one in findings]))
    remarks = [f"- {name}: {remark}" for name, one in zip(names, findings, strict=True) for remark in one.remarks]
    return text + ("\n\n" + "\n".join(remarks) if remarks else "")


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/. Exit code 1 if a target is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--figures", nargs="*", default=list(FIGURES), choices=FIGURES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--peer-samples", type=int, default=64, help="the peer keeps all activations of all of them")
    parser.add_argument("--quick", action="store_true", help="does it run at all: few samples, once")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    effort = Effort(options.repeats, options.samples, options.peer_samples, tuple(options.figures))
    if options.quick:
        if options.write:
            parser.error("--quick shows that the benchmark runs; its figures are not worth writing down")
        effort = Effort(1, 6, 4, effort.figures)
    findings = []
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        for subject in lay_out(options.models, options.pack, Path(folder), effort.count):
            start = time.monotonic()
            findings.append(measure(subject, effort))
            print(f"{subject.name}: measured in {time.monotonic() - start:.0f} s", file=sys.stderr)
            for name, cell in findings[-1].cells.items():
                print(f"    {name:60s} {cell}", file=sys.stderr)
    text = result(options.models, findings, effort, cores())
    print(text)
    if options.write:
        write_section("calibration", text)
    cells = [cell for one in findings for cell in one.cells.values() if isinstance(cell, Cell)]
    return int(not all(cell.met for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
