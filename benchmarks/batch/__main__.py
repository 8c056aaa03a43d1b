"""A batch of seven models for four targets: against single commands, killed again and again, and done before.

    python -m benchmarks.batch [--tables wall kills overhead] [--models NAME ...] [--workers 2] [--write]

Each table is a section of its own in docs/results/, so that one can be measured again without the others. "wall"
takes about ten minutes, "kills" five.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.accuracy import BATCH, HEADLINE, load_pack
from benchmarks.batch.work import noop, nowhere, wish_of
from benchmarks.results import ROOT, arguments, table, write_section

TABLES = ("wall", "kills", "overhead")
BACKENDS = ("onnxruntime", "tensorrt")
BITS = ("w8a8", "w4a8")
KILLS = 20
NOOPS = 200
TITLE = "## Batch: {}\n\n`python -m benchmarks.batch --tables {} --write`, {} workers on {} cores.\n\n"
Report = dict[str, Any]


def prepare(pack: Any, names: list[str], folder: Path) -> None:
    """Write calibration data as folders of .npz files, and a job file for them, to `folder`."""
    jobs = []
    for name in names:
        data = folder / "data" / name
        data.mkdir(parents=True)
        for number, feed in enumerate(pack.load_calib(name, batch=1 if name == "silero_vad" else BATCH)):
            np.savez(data / f"{number:04d}.npz", **feed)
        jobs.append({"model": str(Path(pack.model_path(name)).resolve()), "data": str(data)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    write_jobs(folder, jobs, "out")


def write_jobs(folder: Path, jobs: list[dict[str, Any]], output: str) -> Path:
    """Write the job file as JSON, which is valid YAML."""
    path = folder / f"{output}.yaml"
    matrix = {"backend": list(BACKENDS), "bits": list(BITS)}
    given = {"output": output, "matrix": matrix, "defaults": {"limits": {"retries": KILLS}}, "jobs": jobs}
    path.write_text(json.dumps(given, indent=1))
    return path


def command(jobs: Path, workers: int) -> list[str]:
    """Return the command line of the batch."""
    return [sys.executable, "-m", "sbonnx", "batch", str(jobs), "--workers", str(workers), "--quiet"]


def timed(line: list[str], allowed: tuple[int, ...] = (0, 1)) -> tuple[float, int]:
    """Run a command and return its wall time in seconds and its exit code."""
    began = time.perf_counter()
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode not in allowed:
        sys.exit(f"{shlex.join(line)} ended with {done.returncode}: {done.stderr}")
    return took, done.returncode


def singles(jobs: list[dict[str, Any]], folder: Path) -> tuple[float, dict[str, int]]:
    """Run all jobs as single commands, sequentially; returns seconds, and exit codes by file name."""
    folder.mkdir()
    total, codes = 0.0, {}
    for job in jobs:
        for backend in BACKENDS:
            for bits in BITS:
                name = f"{Path(job['model']).stem}-{backend}-{bits}"
                line = [sys.executable, "-m", "sbonnx", "quantize", job["model"], "--data", job["data"], "--quiet"]
                line += ["-o", str(folder / f"{name}.onnx"), "--backend", backend, "--bits", bits]
                took, codes[name] = timed(line, (0, 1, 2))
                print(f"    {name}: {took:.1f} s, exit code {codes[name]}", file=sys.stderr)
                total += took
    return total, codes


def read(folder: Path) -> Report:
    """Read the report of a batch."""
    found: Report = json.loads((folder / "report.json").read_text())
    return found


def same_files(first: Path, second: Path) -> tuple[int, int]:
    """Count the models in either folder, and those that are identical in both, byte for byte."""
    names = {path.name for folder in (first, second) for path in folder.glob("*.onnx")}
    pairs = [(first / name, second / name) for name in names]
    return len(names), sum(a.is_file() and b.is_file() and a.read_bytes() == b.read_bytes() for a, b in pairs)


def wall(folder: Path, workers: int) -> str:
    """Compare a batch with single commands; then repeat the batch unchanged, and with one recipe changed."""
    jobs = json.loads((folder / "jobs.json").read_text())
    first, _ = timed(command(folder / "out.yaml", workers))
    report = read(folder / "out")
    again, _ = timed(command(folder / "out.yaml", workers))
    repeated = read(folder / "out")
    changed = [{**jobs[0], "set": {"observer": "percentile"}}, *jobs[1:]]
    third, _ = timed(command(write_jobs(folder, changed, "out"), workers))
    other = read(folder / "out")
    write_jobs(folder, jobs, "out")
    timed(command(folder / "out.yaml", workers))
    alone, codes = singles(jobs, folder / "alone")
    count, equal = same_files(folder / "out", folder / "alone")
    statuses = Counter(row["outcome"]["status"] for row in report["rows"])
    runs = {key: one["counters"].get("runs", 0) for key, one in report["steps"].items()}
    measured = {report["titles"][key]: samples for key, samples in runs.items() if samples}
    new = [one for key, one in other["steps"].items() if key not in report["steps"]]
    done_now = sum(not row["up_to_date"] for row in other["rows"])
    rows = [
        [f"{len(codes)} single commands, one after another", f"{alone:.0f} s", f"{_codes(codes)}"],
        ["one batch", f"{first:.0f} s", ", ".join(f"{n} {status}" for status, n in statuses.most_common())],
        ["ratio", f"{first / alone:.2f}", f"{equal} of {count} files the same, byte for byte"],
        ["the batch again", f"{again:.1f} s", f"{sum(not row['up_to_date'] for row in repeated['rows'])} jobs run"],
        [
            f"again, with another observer for {Path(jobs[0]['model']).stem}",
            f"{third:.1f} s",
            f"{done_now} jobs run, {sum(one['counters'].get('runs', 0) for one in new)} samples through float models",
        ],
    ]
    calibrated = "; ".join(f"{title}: {samples} samples" for title, samples in sorted(measured.items()))
    refused = [
        f"- {row['job']['name']}: {row['outcome']['status']}: {row['outcome']['reason']}"
        for row in report["rows"]
        if row["outcome"]["status"] != "done"
    ]
    text = table(["what", "wall", "result"], rows)
    return f"{text}\n\nSteps that ran a float model for statistics: {calibrated}.\n\n" + "\n".join(refused)


def _codes(codes: dict[str, int]) -> str:
    return ", ".join(f"{n} with exit code {code}" for code, n in sorted(Counter(codes.values()).items()))


def kills(folder: Path, workers: int, seed: int = 0) -> str:
    """Run the batch in another folder while its workers and itself are killed at random; then complete it."""
    jobs = json.loads((folder / "jobs.json").read_text())
    calm = folder / "out"
    if not (calm / "report.json").is_file():
        timed(command(folder / "out.yaml", workers))
    usual = sum(one["seconds"] for one in read(calm)["steps"].values()) / workers / KILLS
    line = command(write_jobs(folder, jobs, "wild"), workers)
    chance, who = random.Random(seed), Counter[str]()
    batch = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while who.total() < KILLS:
        time.sleep(chance.uniform(0.2, 2 * usual))
        if batch.poll() is not None:  # the batch ended before all kills
            break
        victims = _workers(batch.pid)
        if chance.random() < 0.3 or not victims:
            batch.kill()
            batch.wait()
            who["the batch"] += 1
            batch = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(victims).kill()
                who["workers"] += 1
    batch.wait()
    timed(line)
    wild = folder / "wild"
    count, equal = same_files(calm, wild)
    db = sqlite3.connect(wild / ".sbonnx" / "state.sqlite")
    done = Counter(key for (key,) in db.execute("SELECT key FROM attempts WHERE status = 'done'"))
    attempts = db.execute("SELECT count(*) FROM attempts").fetchone()[0]
    db.close()
    left = [path for path in wild.rglob("*") if path.name != ".sbonnx" and path.name.startswith(".")]
    rows = [
        ["kill -9", ", ".join(f"{n} of {whom}" for whom, n in who.items())],
        ["attempts at steps", f"{attempts}, of which {done.total()} came to their end"],
        ["steps run twice to the end", str(sum(n > 1 for n in done.values()))],
        ["files the same as without kills, byte for byte", f"{equal} of {count}"],
        ["hidden or temporary files left", str(len(left))],
    ]
    return table(["what", "found"], rows)


def _workers(parent: int) -> list[psutil.Process]:
    """Return the worker processes of steps, which are leaders of their own process groups."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(one.pid) == one.pid:
                    found.append(one)
    return found


def overhead(folder: Path, workers: int) -> str:
    """Measure the overhead of the engine per no-op step."""
    from sbonnx.batch.api import fulfil
    from sbonnx.batch.engine import LocalEngine

    rows = []
    for count in dict.fromkeys((1, workers)):
        wished = wish_of(NOOPS, folder / f"noop-{count}")
        began = time.perf_counter()
        report = fulfil(wished, engine=LocalEngine(count, work=noop, publish=nowhere), publish=nowhere)
        took = time.perf_counter() - began
        began = time.perf_counter()
        fulfil(wished, engine=LocalEngine(count, work=noop, publish=nowhere), publish=nowhere)
        again = time.perf_counter() - began
        done = sum(row.outcome.status == "done" for row in report.rows)
        rows.append([str(count), str(done), f"{took:.1f} s", f"{1000 * took / NOOPS:.0f} ms", f"{again:.2f} s"])
    return table(["workers", "steps", "wall, with starting and reports", "a step", "again: all up to date"], rows)


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--models", nargs="*", default=list(HEADLINE), choices=list(HEADLINE))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to work, kept and gone on with; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        folder = (options.folder or Path(spare)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if {"wall", "kills"} & set(options.tables) and not (folder / "jobs.json").is_file():
            prepare(load_pack(options.pack), options.models, folder)
        for which in options.tables:
            made = {"wall": wall, "kills": kills, "overhead": overhead}[which](folder, options.workers)
            text = TITLE.format(which, which, options.workers, os.cpu_count()) + made
            print(text)
            if options.write:
                write_section(f"batch {which}", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
