"""Figures of tasks: how far the outputs of a quantized file agree with those of float, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

Outputs = Sequence[Any]
Agreement = Callable[[Outputs, Outputs], float]

SCORE: Final = 0.3
"""Score from which on a box of float is a true one."""

OVERLAP: Final = 0.5
"""Intersection over union of two boxes of one object."""

PAGE: Final = (800, 608)
"""Height and width of PicoDet's input."""

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


def same_text(reference: Outputs, other: Outputs, blank: int = 0) -> float:
    """Return 1 if the greedy CTC text stays the same, else 0."""
    return float(_text(reference[0], blank) == _text(other[0], blank))


def _text(scores: Any, blank: int) -> list[int]:
    classes = scores.shape[-1]
    codes = scores.reshape(-1, classes).argmax(-1)  # of one line, whether its steps or samples come first
    kept = (codes != blank % classes) & (np.diff(codes, prepend=-1) != 0)
    return [int(code) for code in codes[kept]]


def correct_symbols(reference: Outputs, other: Outputs, blank: int = 0) -> float:
    """Return one less the error rate of the greedy CTC text, edits over the symbols of float."""
    before, after = (_text(outputs[0], blank) for outputs in (reference, other))
    row = list(range(len(after) + 1))
    for place, symbol in enumerate(before, 1):
        diagonal, row[0] = row[0], place
        for column, candidate in enumerate(after, 1):
            best = min(row[column] + 1, row[column - 1] + 1, diagonal + (symbol != candidate))
            diagonal, row[column] = row[column], best
    return 1 - row[-1] / max(len(before), 1)


def overlap(reference: Outputs, other: Outputs) -> float:
    """Return the intersection of two maps above `TEXT` over their union; 1 if both are empty."""
    before, after = reference[0] > TEXT, other[0] > TEXT
    union = int((before | after).sum())
    return float((before & after).sum() / union) if union else 1.0


def cosine(reference: Outputs, other: Outputs) -> float:
    """Return the cosine of the first outputs."""
    before, after = (value[0].astype(np.float64).ravel() for value in (reference, other))
    return float(before @ after / max(float(np.linalg.norm(before) * np.linalg.norm(after)), 1e-30))


def lowest_cosine(reference: Outputs, other: Outputs) -> float:
    """Return the lowest cosine of an output."""
    return min(cosine([before], [after]) for before, after in zip(reference, other, strict=True))


def correlation(reference: Outputs, other: Outputs) -> float:
    """Return the correlation of the values of the first outputs."""
    before, after = (outputs[0].astype(np.float64) for outputs in (reference, other))
    return cosine([before - before.mean()], [after - after.mean()])


def structural_similarity(reference: Outputs, other: Outputs) -> float:
    """Return the structural similarity of images (1, C, H, W) of values to 255, by windows of 8 x 8 pixels.

    Wang et al. (2004), equation 13.
    """
    first, second = (
        np.lib.stride_tricks.sliding_window_view(outputs[0][0].astype(np.float64), (8, 8), (1, 2))
        for outputs in (reference, other)
    )
    means = first.mean((-2, -1)), second.mean((-2, -1))
    covariance = (first * second).mean((-2, -1)) - means[0] * means[1]
    luminance, contrast = 2.55**2, 7.65**2
    above = (2 * means[0] * means[1] + luminance) * (2 * covariance + contrast)
    below = (means[0] ** 2 + means[1] ** 2 + luminance) * (first.var((-2, -1)) + second.var((-2, -1)) + contrast)
    return float((above / below).mean())


def same_steps(reference: Outputs, other: Outputs) -> float:
    """Return the share of steps of outputs (1, steps, classes) whose class stays the same in each of them."""
    same = [
        before.argmax(-1) == after.argmax(-1) for before, after in zip(reference, other, strict=True) if before.ndim > 2
    ]
    return float(np.mean(np.all(same, 0)))


def same_sound(reference: Outputs, other: Outputs) -> float:
    """Return the cosine of logarithmic spectra, times the ratio of the durations."""
    shorter, longer = sorted(value[0].size for value in (reference, other))
    spectra = []
    for outputs in (reference, other):
        frames = np.lib.stride_tricks.sliding_window_view(outputs[0].ravel()[:shorter], 1024)[::256]
        spectra.append(np.log10(np.maximum(np.abs(np.fft.rfft(frames * np.hanning(1024))), 1e-3)) + 3)
    return cosine(spectra[:1], spectra[1:]) * float(shorter / longer)


def same_signs(reference: Outputs, other: Outputs) -> float:
    """Return the intersection of the positive logits of the last outputs over their union; 1 if there are none."""
    return overlap([reference[-1] + TEXT], [other[-1] + TEXT])


def same_bits(reference: Outputs, other: Outputs) -> float:
    """Return the share of probabilities of the first output that stay on their side of one half."""
    return float(np.mean((reference[0] > 0.5) == (other[0] > 0.5)))


def same_pitch(reference: Outputs, other: Outputs) -> float:
    """Return the share of frames that stay voiced within `CENTS`, or without voice."""
    voiced = [outputs[1].ravel() >= VOICED for outputs in (reference, other)]
    ratio = np.maximum(other[0].ravel(), 1) / np.maximum(reference[0].ravel(), 1)
    near = np.abs(1200 * np.log2(ratio)) < CENTS
    return float(np.mean((voiced[0] == voiced[1]) & (near | ~voiced[0])))


def _yolox(outputs: Outputs) -> Any:
    """Return (N, 4 + classes), corners and scores, of an output (1, N, 5 + classes) of the strides 8, 16 and 32."""
    rows = outputs[0][0].astype(np.float64)
    side = math.isqrt(len(rows) // 21)  # cells of stride 32; the other grids have 2 and 4 times as many a side
    places, strides = _grids([(4 * side, 4 * side, 8), (2 * side, 2 * side, 16), (side, side, 32)])
    return _boxes((rows[:, :2] + places) * strides, np.exp(rows[:, 2:4]) * strides, rows[:, 4:5] * rows[:, 5:])


def _yolov8(outputs: Outputs) -> Any:
    """Return (N, 4 + classes), corners and scores, of an output (1, 4 + classes + masks, N)."""
    rows = outputs[0][0].T.astype(np.float64)
    classes = rows.shape[1] - 4 - (outputs[1].shape[1] if len(outputs) > 1 else 0)
    return _boxes(rows[:, :2], rows[:, 2:4], rows[:, 4 : 4 + classes])


def _picodet(outputs: Outputs) -> Any:
    """Return (N, 4 + classes), corners and scores, of a page: four outputs of scores, four of bins of distances."""
    scores, bins = np.concatenate(outputs[:4], 1)[0], np.concatenate(outputs[4:], 1)[0].astype(np.float64)
    grids = [(math.ceil(PAGE[0] / stride), math.ceil(PAGE[1] / stride), stride) for stride in (8, 16, 32, 64)]
    places, strides = _grids(grids)
    parts = np.exp(bins.reshape(len(bins), 4, -1))
    sides = (parts / parts.sum(-1, keepdims=True)) @ np.arange(parts.shape[-1]) * strides
    centre = (places + 0.5) * strides + (sides[:, 2:] - sides[:, :2]) / 2
    return _boxes(centre, sides[:, :2] + sides[:, 2:], scores)


def _grids(grids: Sequence[tuple[int, int, int]]) -> tuple[Any, Any]:
    """Return (N, 2) columns and rows of the cells of all grids (rows, columns, stride), and (N, 1) their strides."""
    places = [np.stack(np.divmod(np.arange(rows * columns), columns)[::-1], 1) for rows, columns, _ in grids]
    strides = [np.full((rows * columns, 1), stride) for rows, columns, stride in grids]
    return np.concatenate(places), np.concatenate(strides)


def _boxes(centre: Any, size: Any, scores: Any) -> Any:
    return np.concatenate([centre - size / 2, centre + size / 2, scores], 1)


def average_precision(decode: Callable[[Outputs], Any], reference: Outputs, other: Outputs) -> float:
    """Return the average precision of a detector's boxes, those of float above `SCORE` being the true ones.

    Returns:
        NaN if float has no box: such a sample says nothing.
    """
    truth, detections = (_suppressed(decode(outputs), least) for outputs, least in ((reference, SCORE), (other, 0.01)))
    if not len(truth):
        return math.nan
    free = np.ones(len(truth), bool)
    hits = np.zeros(len(detections))
    for index, row in enumerate(detections):
        shared = _iou(row[:4], truth[:, :4]) * free * (truth[:, 5] == row[5])
        best = int(shared.argmax())
        if shared[best] >= OVERLAP:
            free[best], hits[index] = False, 1
    precision = hits.cumsum() / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float((envelope * hits).sum() / len(truth))


def _suppressed(rows: Any, least: float) -> Any:
    """Return (N, 6) corners, score and class, best first, without boxes that overlap a better one of their class."""
    scores, classes = rows[:, 4:].max(1), rows[:, 4:].argmax(1)
    rows = np.column_stack([rows[:, :4], scores, classes])[scores >= least]
    rows = rows[np.argsort(-rows[:, 4], kind="stable")]
    chosen = []
    while len(rows):
        chosen.append(rows[0])
        rows = rows[(_iou(rows[0, :4], rows[:, :4]) < OVERLAP) | (rows[:, 5] != rows[0, 5])]
    return np.array(chosen).reshape(-1, 6)


def _iou(box: Any, boxes: Any) -> Any:
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared = sides.clip(0).prod(1)
    return shared / (np.prod(box[2:] - box[:2]) + (boxes[:, 2:] - boxes[:, :2]).prod(1) - shared)


DECODERS: Final[dict[str, Callable[[Outputs], Any]]] = {"yolox": _yolox, "yolov8": _yolov8, "picodet": _picodet}

METRICS: Final[dict[str, tuple[str, Agreement]]] = {
    "class": ("same class", same_class),
    "ctc": ("same text", same_text),
    "ctc_last": ("same text", partial(same_text, blank=-1)),
    "ctc_symbols": ("correct symbols", partial(correct_symbols, blank=-1)),
    "map": ("overlap of text", overlap),
    "cosine": ("cosine", cosine),
    "cosine_last": ("cosine", lambda reference, other: cosine(reference[-1:], other[-1:])),
    "correlation": ("correlation", correlation),
    "cosines": ("lowest cosine", lowest_cosine),
    "similar": ("structural similarity", structural_similarity),
    "steps": ("same class", same_steps),
    "sound": ("cosine of log spectra", same_sound),
    "logits": ("overlap of spindles", same_signs),
    "bits": ("same decision", same_bits),
    "pitch": ("same note", same_pitch),
    **{name: ("AP of float's boxes", partial(average_precision, decode)) for name, decode in DECODERS.items()},
}
"""Names for the table, and functions of (outputs of float, outputs of another file) for one sample."""
