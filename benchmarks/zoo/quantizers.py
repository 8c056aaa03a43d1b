"""Agreement of a file with float, and files of other quantizers, made and run in a process of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks import accuracy
from benchmarks.zoo.corpus import Feed
from benchmarks.zoo.metrics import METRICS
from benchmarks.zoo.sources import Source
from sbonnx.verify.sessions import file_bytes, run, session

LIMIT_S: Final = 1800.0
"""Maximum duration of one model."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean with the bounds of its 95 % interval, by 2,000 resamples of the samples that are no NaN."""
    array = np.asarray(values, np.float64)
    array = array[~np.isnan(array)]
    picks = np.random.default_rng(0).integers(0, len(array), (2000, len(array)))
    low, high = np.percentile(array[picks].mean(1), (2.5, 97.5))
    return float(array.mean()), float(low), float(high)


def outputs_of(opened: Any, samples: Sequence[Feed]) -> list[list[Any]]:
    """Return the outputs of a session for each sample."""
    return [run(opened, feed, number) for number, feed in enumerate(samples)]


def agreement(source: Source, floats: list[list[Any]], opened: Any, samples: list[Feed]) -> list[float]:
    """Return the figure of each sample."""
    figure: Callable[..., float] = METRICS[source.metric][1]
    return [figure(one, two) for one, two in zip(floats, outputs_of(opened, samples), strict=True)]


@dataclass(frozen=True)
class Subject:
    """A model with its samples, and the outputs of float on those to evaluate."""

    source: Source
    model: Path
    calibration: list[Feed]
    floats: list[list[Any]]
    samples: list[Feed]

    def of_peer(self, quantize: Callable[[Path, list[Feed], Path], None], output: Path) -> str:
        """Return agreement and size of the file that a peer writes, or the error that it ends with.

        It runs in its own process: onnxruntime ends with a segmentation fault on its quantizer's file for spindles.
        """
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                return pool.submit(self._figures, quantize, output).result()
        except BrokenProcessPool:
            return "crashes"
        except Exception as error:  # of a peer, of any kind; its message is the result
            return f"fails: {type(error).__name__}"

    def _figures(self, quantize: Callable[[Path, list[Feed], Path], None], output: Path) -> str:
        quantize(self.model, self.calibration, output)
        values = agreement(self.source, self.floats, session(output), self.samples)
        return f"{interval(values)[0]:.3f}, size {file_bytes(output) / file_bytes(self.model):.2f}"


def onnxruntime_static(model: Path, calibration: list[Feed], output: Path) -> None:
    """Write the file of `quantize_static`."""
    accuracy.peer(accuracy.peer_input(model, output.parent), calibration, output, per_channel=True)


def nncf_static(python: str, model: Path, calibration: list[Feed], output: Path) -> None:
    """Write the file of NNCF, which another interpreter has."""
    with TemporaryDirectory() as folder:
        for number, feed in enumerate(calibration):
            np.savez(Path(folder) / f"{number:03}.npz", **feed)
        script = Path(__file__).with_name("nncf_peer.py")
        subprocess.run([python, script, model, folder, output], capture_output=True, timeout=LIMIT_S / 3, check=True)
