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
"""Images at a time."""

REWRITES: Final = ("WeightBiasQuantization",)
"""Of onnxruntime, left out: it rounds float biases to int32 codes of the step of activation times that of the weight,
which is far too coarse at 4 bits and below. What is left of its optimisation is as it is by default."""


@dataclass(frozen=True)
class Subject:
    """A classifier, what it is trained on, and what it is evaluated on.

    Attributes:
        model: float ONNX file of one input and one output.
        feeds: to calibrate and train on, no labels.
        held_out: images and labels by the name of the set.
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
    """Of one network on one set.

    Attributes:
        top1: share of images.
        sqnr: of class scores against the float network's, dB.
    """

    top1: float
    sqnr: float


Scores = Mapping[str, Score]


@dataclass(frozen=True)
class Outcome:
    """One row.

    Attributes:
        file: scores of the file in onnxruntime, by set.
        default: likewise, with `REWRITES`, which onnxruntime does unless it is told not to.
        module: scores of the module in torch, where there is one.
        seconds: of training, wall; 0 where there was none.
        losses: mean loss of each epoch.
        problems: that `sbonnx.qat.export` found.
    """

    file: Scores
    default: Scores
    module: Scores = field(default_factory=dict)
    seconds: float = 0.0
    losses: Sequence[float] = ()
    problems: Sequence[str] = ()


class Reference:
    """What the float network gives, computed once.

    Args:
        subject: whose.
    """

    def __init__(self, subject: Subject) -> None:
        run = in_onnxruntime(subject.model)
        self.subject = subject
        self._scores = {name: run(images) for name, (images, _) in subject.held_out.items()}

    def scores(self, run: Run) -> dict[str, Score]:
        """Of a network."""
        found = {}
        for name, (images, labels) in self.subject.held_out.items():
            made, wanted = run(images).astype(np.float64), self._scores[name].astype(np.float64)
            error = float(((made - wanted) ** 2).sum())
            sqnr = 10.0 * np.log10(float((wanted**2).sum()) / error) if error else float("inf")
            found[name] = Score(float((made.argmax(1) == labels).mean()), float(sqnr))
        return found

    def of_file(self, path: Path, **about: Any) -> Outcome:
        """Of a file; `about`: what else the row says."""
        return Outcome(self.scores(in_onnxruntime(path)), self.scores(in_onnxruntime(path, without=())), **about)


def in_onnxruntime(path: Path, without: Sequence[str] = REWRITES) -> Run:
    """A file of one input and one output, run on the CPU at onnxruntime's own level of optimisation.

    Args:
        without: its rewrites that are left out.
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
    """A module of `sbonnx.qat`, in eval mode."""
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
    """The row of the float file."""
    return reference.of_file(reference.subject.model)


def calibrated(reference: Reference, folder: Path, recipe: Mapping[str, Any]) -> Outcome:
    """A row of calibration alone."""
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
    """Where a run of training starts, and where it ends.

    Args:
        recipe: for `sbonnx.qat.prepare`.
        method: of activations and weights; pact has lsq for weights.
        settings, augment: for `sbonnx.qat.train`.
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
