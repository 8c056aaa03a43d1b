"""Nature of an output: values, class scores, labels, detections or a state. It selects the figures of its quality.

Only what the structure proves decides; everything else is values, which are judged by their error alone. The rules, in
order; the first that applies decides. docs/verification.md explains them.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from sbonnx.verify.output_forms import STATES
from sbonnx.verify.output_samples import OutputSamples

Nature = Literal["values", "classes", "labels", "detections", "state"]

PEAK: Final = 0.2
"""Mean top probability of logits, on a scale from 0 (that of equal logits) to 1. Measured on float models: 0.31 to 0.97
for four trained classifiers (10 to 1,000 classes), below 0.01 for sentence embeddings and pooled features."""

SATURATED: Final = 1e-9
"""Distance of the median top probability from 1 below which values are not logits: pixels, for example."""

MANY: Final = 10
"""Number of values from which a vector of a linear layer may be logits without a name that says so."""


CACHE_RANK: Final = 4
"""Rank of keys and values of attention: (batch, heads, steps, values). They need no input: the first run has none."""


def nature_of(samples: OutputSamples, outputs: int, place: int = 0) -> tuple[Nature, str]:
    """Decide the nature of an output.

    Args:
        outputs: number of outputs of the model.
        place: position of this one.

    Returns:
        The nature, and the reason in a few words.
    """
    form = samples.form
    if outputs > 1 and form.end == "recurrent":
        return "state", "state of a recurrent operator"
    if outputs > 1 and _is_cache(samples, first=place == 0):
        return "state", "a cache or state, by its name and the input of its shape"
    if samples.varies or form.end == "selection":
        return "detections", "its length depends on the values"
    if form.end == "index" or samples.kind == "b":
        return "labels", "indices" if form.end == "index" else "truth values"
    if samples.wide_integers:
        return "labels", "integers"
    if samples.agree and form.end == "softmax":
        return "classes", f"a softmax over {samples.classes}"
    if samples.agree and samples.probabilities:
        return "classes", f"{samples.classes} probabilities"
    if samples.agree and (form.end == "linear" or form.pooled):
        if form.named:
            return "classes", f"{samples.classes} values, by their name"
        if samples.classes >= MANY and _are_logits(samples):
            return "classes", f"{samples.classes} logits of a linear layer"
    return "values", "its structure does not say more"


def _is_cache(samples: OutputSamples, *, first: bool) -> bool:
    """Whether an output and an input other than the first are a state after and before a run.

    The name of the output says so, and shapes are equal, or differ on one inner axis, that of the steps. If only the
    name of the input says so, shapes are equal, and it is not the first output.
    """
    for name, real, shape in samples.inputs[1:]:
        if not real or len(shape) != len(samples.array) or len(shape) < 2:
            continue
        other = [axis for axis, sizes in enumerate(zip(shape, samples.array, strict=True)) if sizes[0] != sizes[1]]
        grown = len(other) <= 1 and all(0 < axis < len(shape) - 1 for axis in other)
        if samples.form.state and grown:
            return True
        if not other and not first and STATES.search(name) is not None:
            return True
    return samples.form.cache and len(samples.array) == CACHE_RANK


def _are_logits(samples: OutputSamples) -> bool:
    """Whether the softmax of the float values is confident, and its top class depends on the sample."""
    if not samples.peaks:
        return False
    even = 1 / samples.classes
    peaked = float(np.mean(samples.peaks)) >= even + PEAK * (1 - even)
    saturated = 1 - float(np.median(samples.peaks)) < SATURATED
    return peaked and not saturated and not samples.one_class
