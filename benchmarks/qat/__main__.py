"""What training gains over calibration: accuracy at 4 bits and below, from unlabelled images alone.

    python -m benchmarks.qat [--tables cifar methods digits] [--threads N] [--quick] [--write]

Each table is a section of its own in docs/results/, so that one can be measured again without the others.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.accuracy import load_pack
from benchmarks.qat.runs import Outcome, Reference, Score, Subject, calibrated, float_outcome, trained
from benchmarks.results import arguments, table, write_section
from sbonnx.assets import digits
from sbonnx.qat import METHODS, Settings

MODEL: Final = "cifar_resnet20"
RECIPE: Final[Mapping[str, Any]] = {"backend": "virtual", "observer": "mse"}
NEAREST: Final[Mapping[str, Any]] = {"rounding": "nearest", "BIAS_CORRECTION": "none"}
AUGMENT: Final = "flip,shift"
WIDTHS: Final = ("w4a4", "w3a3", "w2a4")
LEARNED: Final = tuple(name for name in METHODS if name != "uniform")
TABLES: Final = ("cifar", "methods", "digits")

POINTS: Final = 2.0
"""Largest allowed loss of top-1 against float, in percentage points, at W4A4 on CIFAR and at W2A2 on digits."""

MINUTES: Final = {"cifar": 15.0, "digits": 3.0}
"""Largest allowed duration of a training run."""

SAME: Final = 0.005
"""Largest difference of top-1 between the file and the module. Floats are summed in another order, which can change
the class of a few borderline images."""

TITLE: Final = "## Training: {}\n\n`python -m benchmarks.qat --tables {} --write`.\n\n"

ABOUT: Final = """Top-1 and, in brackets, the SQNR of class scores against the float network in dB, on images that \
neither calibration nor training has seen. Training sees {images} unlabelled images, those of calibration, and learns \
from the float network: {settings}. Torch: the module in eval mode; file: the exported file in onnxruntime, without \
its rewrite of float biases to integers, which is far too coarse below 8 bits (default: with it). Seconds are those of \
training on {threads} threads. One seed. Training is to better top-1 on the last set, the largest. The default \
settings of training were chosen by runs on these models that were judged by these same unseen images, so the figures \
of trained networks are somewhat flattered."""

HEADER: Final = ("network", "set", "torch", "file", "default", "loss, points", "seconds")


@dataclass(frozen=True)
class Line:
    """One network of a table."""

    name: str
    outcome: Outcome
    start: Outcome | None = None
    points: float | None = None
    minutes: float | None = None


def rows(lines: Sequence[Line], reference: Outcome) -> list[Sequence[str]]:
    """Return the table rows, one for each line and evaluation set."""
    found: list[Sequence[str]] = []
    for line in lines:
        one = line.outcome
        for name, score in one.file.items():
            lost = 100.0 * (reference.file[name].top1 - score.top1)
            taken = f"{one.seconds:.0f}" if one.seconds else ""
            module = shown(one.module[name]) if one.module else ""
            found.append((line.name, name, module, shown(score), shown(one.default[name]), f"{lost:.2f}", taken))
    return found


def shown(score: Score) -> str:
    """Format a score."""
    return f"{score.top1:.4f} ({score.sqnr:.2f})"


def faults(lines: Sequence[Line], reference: Outcome) -> list[str]:
    """Return one sentence for each missed goal."""
    found = []
    for line in lines:
        one = line.outcome
        for name, score in one.file.items():
            where = f"{line.name} on {name}"
            if line.points is not None and 100.0 * (reference.file[name].top1 - score.top1) > line.points:
                found.append(f"{where}: loses more than {line.points:.1f} points")
            if one.module and abs(one.module[name].top1 - score.top1) > SAME:
                found.append(f"{where}: the file's top-1 is not the module's")
            before = None if line.start is None else line.start.file[name]
            counts = name == list(one.file)[-1]  # only the largest set counts: 2,000 images on CIFAR, the other has 500
            if before is not None and counts and score.top1 <= before.top1:
                found.append(f"{where}: no better than where training began, {shown(before)}")
        if line.minutes is not None and one.seconds > 60.0 * line.minutes:
            found.append(f"{line.name}: training took longer than {line.minutes:.0f} minutes")
        if line.minutes is not None:  # not for calibration alone, whose error may be large before training
            found += [f"{line.name}: {problem}" for problem in one.problems]
    return found


def text(name: str, lines: Sequence[Line], images: int, settings: Settings, augment: str | None) -> str:
    """Return a table with its explanation. The first line is the float network."""
    changed = f", images changed by {augment}" if augment else ""
    how = f"{settings.epochs} epochs of batches of {settings.batch}{changed}, else the defaults"
    about = ABOUT.format(images=images, settings=how, threads=torch.get_num_threads())
    missed = faults(lines, lines[0].outcome)
    verdict = "".join(f"\n- **missed**: {sentence}" for sentence in missed) or "\nAll goals met."
    body = table(HEADER, rows(lines, lines[0].outcome))
    return f"{TITLE.format(name, name)}{about}\n\n{body}\n{verdict}\n"


def cifar(pack: Any, limit: int | None) -> Subject:
    """Return the pack's ResNet-20 with its calibration images and two evaluation sets."""
    entry, held = pack.entry(MODEL), {}
    for name, file in entry["eval_files"].items():
        kept = np.load(pack._path(file))
        images = pack._prep_images(pack._images(kept, limit), entry["preprocess"])
        held[name] = (images, kept["Y"][:limit].astype(np.int64))
    return Subject(Path(pack.model_path(MODEL)), pack.load_calib(MODEL, limit=limit), held)


def bundled() -> Subject:
    """Return the digits model that is bundled with sbonnx."""
    files = digits()
    images, kept = np.load(files.calib)["image"], np.load(files.eval)
    feeds = [{"image": images[at : at + 32]} for at in range(0, len(images), 32)]
    return Subject(files.model, feeds, {"unseen": (kept["image"], kept["label"])})


def told(lines: list[Line], line: Line) -> None:
    """Append a line and print it."""
    lines.append(line)
    scores = " ".join(f"{name} {shown(score)}" for name, score in line.outcome.file.items())
    print(f"{line.name:24s} {scores} {line.outcome.seconds:.0f} s", file=sys.stderr, flush=True)


def cifar_lines(reference: Reference, folder: Path, settings: Settings) -> list[Line]:
    """Measure calibration and LSQ at each bit width."""
    lines: list[Line] = []
    told(lines, Line("float", float_outcome(reference)))
    for bits in WIDTHS:
        recipe = {**RECIPE, "bits": bits}
        told(lines, Line(f"{bits} nearest", calibrated(reference, folder, {**recipe, **NEAREST})))
        start, end = trained(reference, folder, recipe, "lsq", settings, AUGMENT)
        told(lines, Line(f"{bits} calibrated", start))
        points = POINTS if bits == "w4a4" else None  # at lower widths it is only reported
        told(lines, Line(f"{bits} trained (lsq)", end, None, points, MINUTES["cifar"]))
    return lines


def method_lines(reference: Reference, folder: Path, settings: Settings) -> list[Line]:
    """Measure every method, each from its own calibration."""
    lines: list[Line] = []
    told(lines, Line("float", float_outcome(reference)))
    for method in LEARNED:
        start, end = trained(reference, folder, {**RECIPE, "bits": "w3a3"}, method, settings, AUGMENT)
        told(lines, Line(f"w3a3 {method}, start", start))
        told(lines, Line(f"w3a3 {method}, trained", end, start, None, MINUTES["cifar"]))
    return lines


def digits_lines(reference: Reference, folder: Path, settings: Settings) -> list[Line]:
    """Measure the bundled model at two bits."""
    lines: list[Line] = []
    told(lines, Line("float", float_outcome(reference)))
    start, end = trained(reference, folder, {"backend": "virtual", "bits": "w2a2"}, "lsq", settings, None)
    told(lines, Line("w2a2 calibrated", start))
    told(lines, Line("w2a2 trained (lsq)", end, start, POINTS, MINUTES["digits"]))
    return lines


EPOCHS: Final = {"cifar": 60, "methods": 40, "digits": 200}
LINES: Final = {"cifar": cifar_lines, "methods": method_lines, "digits": digits_lines}


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/. Exit code 1 if a goal is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--threads", type=int, default=2, help="of torch and onnxruntime")
    parser.add_argument("--quick", action="store_true", help="does it run at all: few images, one epoch")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick shows that the benchmark runs; its figures are not worth writing down")
    torch.set_num_threads(options.threads)
    bad = False
    with tempfile.TemporaryDirectory(prefix="qat-") as folder:
        for which in options.tables:
            begin = time.monotonic()
            limit = 64 if options.quick else None
            subject = bundled() if which == "digits" else cifar(load_pack(options.pack), limit)
            settings = Settings(epochs=1 if options.quick else EPOCHS[which])
            lines = LINES[which](Reference(subject), Path(folder), settings)
            images = sum(len(feed[subject.input]) for feed in subject.feeds)
            said = text(which, lines, images, settings, None if which == "digits" else AUGMENT)
            print(f"{which}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
            print(said, flush=True)
            bad = bad or "**missed**" in said
            if options.write:
                write_section(f"qat {which}", said)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
