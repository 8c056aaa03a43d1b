"""Ways to prune channels, ours and those of peers: each writes a file with at most a share of the multiplications."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks.peers.environments import FOLDER, ROOT, absent, python_of
from benchmarks.pruning.files import Feed, correct_statistics, sizes
from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx.pipeline import prepare_pruning
from sbonnx.recipe.names import PruningStrategyName

ONNXSIM: Final = "onnxsim"
TORCH_PRUNING: Final = "torch-pruning"
SCRIPTS: Final = {
    ONNXSIM: "benchmarks.peers.onnxsim_pruning",
    TORCH_PRUNING: "benchmarks.peers.torch_pruning_onnx",
}
"""Script of each peer."""

STEPS: Final = 7
"""Bisections of the ratio of uniform ways."""

LONGEST: Final = 900
"""Seconds after which a run of a peer is stopped."""


class NotRun(Exception):
    """A way that cannot be had, with the reason."""


@dataclass(frozen=True)
class Subject:
    """A float model, its calibration samples, and a folder for files.

    Attributes:
        multiple: of the remaining channels, where a way knows multiples.
        share: of the multiplications that may remain.
        peers: folder of the peers' environments.
    """

    model: Path
    feeds: list[Feed]
    folder: Path
    multiple: int = 1
    share: float = 1.0
    peers: Path = FOLDER

    def path(self, name: str) -> Path:
        """Return a path in the folder that does not exist."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path

    def left(self, path: Path) -> float:
        """Return the share of the multiplications in a file."""
        return sizes(path, self.feeds[0])[0] / sizes(self.model, self.feeds[0])[0]

    @cached_property
    def data(self) -> Path:
        """File with all samples, for peers."""
        data = self.path("samples.npz")
        arrays: dict[str, Any] = {key: np.concatenate([feed[key] for feed in self.feeds]) for key in self.feeds[0]}
        np.savez(data, **arrays)
        return data

    def run_peer(self, name: str, output: Path, **job: Any) -> float:
        """Run a peer's script and return the CPU seconds of pruning.

        Raises:
            NotRun: it is not available, or fails.
        """
        reason = absent(self.peers, name)
        if reason is not None:
            raise NotRun(reason)
        job = {"model": str(self.model), "data": str(self.data), "output": str(output), "batch": 1, **job}
        command = [str(python_of(self.peers, name)), "-m", SCRIPTS[name], json.dumps(job)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LONGEST)
        except subprocess.TimeoutExpired as error:
            raise NotRun(f"takes more than {LONGEST} s") from error
        if done.returncode:
            raise NotRun((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
        return float(json.loads(done.stdout.strip().splitlines()[-1])["cpu"])


Way = Callable[[Subject], tuple[Path, float]]
"""Returns the pruned file and the CPU seconds that it took."""


def by_budget(strategy: PruningStrategyName) -> Way:
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


def uniform(strategy: PruningStrategyName, *, refit: bool) -> Way:
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
    graphs.save(prepare_pruning(subject.model, recipes.load()).prepared.graph, plain)
    ratio, begin = _ratio(subject), time.process_time()
    sbonnx.prune(subject.model, ratio=ratio, strategy="l1norm", masked=True, output=masked, threads=1)
    correct_statistics(plain, masked, output, subject.feeds)
    return output, time.process_time() - begin


TRIED: Final = "tried.onnx"
"""Name of the file without channels that `_ratio` leaves, with its ratio."""


def _ratio(subject: Subject) -> float:
    """Return the least ratio that leaves at most the share of the multiplications."""

    def left(ratio: float) -> float:
        output = subject.path(TRIED)
        sbonnx.prune(subject.model, ratio=ratio, strategy="l1norm", output=output, threads=1)
        return subject.left(output)

    ratio = bisected(left, subject.share)
    left(ratio)
    return ratio


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
        output, costs = subject.path("pruned.onnx"), []

        def left(sparsity: float) -> float:
            costs.append(subject.run_peer(ONNXSIM, output, method=method, sparsity=sparsity))
            return subject.left(output)

        remains = left(bisected(left, subject.share))
        if remains > subject.share:
            raise NotRun(f"its highest sparsity leaves {remains:.2f} of the multiplications")
        return output, costs[-1]

    return run


def torch_pruning(method: str, scope: str) -> Way:
    """Prune with torch-pruning; the search of its ratio and the export count as its time."""

    def run(subject: Subject) -> tuple[Path, float]:
        output = subject.path("pruned.onnx")
        cost = subject.run_peer(TORCH_PRUNING, output, method=method, scope=scope, share=subject.share)
        return output, cost

    return run


WAYS: Final[dict[str, Way]] = {
    "onnxsim, l2 norm": onnxsim("l2"),
    "onnxsim, l1 norm": onnxsim("l1"),
    "onnxsim, Wanda": onnxsim("wanda"),
    **{
        f"torch-pruning, {method}, {scope}": torch_pruning(method, scope)
        for method in ("magnitude", "taylor", "hessian")
        for scope in ("local", "global")
    },
    "l1norm, uniform, no refit": uniform("l1norm", refit=False),
    "l1norm, uniform, mean and variance": tuned,
    "l1norm, uniform": uniform("l1norm", refit=True),
    "obs, uniform": uniform("obs", refit=True),
    "l1norm": by_budget("l1norm"),
    "obs": by_budget("obs"),
    "latency": by_time,
}
"""Ways to prune, peers first, then the plainest."""

STANDARD: Final = (
    "onnxsim, Wanda",
    *(way for way in WAYS if way.startswith(TORCH_PRUNING)),
    *("l1norm, uniform, mean and variance", "l1norm, uniform", "obs, uniform", "obs"),
)
"""Ways of the table: the best of onnxsim, and what each part of ours adds."""
