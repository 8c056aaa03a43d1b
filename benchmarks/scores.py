"""Accuracy of a quantized file on the evaluation data of a model of the pack, with intervals over the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.metrics import ratio_db
from sbonnx.spec import Array

RESAMPLES: Final = 1000
SLOW_RESAMPLES: Final = 100
"""Numbers of bootstrap samples; the smaller one for average precision, which takes a hundred times as long."""
LEVEL: Final = 0.95

METRICS: Final = {
    "cifar_resnet20": ("top-1, JPEG copies", "top-1 as float"),
    "mobilenetv2_tin200": ("top-1", "top-1 as float"),
    "mobilenetv1_tin200": ("top-1", "top-1 as float"),
    "squeezenet11": ("top-1", "top-1 as float"),
    "minilm_l6": ("Spearman", "cosine with float"),
    "fastestdet": ("mAP@0.5", "F1 against float"),
    "ultraface_rfb320": ("F1 against float", "F1 against float"),
    "silero_vad": ("decisions as float", "correlation with float"),
}
"""Metric and agreement by model."""
JUDGED_SET: Final = {"cifar_resnet20": "jpeg"}
"""Evaluation set of models that have several."""

Rows = Array
"""Indices of samples; a bootstrap sample has some of them several times."""
Measure = Callable[[Rows], float]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval over samples (percentile bootstrap)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Scores:
    """Accuracy of one file.

    Attributes:
        sqnr: SQNR of the outputs against the float model, dB.
        metric: metric of the model's task (`METRICS`).
        agreement: agreement with the float model (`METRICS`).
    """

    sqnr: Estimate
    metric: Estimate
    agreement: Estimate


@dataclass(frozen=True)
class Outputs:
    """Outputs of a model on its evaluation data.

    Attributes:
        raw: outputs of each run of the session; the first axis of each counts samples.
        decoded: what the pack's evaluation makes of them.
    """

    raw: list[list[Array]]
    decoded: dict[str, Array]


class _Recorder:
    """Session that keeps what its runs return."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.raw: list[list[Array]] = []

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def run(self, names: list[str] | None, feeds: dict[str, Any]) -> list[Array]:
        outputs: list[Array] = self._session.run(names, feeds)
        self.raw.append(outputs)
        return outputs


def subject(pack: Any, name: str) -> dict[str, Any]:
    """Return the manifest's entry of a model, with one evaluation set."""
    entry: dict[str, Any] = pack.entry(name)
    if entry["kind"] == "classify":
        key = JUDGED_SET.get(name, next(iter(entry["eval_files"])))
        entry = {**entry, "eval_files": {key: entry["eval_files"][key]}}
    return entry


def outputs(
    pack: Any, name: str, path: Path | None = None, limit: int | None = None, session: Any | None = None
) -> Outputs:
    """Run a file on the evaluation data of a model.

    Args:
        pack: evaluation module of the model pack.
        name: of the model.
        path: the file; None: the float file.
        limit: number of samples; None: all.
        session: opened file, for another runtime than onnxruntime.
    """
    recorder = _Recorder(session or pack._session(str(path or pack.model_path(name)), threads=1))
    entry = subject(pack, name)
    decoded = pack._outputs(entry, recorder, limit)
    if entry["kind"] == "vad":  # the other output is the state
        recorder.raw = [found[:1] for found in recorder.raw]
    return Outputs(recorder.raw, decoded)


def energies(reference: Outputs, found: Outputs, *, streams: bool = False) -> tuple[Array, Array]:
    """Return the energies of the float outputs and of the errors, by sample, summed over all outputs; float64.

    Args:
        reference, found: outputs of the float and of the quantized model.
        streams: the runs are steps of the same samples, and are summed.
    """
    parts = [_energies(a, b) for a, b in zip(reference.raw, found.raw, strict=True)]
    join = partial(np.sum, axis=0) if streams else np.concatenate
    return join([part[0] for part in parts]), join([part[1] for part in parts])


def _energies(reference: list[Array], found: list[Array]) -> tuple[Array, Array]:
    rows = len(reference[0])
    pairs = [
        (np.asarray(a, np.float64).reshape(rows, -1), np.asarray(b, np.float64).reshape(rows, -1))
        for a, b in zip(reference, found, strict=True)
    ]
    return sum((a**2).sum(1) for a, _ in pairs), sum(((a - b) ** 2).sum(1) for a, b in pairs)


def evaluate(pack: Any, name: str, reference: Outputs, found: Outputs, limit: int | None = None) -> Scores:
    """Compare the outputs of a quantized file with those of the float file, and with the labels."""
    entry = subject(pack, name)
    signal, noise = energies(reference, found, streams=entry["kind"] == "vad")
    measures = {"classify": _classes, "sts": _texts, "detect": _boxes, "faces": _boxes, "vad": _speech}[entry["kind"]]
    metric, agreement, count = measures(pack, entry, reference.decoded, found.decoded, limit)
    resamples = SLOW_RESAMPLES if entry["kind"] == "detect" else RESAMPLES
    return Scores(
        estimate(lambda rows: ratio_db(float(signal[rows].sum()), float(noise[rows].sum())), len(signal)),
        estimate(metric, count, resamples),
        estimate(agreement, count),
    )


def estimate(measure: Measure, count: int, resamples: int = RESAMPLES) -> Estimate:
    """Compute a figure and its interval by the percentile bootstrap (Efron 1979), with a fixed seed.

    Args:
        measure: the figure of selected samples.
        count: number of samples.
        resamples: number of bootstrap samples.
    """
    random = np.random.default_rng(0)
    drawn = [measure(random.integers(0, count, count)) for _ in range(resamples)]
    tail = (1 - LEVEL) / 2
    low, high = (float(np.quantile(drawn, at, method="nearest")) for at in (tail, 1 - tail))
    return Estimate(float(measure(np.arange(count))), low, high)


def divergences(reference: Array, found: Array) -> Array:
    """Return the Kullback-Leibler divergence of softmax(found) from softmax(reference) of each row, in nats."""
    p, q = (_log_softmax(np.asarray(each, np.float64)) for each in (reference, found))
    per_row: Array = (np.exp(p) * (p - q)).sum(axis=1)
    return per_row


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


Decoded = dict[str, Array]
Measures = tuple[Measure, Measure, int]


def _classes(pack: Any, entry: dict[str, Any], reference: Decoded, found: Decoded, limit: int | None) -> Measures:
    ((key, file),) = entry["eval_files"].items()
    labels = np.load(pack._path(file))["Y"][:limit].astype(int)
    chosen = found[key].argmax(1)
    right, same = chosen == labels, chosen == reference[key].argmax(1)
    return lambda rows: float(right[rows].mean()), lambda rows: float(same[rows].mean()), len(labels)


def _texts(pack: Any, entry: dict[str, Any], reference: Decoded, found: Decoded, limit: int | None) -> Measures:
    wanted = np.load(pack._path(entry["eval_file"]))["score"][:limit]
    scores = (found["a"] * found["b"]).sum(1)
    cosines = np.mean([_cosines(reference[key], found[key]) for key in ("a", "b")], axis=0)
    return (
        lambda rows: pack._spearman(scores[rows], wanted[rows]),
        lambda rows: float(cosines[rows].mean()),
        len(wanted),
    )


def _cosines(a: Array, b: Array) -> Array:
    found: Array = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return found


def _boxes(pack: Any, entry: dict[str, Any], reference: Decoded, found: Decoded, _: int | None) -> Measures:
    wanted, seen = pack._dets(reference), pack._dets(found)

    def f1(rows: Rows) -> float:
        return float(pack._det_f1([seen[row] for row in rows], [wanted[row] for row in rows], entry["score_report"]))

    if entry["kind"] == "faces":
        return f1, f1, len(seen)
    truth = _truth(np.load(pack._path(entry["eval_file"])), len(seen))
    return lambda rows: float(pack._map50([seen[row] for row in rows], [truth[row] for row in rows])), f1, len(seen)


def _truth(held: Any, count: int) -> list[Array]:
    """Return the labelled boxes of each image: (n, 5) class, x1, y1, x2, y2."""
    boxes = [held["boxes"][held["boff"][row] : held["boff"][row + 1]] for row in range(count)]
    halves = [box[:, 3:5] / 2 for box in boxes]
    return [np.concatenate([b[:, :1], b[:, 1:3] - h, b[:, 1:3] + h], 1) for b, h in zip(boxes, halves, strict=True)]


def _speech(_: Any, __: dict[str, Any], reference: Decoded, found: Decoded, ___: int | None) -> Measures:
    wanted, seen = reference["prob"], found["prob"]
    same = (wanted >= 0.5) == (seen >= 0.5)
    return (
        lambda rows: float(same[rows].mean()),
        lambda rows: float(np.corrcoef(wanted[rows].ravel(), seen[rows].ravel())[0, 1]),
        len(wanted),
    )
