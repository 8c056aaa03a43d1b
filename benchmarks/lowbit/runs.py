"""Runs one quantizer after another on the models of the pack, each in a process of its own, and evaluates the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.accuracy import HEADLINE
from benchmarks.calibration.subjects import save_feeds
from benchmarks.kept import Kept, Record
from benchmarks.lowbit.table import Cost, Line, line_of, mean_of
from benchmarks.lowbit.ways import PeerWay, Table, Way
from benchmarks.peers import environments
from benchmarks.peers.measured import NUMBER
from benchmarks.results import ROOT
from sbonnx.spec import Array

ITERATIONS: Final = 1000

FEWER: Final = {"squeezenet11": (48, 8), "mobilenetv2_tin200": (64, 8)}
"""(samples, samples per step) of peers that train layer by layer, on networks for which they would otherwise take far
longer than ten minutes: they run the whole network over all samples for each layer."""

STEPPED: Final = ("cifar_resnet20", *FEWER)
"""Models on which training peers run."""

STEP: Final = {"aimet": 32, "quark": 8, "nncf": 1, "ppq": 32, "onnxsim": 32}
"""Samples per step on all other models."""


@dataclass(frozen=True)
class Effort:
    """Amount of measurement.

    Attributes:
        count: maximum number of calibration samples; None: all.
        limit: number of evaluation samples; None: all.
        repeats: repeats of timings.
        iterations: iterations of AdaRound and similar methods of peers, and of timed AdaRound runs.
        minutes: time limit of one run of a peer.
        peers: folder of the peers' environments; None: without peers.
        learn_on: models for peers that train layer by layer.
        only: names of the rows to run; empty: all.
        times: whether costs are stored; False on a busy machine.
    """

    count: int | None = None
    limit: int | None = None
    repeats: int = 3
    iterations: int = ITERATIONS
    minutes: float = 20.0
    peers: Path | None = environments.FOLDER
    learn_on: tuple[str, ...] = STEPPED
    only: tuple[str, ...] = ()
    times: bool = True


@dataclass
class Bench:
    """Model pack, working folder and cached rows of a benchmark run.

    Attributes:
        pack: evaluation module of the pack.
        folder: folder of samples and quantized files.
        effort: amount of measurement.
        kept: rows of earlier runs.
    """

    pack: Any
    folder: Path
    effort: Effort
    kept: Kept = field(default_factory=Kept)
    _counts: dict[str, int] = field(default_factory=dict)

    def data(self, name: str) -> tuple[Path, int]:
        """Write the calibration samples of a model to a file, one sample per row; returns its path and their number."""
        path = self.folder / f"{name}.npz"
        if name not in self._counts:
            feeds = self.pack.load_calib(name, limit=self.effort.count)
            save_feeds(path, feeds)
            self._counts[name] = len(feeds)
        return path, self._counts[name]

    def job(self, name: str, way: Way, output: Path) -> dict[str, Any]:
        """Return the job of the child process."""
        data, count = self.data(name)
        if way.rival and name in FEWER:
            count = min(count, FEWER[name][0])
        overrides = dict(way.overrides)
        backend = overrides.pop("backend", "onnxruntime")
        wishes = {"overrides": overrides, "backend": backend, "output": str(output)}
        return {"model": str(self.pack.model_path(name)), "data": str(data), "count": count, **wishes}

    # --- rows ------------------------------------------------------------------------------------

    def lines(self, table: Table, names: Sequence[str]) -> Iterator[Line]:
        """Yield all rows of a table, model by model."""
        for name in (name for name in table.models if name in names):
            yield self._line_of(table, name, "float", partial(self.float_line, name))
            for who, way in table.ways.items():
                if self._wanted(table, name, who, way):
                    yield self._line_of(table, name, who, partial(self.ours, name, who, way))
            for who, peer in table.peers.items() if self.effort.peers is not None else ():
                if self._wanted(table, name, who, peer) and (name in self.effort.learn_on or not peer.learns):
                    yield self._line_of(table, name, who, partial(self.peer, name, who, peer))

    def _line_of(self, table: Table, name: str, who: str, measure: Callable[[], Line]) -> Line:
        """Return the cached line of a row, or measure and store it."""

        def record() -> Record:
            line = measure()
            return asdict(line if self.effort.times else replace(line, cost=None))

        return line_of(self.kept.record((table.title, name, who), record))

    def _has(self, table: Table, name: str, who: str) -> bool:
        """Return whether a row is in the cache."""
        return self.kept.get(table.title, name, who) is not None

    def _wanted(self, table: Table, name: str, who: str, way: Way | PeerWay) -> bool:
        """Return whether a row applies to a model, and is to be run or cached."""
        if way.only and name not in way.only:
            return False
        return not self.effort.only or who in self.effort.only or self._has(table, name, who)

    def left_out(self, table: Table, names: Sequence[str]) -> list[str]:
        """Return the rows of peers that apply to a model and are missing in the table, by model."""
        if self.effort.peers is None:
            return []
        found = []
        for name in (name for name in table.models if name in names):
            rows = [
                who
                for who, way in table.peers.items()
                if (not way.only or name in way.only) and not self._has(table, name, who)
            ]
            if rows:
                found.append(f"{', '.join(rows)} on {name}")
        return found

    def float_line(self, name: str) -> Line:
        """Return the line of the float model."""
        size = Path(self.pack.model_path(name)).stat().st_size / 1e6
        return Line(name, "float", self.scores(name, None), size_mb=size, by="float")

    def ours(self, name: str, who: str, way: Way) -> Line:
        """Measure one of our settings; the mean over several seeds if the setting has them."""
        lines = [self._ours(name, who, way, seed) for seed in range(way.seeds)]
        return next((line for line in lines if line.note), None) or mean_of(lines)

    def _ours(self, name: str, who: str, way: Way, seed: int) -> Line:
        """Measure one of our settings with one seed."""
        output = self.folder / f"{name}.ours.onnx"
        output.unlink(missing_ok=True)
        if seed:
            way = replace(way, overrides={**way.overrides, "seed": seed})
        try:
            told = run([sys.executable, "-m", "benchmarks.lowbit.child", json.dumps(self.job(name, way, output))], None)
        except ChildProcessError as error:
            return Line(name, who, note=f"fails: {error}", main=way.main, rival=way.rival)
        refusals = told.get("refusals", [])
        if refusals:
            print(f"    {name}, {who}: {len(refusals)} layers not reconstructed, {refusals[0]}", file=sys.stderr)
        if way.rival and name in FEWER:
            who += f", {FEWER[name][0]} samples"
        found = self._line(name, who, told, output, by="ours")
        return replace(found, main=way.main, rival=way.rival)

    def peer(self, name: str, who: str, way: PeerWay) -> Line:
        """Measure one of a peer's settings; the line has the reason if there is none."""
        folder = self.effort.peers
        if way.lacks:
            return Line(name, who, note=f"cannot be had: {way.lacks}", by="peer")
        why = "left out" if folder is None else environments.absent(folder, way.peer)
        if folder is None or why is not None:
            return Line(name, who, note=f"cannot be had: {why}", by="peer")
        output = self.folder / f"{name}.peer.onnx"
        output.unlink(missing_ok=True)
        fewer, batch = fewer_samples(name, way)
        job = self._peer_job(name, way, batch, fewer) | {"output": str(output)}
        text = who if fewer is None else f"{who}, {fewer} samples"
        python, script = environments.python_of(folder, way.peer), environments.PEERS[way.peer].script
        try:
            told = run([str(python), "-m", script, json.dumps(job)], 60 * self.effort.minutes)
        except ChildProcessError as error:
            return Line(name, text, note=f"fails: {error}", by="peer")
        return replace(self._line(name, text, told, output, by="peer"), learns=way.learns)

    def _peer_job(self, name: str, way: PeerWay, batch: int, fewer: int | None) -> dict[str, Any]:
        """Return the job of a peer's script, and write its samples to a separate file."""
        data, count = self.data(name)
        with np.load(data) as held:
            arrays: dict[str, Any] = dict(_flat(key, held[key][:fewer]) for key in held.files)
        flat = self.folder / f"{name}.flat.npz"
        np.savez(flat, **arrays)
        return {
            "model": str(self.pack.model_path(name)),
            "data": str(flat),
            "method": way.method,
            "scheme": way.scheme,
            "w_bit": way.w_bit,
            "a_bit": way.a_bit,
            "batch": min(batch, count),
            "iterations": self.effort.iterations,
        }

    def _line(self, name: str, who: str, told: dict[str, Any], output: Path, *, by: str) -> Line:
        cost = Cost(told["cpu"], told["wall"], told["peak_mb"])
        size = output.stat().st_size / 1e6
        try:
            scores = self.scores(name, output)
        except Exception as error:  # a runtime may raise any exception for an unsupported file
            note = f"onnxruntime does not run the file: {' '.join(str(error).split())[:100]}"
            return Line(name, who, (), cost, size, note, by)
        return Line(name, who, scores, cost, size, "", by)

    def scores(self, name: str, path: Path | None) -> tuple[float, ...]:
        """Compute metrics 1 and 2 of a file; None: of the float model, for which relative metrics are 1."""
        found = self.pack.evaluate(name, None if path is None else str(path), limit=self.effort.limit)
        return tuple(float(found.get(metric, 1.0)) for metric in HEADLINE[name])


def fewer_samples(name: str, way: PeerWay) -> tuple[int | None, int]:
    """Return the number of samples for a peer (None: all), and the samples per step."""
    fewer, batch = FEWER.get(name, (None, STEP[way.peer])) if way.learns else (None, STEP[way.peer])
    return fewer, batch


def run(command: Sequence[str], seconds: float | None) -> dict[str, Any]:
    """Run a process and parse the last line of its stdout as JSON.

    Args:
        command: command line.
        seconds: time limit; None: no limit.

    Raises:
        ChildProcessError: the process failed or exceeded the limit; with its last line of output.
    """
    try:
        done = subprocess.run(list(command), check=False, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise ChildProcessError(f"more than {error.timeout / 60:.0f} minutes") from error
    said = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not said:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ChildProcessError(lines[-1][:160])
    found = json.loads(said[-1])
    assert isinstance(found, dict)
    return found


def _flat(name: str, samples: Array) -> tuple[str, Array]:
    """Remove the batch axis of samples (N, 1, ...); a scalar input gets the name suffix for scalars."""
    if samples.ndim == 1:
        return f"{name}{NUMBER}", samples
    return name, np.concatenate(list(samples))
