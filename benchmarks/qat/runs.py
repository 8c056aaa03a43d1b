"""The runs that `benchmarks.qat` makes a table of: calibrate, train, write, and evaluate what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import torch

import sbonnx
from sbonnx import qat
from sbonnx.spec import Array

Run = Callable[[Array], Array]
"""Images → class scores."""

PIECE: Final = 100
"""Images per batch."""

REWRITES: Final = ("WeightBiasQuantization",)
"""onnxruntime optimizers that are disabled. This one quantizes float biases to int32 with the activation scale times
the weight scale, which is far too coarse at 4 bits and below. All others stay at their default."""


@dataclass(frozen=True)
class Subject:
    """A classifier with its training and evaluation data.

    Attributes:
        model: float ONNX file with one input and one output.
        feeds: unlabeled data for calibration and training.
        held_out: images and labels by the name of the evaluation set.
    """

    model: Path
    feeds: Sequence[Mapping[str, Array]]
    held_out: Mapping[str, tuple[Array, Array]]

    @property
    def input(self) -> str:
        """Name of the input."""
        return next(iter(self.feeds[0]))


@dataclass(frozen=True)
class Score:
    """Metrics of one network on one set.

    Attributes:
        top1: top-1 accuracy, a fraction.
        sqnr: SQNR of the class scores against the float network, in dB.
    """

    top1: float
    sqnr: float


Scores = Mapping[str, Score]


@dataclass(frozen=True)
class Outcome:
    """One row of the table.

    Attributes:
        file: scores of the file in onnxruntime without `REWRITES`, by set.
        default: scores of the file with onnxruntime's default optimizers, including `REWRITES`.
        module: scores of the module in torch, if there is one.
        seconds: wall time of training; 0 without training.
        losses: mean loss of each epoch.
        problems: problems reported by `sbonnx.qat.export`.
    """

    file: Scores
    default: Scores
    module: Scores = field(default_factory=dict)
    seconds: float = 0.0
    losses: Sequence[float] = ()
    problems: Sequence[str] = ()


class Reference:
    """Outputs of the float network, computed once.

    Args:
        subject: classifier and data.
    """

    def __init__(self, subject: Subject) -> None:
        run = in_onnxruntime(subject.model)
        self.subject = subject
        self._scores = {name: run(images) for name, (images, _) in subject.held_out.items()}

    def scores(self, run: Run) -> dict[str, Score]:
        """Compute the scores of a network on all sets."""
        found = {}
        for name, (images, labels) in self.subject.held_out.items():
            made, wanted = run(images).astype(np.float64), self._scores[name].astype(np.float64)
            error = float(((made - wanted) ** 2).sum())
            sqnr = 10.0 * np.log10(float((wanted**2).sum()) / error) if error else float("inf")
            found[name] = Score(float((made.argmax(1) == labels).mean()), float(sqnr))
        return found

    def of_file(self, path: Path, **about: Any) -> Outcome:
        """Compute the outcome of a file; `about`: further fields of the outcome."""
        return Outcome(self.scores(in_onnxruntime(path)), self.scores(in_onnxruntime(path, without=())), **about)


def in_onnxruntime(path: Path, without: Sequence[str] = REWRITES) -> Run:
    """Return a run of a file with one input and one output, on the CPU at onnxruntime's default optimization level.

    Args:
        path: ONNX file.
        without: optimizers to disable.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = ort.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
    )
    name = session.get_inputs()[0].name
    return lambda images: np.concatenate(
        [session.run(None, {name: images[at : at + PIECE]})[0] for at in range(0, len(images), PIECE)]
    )


def in_torch(module: torch.nn.Module) -> Run:
    """Return a run of a module of `sbonnx.qat` in eval mode."""
    module.eval()

    def run(images: Array) -> Array:
        with torch.no_grad():
            parts = [
                next(iter(module(torch.from_numpy(images[at : at + PIECE])).values()))
                for at in range(0, len(images), PIECE)
            ]
        return np.asarray(torch.cat(parts))

    return run


def float_outcome(reference: Reference) -> Outcome:
    """Compute the row of the float file."""
    return reference.of_file(reference.subject.model)


def calibrated(reference: Reference, folder: Path, recipe: Mapping[str, Any]) -> Outcome:
    """Compute a row of calibration without training."""
    path = folder / "calibrated.onnx"
    sbonnx.quantize(
        str(reference.subject.model), reference.subject.feeds, output=str(path), force=True, verify=False, **recipe
    )
    return reference.of_file(path)


def trained(
    reference: Reference,
    folder: Path,
    recipe: Mapping[str, Any],
    method: str,
    settings: qat.Settings,
    augment: str | None,
) -> tuple[Outcome, Outcome]:
    """Compute the outcomes before and after training.

    Args:
        reference: outputs of the float network.
        recipe: arguments for `sbonnx.qat.prepare`.
        method: method of activations and weights; with pact, weights use lsq.
        settings, augment: arguments for `sbonnx.qat.train`.
    """
    subject, path = reference.subject, folder / "trained.onnx"
    weights = "lsq" if method == "pact" else method
    module = qat.prepare(str(subject.model), subject.feeds, weights=weights, activations=method, **recipe)
    outcomes, seconds, losses = [], 0.0, []
    for step in ("start", "end"):
        if step == "end":
            begin = time.perf_counter()
            losses = qat.train(module, subject.feeds, settings, augment=augment).losses
            seconds = time.perf_counter() - begin
        report = qat.export(module, path, subject.feeds[:PIECE], force=True)
        found = reference.scores(in_torch(module))
        outcomes.append(reference.of_file(path, module=found, seconds=seconds, losses=losses, problems=report.problems))
    return outcomes[0], outcomes[1]


__all__ = ["Outcome", "Reference", "Score", "Scores", "Subject", "calibrated", "float_outcome", "trained"]
