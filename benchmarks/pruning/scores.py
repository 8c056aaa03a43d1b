"""Scores of a pruned classifier on each evaluation set: accuracy, agreement with float, divergence, error of logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.kept import Record
from benchmarks.scores import divergences, estimate
from sbonnx.metrics import ratio_db
from sbonnx.spec import Array

SCORES: Final = ("top1", "agreement", "kl", "sqnr")
"""Scores by name: top-1; share of the samples with the class of float; mean divergence, nats; SQNR of logits, dB."""

Logits = Mapping[str, Array]
"""Logits (N, classes) by evaluation set."""


def logits(pack: Any, name: str, path: Path) -> Logits:
    """Run a file on all evaluation sets of a classifier."""
    found: Logits = pack._outputs(pack.entry(name), pack._session(str(path), threads=1))
    return found


def judge(pack: Any, name: str, reference: Logits, found: Logits) -> Record:
    """Return value and 95 % interval of each score, by set: ``{score: {set: (value, low, high)}}``."""
    record: Record = {score: {} for score in SCORES}
    for key, file in pack.entry(name)["eval_files"].items():
        labels = np.load(pack._path(file))["Y"].astype(int)
        for score, (value, low, high) in _scores(labels, reference[key], found[key]).items():
            record[score][key] = (value, low, high)
    return record


def _scores(labels: Array, reference: Array, found: Array) -> dict[str, tuple[float, float, float]]:
    chosen = found.argmax(1)
    right, same = chosen == labels, chosen == reference.argmax(1)
    divergence = divergences(reference, found)
    a, b = np.asarray(reference, np.float64), np.asarray(found, np.float64)
    signal, noise = (a**2).sum(1), ((a - b) ** 2).sum(1)
    measures = (
        lambda rows: float(right[rows].mean()),
        lambda rows: float(same[rows].mean()),
        lambda rows: float(divergence[rows].mean()),
        lambda rows: ratio_db(float(signal[rows].sum()), float(noise[rows].sum())),
    )
    estimates = {score: estimate(measure, len(labels)) for score, measure in zip(SCORES, measures, strict=True)}
    return {score: (each.value, each.low, each.high) for score, each in estimates.items()}


def cell(record: Record, score: str, digits: int = 3) -> str:
    """Return a score of all sets for a table, with intervals."""
    found = record[score].values()
    return " / ".join(f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})" for value, low, high in found)
