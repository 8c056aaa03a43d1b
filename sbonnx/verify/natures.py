"""Nature of an output: class scores, embedding, regression, signal, state, ... It selects the figures of its quality.

The rules, in order; the first that applies decides. docs/verification.md explains them.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from sbonnx.verify.output_samples import OutputSamples

Nature = Literal[
    "classes", "embedding", "regression", "signal", "state", "sequence", "features", "labels", "detections"
]

PEAK: Final = 0.2
"""Mean top probability of logits, on a scale from 0 (that of equal logits) to 1. Measured on float models: 0.31 to 0.97
for four trained classifiers (10 to 1,000 classes), below 0.01 for sentence embeddings and pooled features."""

SATURATED: Final = 1e-9
"""Distance of the median top probability from 1 below which values are not logits: pixels, for example."""

VARIED: Final = 0.1
"""Standard deviation of the lead of the top class, relative to its mean, from which one top class of all samples may be
that of the data. Measured on samples of one class: 0.46 to 1.2 for CIFAR-10 and Tiny ImageNet, 0.08 to 0.3 for digits.
A value that always leads because of its unit has less."""

LONG: Final = 64
"""Number of values from which a vector without another nature is an embedding, below it a regression."""

NORM_ERROR: Final = 1e-3
"""Maximum relative spread of the norms of normalized vectors."""

SMALL: Final = 16
"""Number of values from which an output of the size of an input is a signal."""

WAVE: Final = 1000
"""Number of values from which the last axis of one or two channels is one of time."""

COORDINATES: Final = 4
"""Length of the last axis of boxes."""


def nature_of(samples: OutputSamples, outputs: int) -> tuple[Nature, str]:
    """Decide the nature of an output.

    Args:
        outputs: number of outputs of the model.

    Returns:
        The nature, and the reason in a few words.
    """
    shape, form = samples.shape or (), samples.form
    if samples.varies or form.end == "selection":
        return "detections", "its length depends on the values"
    if not samples.real:
        return "labels", "integers"
    if outputs > 1 and form.end == "recurrent":
        return "state", "state of a recurrent operator"
    if outputs > 1 and any(real and len(one) > 1 and one == samples.array for real, one in samples.inputs[1:]):
        return "state", "the shape of an input other than the first"
    if samples.agree and form.end in ("softmax", "sigmoid"):
        return "classes", f"a {form.end} over {samples.classes}"
    if samples.agree and samples.probabilities and samples.classes > 1:
        return "classes", f"{samples.classes} probabilities"
    if _have_one_norm(samples):
        return "embedding", "vectors of one norm"
    if samples.agree and form.end == "other" and form.named and samples.classes > 1:
        return "classes", f"{samples.classes} values, by their name"
    if samples.agree and form.end == "other" and _are_logits(samples):
        return "classes", f"{samples.classes} logits"
    if _is_signal(samples):
        return "signal", "the size of an input, or a wave"
    if max(shape, default=1) == int(np.prod(shape)):
        return _of_vector(samples)
    if len(shape) == 2 and shape[-1] == COORDINATES:
        return "regression", "rows of four coordinates"
    return ("sequence", "a vector for each token") if samples.tokens else ("features", "a map or rows of vectors")


def _are_logits(samples: OutputSamples) -> bool:
    """Whether the softmax of the float values is confident, and its top class, or its lead, depends on the sample."""
    if samples.classes < 2 or not samples.peaks:
        return False
    even = 1 / samples.classes
    peaked = float(np.mean(samples.peaks)) >= even + PEAK * (1 - even)
    saturated = 1 - float(np.median(samples.peaks)) < SATURATED
    lead = np.asarray(samples.margins)
    varied = not samples.one_class or float(lead.std()) >= VARIED * float(lead.mean())
    return peaked and not saturated and varied


def _is_signal(samples: OutputSamples) -> bool:
    shape = samples.shape or ()
    real = [one[1:] for is_real, one in samples.inputs if is_real and one]
    if any(one == shape and np.prod(one) >= SMALL for one in real):
        return True
    maps = len(shape) == 3 and min(shape[1:]) > 1
    if maps and any(len(one) == 3 and (one[1:] == shape[1:] or one[:-1] == shape[:-1]) for one in real):
        return True
    return bool(shape) and shape[-1] >= WAVE and int(np.prod(shape[:-1])) <= 2


def _have_one_norm(samples: OutputSamples) -> bool:
    """Whether the output is a vector a sample, and all samples have one norm."""
    shape, norms = samples.shape or (), np.asarray(samples.norms)
    vector = 1 < max(shape, default=1) == int(np.prod(shape))
    return vector and len(norms) > 1 and norms.min() > 0 and bool(np.ptp(norms) <= NORM_ERROR * norms.mean())


def _of_vector(samples: OutputSamples) -> tuple[Nature, str]:
    size = int(np.prod(samples.shape or ()))
    if size > 1 and samples.form.end in ("norm", "tanh"):
        return "embedding", f"a vector after {samples.form.end}"
    return ("embedding", "a long vector") if size >= LONG else ("regression", f"{size} values, not classes")
