"""Runs one quantizer after another on the models of the pack, each in a process of its own, and evaluates the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.accuracy import HEADLINE
from benchmarks.calibration_subjects import save_feeds
from benchmarks.lowbit_kept import Kept
from benchmarks.lowbit_peers import environments
from benchmarks.lowbit_peers.measured import NUMBER
from benchmarks.lowbit_table import Cost, Line, mean_of
from benchmarks.lowbit_ways import PeerWay, Table, Way
from sbonnx.spec import Array

ROOT: Final = Path(__file__).resolve().parents[1]
ITERATIONS: Final = 1000

FEWER: Final = {"squeezenet11": (48, 8), "mobilenetv2_tin200": (64, 8)}
"""Samples, and samples a step, of peers that learn layer by layer, on nets that take them far longer than ten minutes
otherwise: they run the whole net over all samples for each layer."""

STEPPED: Final = ("cifar_resnet20", *FEWER)
"""Models on which peers learn."""

STEP: Final = {"aimet": 32, "quark": 8, "nncf": 1, "ppq": 32, "onnxsim": 32}
"""Samples a step elsewhere."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        count: samples to calibrate on at most; None: all there are.
        limit: samples to evaluate on; None: all there are.
        repeats: of what is timed.
        iterations: of AdaRound and its kin in peers, and where it is timed.
        minutes: the longest that one run of a peer may take.
        peers: the folder of their environments; None: they are left out.
        learn_on: models on which peers run that learn layer by layer.
        only: names of the rows that are run; none: all.
    """

    count: int | None = None
    limit: int | None = None
    repeats: int = 3
    iterations: int = ITERATIONS
    minutes: float = 20.0
    peers: Path | None = environments.FOLDER
    learn_on: tuple[str, ...] = STEPPED
    only: tuple[str, ...] = ()


@dataclass
class Bench:
    """The pack, a folder for files, and what is kept between runs.

    Attributes:
        pack: the pack's own module.
        folder: where samples and quantized files lie.
        effort: how much is done.
        kept: rows that were measured before.
    """

    pack: Any
    folder: Path
    effort: Effort
    kept: Kept = field(default_factory=Kept)
    _counts: dict[str, int] = field(default_factory=dict)

    def data(self, name: str) -> tuple[Path, int]:
        """The calibration samples of a model as a file, one sample a row, and how many there are."""
        path = self.folder / f"{name}.npz"
        if name not in self._counts:
            feeds = self.pack.load_calib(name, limit=self.effort.count)
            save_feeds(path, feeds)
            self._counts[name] = len(feeds)
        return path, self._counts[name]

    def job(self, name: str, way: Way, output: Path) -> dict[str, Any]:
        """What the child is told."""
        data, count = self.data(name)
        if way.rival and name in FEWER:
            count = min(count, FEWER[name][0])
        overrides = dict(way.overrides)
        backend = overrides.pop("backend", "onnxruntime")
        wishes = {"overrides": overrides, "backend": backend, "output": str(output)}
        return {"model": str(self.pack.model_path(name)), "data": str(data), "count": count, **wishes}

    # --- rows ------------------------------------------------------------------------------------

    def lines(self, table: Table, names: Sequence[str]) -> Iterator[Line]:
        """All rows of a table, model by model."""
        for name in (name for name in table.models if name in names):
            yield self.kept.line(table.title, name, "float", partial(self.float_line, name))
            for who, way in table.ways.items():
                if self._wanted(table, name, who, way):
                    yield self.kept.line(table.title, name, who, partial(self.ours, name, who, way))
            for who, peer in table.peers.items() if self.effort.peers is not None else ():
                if self._wanted(table, name, who, peer) and (name in self.effort.learn_on or not peer.learns):
                    yield self.kept.line(table.title, name, who, partial(self.peer, name, who, peer))

    def _wanted(self, table: Table, name: str, who: str, way: Way | PeerWay) -> bool:
        """Whether a row belongs to a model, and is to be run or was."""
        if way.only and name not in way.only:
            return False
        return not self.effort.only or who in self.effort.only or self.kept.has(table.title, name, who)

    def left_out(self, table: Table, names: Sequence[str]) -> list[str]:
        """Rows of peers that belong to a model and are not in the table, by model."""
        if self.effort.peers is None:
            return []
        found = []
        for name in (name for name in table.models if name in names):
            rows = [
                who
                for who, way in table.peers.items()
                if (not way.only or name in way.only) and not self.kept.has(table.title, name, who)
            ]
            if rows:
                found.append(f"{', '.join(rows)} on {name}")
        return found

    def float_line(self, name: str) -> Line:
        """The model itself."""
        size = Path(self.pack.model_path(name)).stat().st_size / 1e6
        return Line(name, "float", self.scores(name, None), size_mb=size, by="float")

    def ours(self, name: str, who: str, way: Way) -> Line:
        """One of our settings; by its mean where chance has a part that is to be seen."""
        lines = [self._ours(name, who, way, seed) for seed in range(way.seeds)]
        return next((line for line in lines if line.note), None) or mean_of(lines)

    def _ours(self, name: str, who: str, way: Way, seed: int) -> Line:
        """Once."""
        output = self.folder / f"{name}.ours.onnx"
        output.unlink(missing_ok=True)
        if seed:
            way = replace(way, overrides={**way.overrides, "seed": seed})
        try:
            told = run([sys.executable, "-m", "benchmarks.lowbit_child", json.dumps(self.job(name, way, output))], None)
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
        """One of a peer's settings, or why there is none."""
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
        """What a peer's script is told; its samples in a file of their own."""
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
        except Exception as error:  # whatever a file that a runtime does not take makes it raise
            note = f"onnxruntime does not run the file: {' '.join(str(error).split())[:100]}"
            return Line(name, who, (), cost, size, note, by)
        return Line(name, who, scores, cost, size, "", by)

    def scores(self, name: str, path: Path | None) -> tuple[float, ...]:
        """Metrics 1 and 2 of a file, None: of the float model. What compares with that is 1 of itself."""
        found = self.pack.evaluate(name, None if path is None else str(path), limit=self.effort.limit)
        return tuple(float(found.get(metric, 1.0)) for metric in HEADLINE[name])


def fewer_samples(name: str, way: PeerWay) -> tuple[int | None, int]:
    """How many samples a peer is given, None: all; and how many at a time."""
    fewer, batch = FEWER.get(name, (None, STEP[way.peer])) if way.learns else (None, STEP[way.peer])
    return fewer, batch


def run(command: Sequence[str], seconds: float | None) -> dict[str, Any]:
    """What the last line on stdout of a process says.

    Args:
        seconds: the longest that it may take, None: for ever.

    Raises:
        ChildProcessError: it failed, or took too long; with the last line that it said.
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
    """Samples (N, 1, ...) of an input without the axis between; of one that is a number, under a name that says so."""
    if samples.ndim == 1:
        return f"{name}{NUMBER}", samples
    return name, np.concatenate(list(samples))
