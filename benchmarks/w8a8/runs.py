"""Runs quantizers at 8 bits, each as a whole process from its start to the file, and evaluates the files."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import scores
from benchmarks.accuracy import lifted
from benchmarks.kept import Kept, Record
from benchmarks.peers import environments
from benchmarks.peers.measured import NUMBER
from benchmarks.results import ROOT
from benchmarks.w8a8.ways import OURS, Way

BATCH: Final = {"onnxruntime": 8, "modelopt": 1, "aimet": 32, "quark": 8, "nncf": 1}
"""Samples per batch of peers on models whose batch axis is free."""
ITERATIONS: Final = 1000
"""Iterations of peers that learn."""


@dataclass
class Bench:
    """Model pack, working folder and records of a run.

    Attributes:
        pack: evaluation module of the pack.
        folder: folder of samples and quantized files.
        peers: folder of the peers' environments.
        kept: records of earlier runs.
        minutes: time limit of one run.
        limit: number of evaluation samples; None: all.
        count: maximum number of calibration samples; None: all.
        threads: threads of onnxruntime in its own quantizer; None: its default.
    """

    pack: Any
    folder: Path
    peers: Path
    kept: Kept = field(default_factory=Kept)
    minutes: float = 20.0
    limit: int | None = None
    count: int | None = None
    threads: int | None = None
    _floats: dict[str, scores.Outputs] = field(default_factory=dict)

    def measure(self, name: str, row: str, way: Way) -> Record:
        """Return the record of a setting on a model: its cost and scores, or a note with the reason of a failure."""
        return self.kept.record((name, row), lambda: self._measure(name, row, way))

    def measure_float(self, name: str) -> Record:
        """Return the record of the float model."""

        def measure() -> Record:
            found = scores.evaluate(self.pack, name, self._float(name), self._float(name), self.limit)
            size = Path(self.pack.model_path(name)).stat().st_size / 1e6
            return {"note": "", "mb": size, **asdict(found)}

        return self.kept.record((name, "float"), measure)

    def _measure(self, name: str, row: str, way: Way) -> Record:
        output = self.folder / f"{name}.{row.replace(' ', '_')}.onnx"
        output.unlink(missing_ok=True)
        try:
            cpu = self.run(name, way, output)
            size = output.stat().st_size / 1e6
            return {"note": "", "cpu": cpu, "mb": size, **asdict(self.evaluate(name, output))}
        except ChildProcessError as error:
            return {"note": f"fails: {error}"}
        except Exception as error:  # a runtime may raise any exception for an unsupported file
            return {"note": f"onnxruntime does not run the file: {' '.join(str(error).split())[:120]}"}
        finally:
            output.unlink(missing_ok=True)

    def run(self, name: str, way: Way, output: Path) -> float:
        """Write the quantized file of a setting; returns the CPU seconds of the whole process.

        Raises:
            ChildProcessError: the quantizer failed; with its last line of output.
        """
        return process(self.command(name, way, output), output, 60 * self.minutes)

    def command(self, name: str, way: Way, output: Path) -> list[str]:
        """Return the command line of a setting on a model."""
        data, whole = self.data(name, way.samples)
        if way.quantizer == OURS:
            cut = [] if data.is_dir() else ["--split", "1"]
            files = [self.pack.model_path(name), "--data", str(data), "-o", str(output)]
            return [sys.executable, "-m", "sbonnx", "quantize", *files, *cut, *way.flags]
        why = environments.absent(self.peers, way.quantizer)
        if why is not None:
            raise ChildProcessError(f"cannot be had: {why}")
        job = {
            "model": str(lifted(Path(self.pack.model_path(name)), self.folder)),
            "data": str(feeds_of(data) if whole else data),
            "output": str(output),
            "method": way.method,
            "scheme": way.scheme,
            "w_bit": 8,
            "a_bit": 8,
            "batch": self.pack.entry(name).get("fixed_batch") or (1 if whole else BATCH[way.quantizer]),
            "iterations": ITERATIONS,
            "threads": self.threads,
        }
        python, script = environments.python_of(self.peers, way.quantizer), environments.PEERS[way.quantizer].script
        return [str(python), "-m", script, json.dumps(job)]

    def data(self, name: str, most: int | None = None) -> tuple[Path, bool]:
        """Write the calibration samples of a model, and return their path and whether they are whole feeds.

        Models with a free batch axis get one .npz, samples along the first axis of each array. Others get a folder with
        one .npz for each feed, and the peers one file with all of them (`feeds_of`).
        """
        feeds = self.pack.load_calib(name, limit=min(most or sys.maxsize, self.count or sys.maxsize))
        entry = self.pack.entry(name)
        whole = entry["kind"] == "vad"
        path = self.folder / f"{name}.{len(feeds)}"
        if not whole:
            path = path.with_name(f"{path.name}.npz")
            if not path.exists():
                _save(path, {key: np.concatenate([feed[key] for feed in feeds]) for key in feeds[0]})
            return path, False
        if not path.exists():
            path.mkdir()
            for number, feed in enumerate(feeds):
                np.savez(path / f"{number:04d}.npz", **feed)
            _save(feeds_of(path), {key + NUMBER: np.stack([feed[key] for feed in feeds]) for key in feeds[0]})
        return path, True

    def evaluate(self, name: str, path: Path, session: Any | None = None) -> scores.Scores:
        """Evaluate a file; `session`: the opened file, for other options than the pack's."""
        found = scores.outputs(self.pack, name, path, self.limit, session)
        return scores.evaluate(self.pack, name, self._float(name), found, self.limit)

    def _float(self, name: str) -> scores.Outputs:
        """Return the outputs of the float model, computed once."""
        if name not in self._floats:
            self._floats[name] = scores.outputs(self.pack, name, limit=self.limit)
        return self._floats[name]


def feeds_of(folder: Path) -> Path:
    """Return the file with all feeds of a folder."""
    return folder.with_name(f"{folder.name}.feeds.npz")


def process(
    command: Sequence[str],
    output: Path,
    seconds: float | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    core: int | None = None,
) -> float:
    """Run a quantizer and return its CPU seconds, user and system, of all its processes from start to end.

    Our command's exit code 1, for a written file with a problem, counts as success.

    Args:
        command: command line.
        output: file that it writes.
        seconds: time limit; None: none.
        environment: environment variables; None: those of this process.
        core: the only core that it may use (Linux); None: all of this process.

    Raises:
        ChildProcessError: there is no file, or it took too long; with the last line of output.
    """
    before = _children()
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    try:
        done = subprocess.run(
            [*pinned, *command],
            check=False,
            cwd=ROOT,
            env=None if environment is None else dict(environment),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildProcessError(f"more than {error.timeout / 60:.0f} minutes") from error
    if not output.is_file():
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ChildProcessError(lines[-1][:160] if lines else f"exit code {done.returncode}")
    return _children() - before


def _save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
