"""Figures of tasks: how far the outputs of a quantized file agree with those of float, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

Outputs = Sequence[Any]
Agreement = Callable[[Outputs, Outputs], float]

TOP: Final = 20
"""Rows of a detector that count: those with the highest scores."""

TEXT: Final = 0.3
"""Threshold of a map of text, as PP-OCR's post-processing has it."""

CENTS: Final = 50.0
"""Difference of pitch that is still the same note, a hundredth of a semitone each."""

VOICED: Final = 0.5
"""Confidence from which on a frame has a pitch."""


def same_class(reference: Outputs, other: Outputs) -> float:
    """Return the share of rows of the output with the fewest columns above one whose largest value stays the same."""
    narrow = [index for index, value in enumerate(reference) if value.ndim > 1 and value.shape[-1] > 1] or [0]
    index = min(narrow, key=lambda at: reference[at].shape[-1])
    before, after = reference[index], other[index]
    if before.dtype.kind in "iu":
        return float(np.mean(before == after))
    return float(np.mean(before.argmax(-1) == after.argmax(-1)))


def same_text(reference: Outputs, other: Outputs) -> float:
    """Return 1 if the greedy CTC text stays the same, else 0."""
    return float(_text(reference[0]) == _text(other[0]))


def _text(scores: Any) -> list[int]:
    codes = scores.reshape(-1, scores.shape[-1]).argmax(-1)  # of one line, whether its steps or samples come first
    return [int(code) for place, code in enumerate(codes) if code and (not place or code != codes[place - 1])]


def overlap(reference: Outputs, other: Outputs) -> float:
    """Return the intersection of two maps above `TEXT` over their union; 1 if both are empty."""
    before, after = reference[0] > TEXT, other[0] > TEXT
    union = int((before | after).sum())
    return float((before & after).sum() / union) if union else 1.0


def cosine(reference: Outputs, other: Outputs) -> float:
    """Return the cosine of the first outputs."""
    before, after = (value[0].astype(np.float64).ravel() for value in (reference, other))
    return float(before @ after / max(float(np.linalg.norm(before) * np.linalg.norm(after)), 1e-30))


def same_bits(reference: Outputs, other: Outputs) -> float:
    """Return the share of probabilities of the first output that stay on their side of one half."""
    return float(np.mean((reference[0] > 0.5) == (other[0] > 0.5)))


def same_pitch(reference: Outputs, other: Outputs) -> float:
    """Return the share of frames that stay voiced within `CENTS`, or without voice."""
    voiced = [outputs[1].ravel() >= VOICED for outputs in (reference, other)]
    ratio = np.maximum(other[0].ravel(), 1) / np.maximum(reference[0].ravel(), 1)
    near = np.abs(1200 * np.log2(ratio)) < CENTS
    return float(np.mean((voiced[0] == voiced[1]) & (near | ~voiced[0])))


def same_top(reference: Outputs, other: Outputs) -> float:
    """Return the share of the `TOP` best rows of a detector, (1, rows, columns), that stay among them."""
    return _kept(*(np.concatenate([value[0].max(-1) for value in outputs]) for outputs in (reference, other)))


def same_top_columns(reference: Outputs, other: Outputs) -> float:
    """Return the share of the `TOP` best columns of YOLOv8, (1, 4 + classes, columns), that stay among them."""
    return _kept(reference[0][0, 4:].max(0), other[0][0, 4:].max(0))


def _kept(before: Any, after: Any) -> float:
    best = [set(np.argsort(-scores, kind="stable")[:TOP].tolist()) for scores in (before, after)]
    return len(best[0] & best[1]) / TOP


METRICS: Final[dict[str, tuple[str, Agreement]]] = {
    "class": ("same class", same_class),
    "ctc": ("same text", same_text),
    "map": ("overlap of text", overlap),
    "cosine": ("cosine", cosine),
    "bits": ("same decision", same_bits),
    "pitch": ("same note", same_pitch),
    "top": (f"best {TOP} boxes", same_top),
    "top_columns": (f"best {TOP} boxes", same_top_columns),
}
"""Names for the table, and functions of (outputs of float, outputs of another file) for one sample."""
