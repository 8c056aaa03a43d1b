"""Nature of an output: values, class scores, labels, detections or a state. It selects the figures of its quality.

Only what the structure proves decides; everything else is values, which are judged by their error alone. The rules, in
order; the first that applies decides. docs/verification.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from sbonnx.detectors import HeadDecoder, head_choice
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph, Tensor, query
from sbonnx.metrics.arrays import shown
from sbonnx.metrics.boxes import LAYOUTS, Boxes, detections
from sbonnx.recipe.names import OutputTask
from sbonnx.recipe.problem import one_of
from sbonnx.report.figures import Nature
from sbonnx.spec import Array
from sbonnx.verify.output_forms import STATES
from sbonnx.verify.output_samples import OutputSamples

CLASSES: Final[frozenset[Nature]] = frozenset({"classes", "pixels", "tokens"})
"""Natures whose figures are those of decisions between classes: one a sample, or one at each position."""

GIVEN: Final[Mapping[OutputTask, Nature]] = {
    "classification": "classes",
    "segmentation": "pixels",
    "tokens": "tokens",
    "detection": "detections",
    "embedding": "embedding",
    "regression": "values",
}
"""Nature of outputs whose task is given. Of integers, those of classes are labels."""

TAKES: Final[Mapping[OutputTask, str]] = {
    "classification": "(batch, classes), further axes of length 1, or integers",
    "segmentation": "(batch, classes, height, width), (batch, height, width, classes), or integers",
    "tokens": "(batch, steps, classes), or integers",
    "detection": f"detections after NMS, {LAYOUTS}; or those of a head that the structure shows or --head states",
    "embedding": "(batch, values) and further axes of length 1, float",
    "regression": "any shape",
}
"""Shapes that tasks take."""

PEAK: Final = 0.2
"""Mean top probability of logits, on a scale from 0 (that of equal logits) to 1. Measured on float models: 0.31 to 0.97
for four trained classifiers (10 to 1,000 classes), below 0.01 for sentence embeddings and pooled features."""

SATURATED: Final = 1e-9
"""Distance of the median top probability from 1 below which values are not logits: pixels, for example."""

MANY: Final = 10
"""Number of values from which a vector of a linear layer may be logits without a name that says so."""


CACHE_RANK: Final = 4
"""Rank of keys and values of attention: (batch, heads, steps, values). They need no input: the first run has none."""


Tasks = OutputTask | Mapping[str, OutputTask] | None
"""Meaning of outputs that the user names: one task for all but states, or one by output."""


def tasks_of(tasks: Tasks, outputs: Sequence[str]) -> dict[str, OutputTask]:
    """Return the tasks by output.

    Raises:
        RecipeError: an output does not exist.
    """
    if not isinstance(tasks, Mapping):
        return {} if tasks is None else dict.fromkeys(outputs, tasks)
    for name in tasks:
        if name not in outputs:
            there = ", ".join(f"'{output}'" for output in outputs)
            raise RecipeError(
                f"a task is given for output '{name}', and the model has no such output: there are {there}"
            )
    return dict(tasks)


def check_tasks(tasks: Tasks, graph: Graph, head: str | None = None) -> None:
    """Check that the outputs of a model can have these tasks, as far as its shapes say it.

    Args:
        head: of the detections, as the user states it, see `sbonnx.detectors.head_choice`; None: recognized.

    Raises:
        RecipeError: an output cannot, or does not exist; there is no such head.
    """
    chosen = tasks_of(tasks, [output.name for output in graph.outputs])
    arrays: dict[str, Array] = {}
    for output in graph.outputs:
        task, shape, kind = chosen.get(output.name), query.shape(output), query.dtype(output)
        if task is None or shape is None or (not isinstance(tasks, Mapping) and STATES.search(output.name)):
            continue
        check_task(task, output.name, shape, real=kind is None or np.dtype(kind).kind == "f")
        value = zeros_of(output)
        if task == "detection" and value is not None:
            arrays[output.name] = value
    decoder = decoder_of(lambda: graph, head)
    feed = feed_of_zeros(graph)
    if feed is not None and len(arrays) == list(chosen.values()).count("detection") > 0:
        read_detections(arrays, feed, decoder)


def decoder_of(load: Callable[[], Graph], head: str | None) -> HeadDecoder:
    """Return the decoder of a model with the head that the user states; None: recognized.

    Raises:
        RecipeError: there is no such head.
    """
    return HeadDecoder(load, None if head is None else head_choice(head))


def feed_of_zeros(graph: Graph) -> dict[str, Array] | None:
    """Return a feed of zeros that takes no memory; None if a size is known only when the model runs."""
    feed = {tensor.name: zeros_of(tensor) for tensor in graph.inputs}
    of_known_size = {name: value for name, value in feed.items() if value is not None}
    return of_known_size if len(of_known_size) == len(feed) else None


def zeros_of(tensor: Tensor, samples: int = 1) -> Array | None:
    """Return an array of zeros of the shape of a tensor, with `samples` if the batch is open; None: it is not known."""
    shape = query.shape(tensor)
    sizes = [samples if not place and isinstance(axis, str) else axis for place, axis in enumerate(shape or ())]
    if shape is None or not all(isinstance(axis, int) for axis in sizes):
        return None
    zero = np.zeros((), query.dtype(tensor) or np.float32)
    return np.broadcast_to(zero, [axis for axis in sizes if isinstance(axis, int)])


def read_detections(
    outputs: Mapping[str, Array], feed: Mapping[str, Array], decoder: HeadDecoder | None
) -> list[Boxes]:
    """Return the detections of each image of a feed: those after NMS as they are, others by the head of the model.

    Args:
        decoder: of the float model, whose head the quantized one has as well; None: the model is not known.

    Raises:
        RecipeError: the outputs are no detections.
    """
    try:
        return detections(outputs if decoder is None else decoder(outputs, feed, {}))
    except DataError as error:
        if decoder is not None and decoder.stated:
            raise RecipeError(str(error)) from error
        listed = ", ".join(f"'{name}' {shown(value)}" for name, value in outputs.items())
        raise RecipeError(
            f"the task detection does not fit the outputs {listed}: it takes {TAKES['detection']}. Regression fits; of "
            "another detector, state its head (--head, VERIFY.HEAD), or only labels can say more (--eval with --decode)"
        ) from error


def check_task(task: OutputTask, name: str, shape: Sequence[int | str | None], *, real: bool) -> None:
    """Check that an output can have a task. Lengths that are unknown fit everywhere.

    Args:
        shape: of the output, with the batch axis.
        real: whether it is float.

    Raises:
        RecipeError: it cannot.
    """
    if _fits(task, shape, real=real):
        return
    others = [other for other in GIVEN if other != "detection" and _fits(other, shape, real=real)]
    sizes = ", ".join("?" if not isinstance(axis, int) else str(axis) for axis in shape)
    raise RecipeError(
        f"the task {task} does not fit output '{name}', {'float' if real else 'integers'} ({sizes}): it takes "
        f"{TAKES[task]}. {one_of(others).capitalize()} fit{'s' * (len(others) == 1)}; name the output if another one "
        f"is meant: --task OUTPUT={task}"
    )


def _fits(task: OutputTask, shape: Sequence[int | str | None], *, real: bool) -> bool:
    vector = len(shape) > 1 and sum(isinstance(axis, int) and axis != 1 for axis in shape[1:]) <= 1
    if task == "classification":
        return vector or len(shape) == 1
    if task == "segmentation":
        return len(shape) > (3 if real else 1)
    if task == "tokens":
        return len(shape) > (1 if real else 0)
    if task == "embedding":
        return real and vector and any(axis != 1 for axis in shape[1:])
    return True


def given_nature(task: OutputTask, samples: OutputSamples) -> tuple[Nature, str]:
    """Return the nature of an output whose task is given, and the reason."""
    nature = GIVEN[task]
    if nature in CLASSES and samples.kind != "f":
        nature = "labels"
    return nature, f"the task {task} is given"


def nature_of(samples: OutputSamples, outputs: int, place: int = 0) -> tuple[Nature, str]:
    """Decide the nature of an output.

    Args:
        outputs: number of outputs of the model.
        place: position of this one.

    Returns:
        The nature, and the reason in a few words.
    """
    form = samples.form
    if state := state_reason(samples, outputs, place):
        return "state", state
    if samples.varies or form.end == "selection":
        return "detections", "its length depends on the values"
    if form.end == "index" or samples.kind == "b":
        return "labels", "indices" if form.end == "index" else "truth values"
    if samples.wide_integers:
        return "labels", "integers"
    if samples.scores.agree and form.end == "softmax":
        return "classes", f"a softmax over {samples.classes}"
    if samples.scores.agree and samples.probabilities:
        return "classes", f"{samples.classes} probabilities"
    if samples.scores.agree and (form.end == "linear" or form.pooled):
        if form.named:
            return "classes", f"{samples.classes} values, by their name"
        if samples.classes >= MANY and _are_logits(samples):
            return "classes", f"{samples.classes} logits of a linear layer"
    return "values", "its structure does not say more"


def state_reason(samples: OutputSamples, outputs: int, place: int) -> str:
    """Return why an output is a state; "" if it is none. The arguments are those of `nature_of`."""
    if outputs > 1 and samples.form.end == "recurrent":
        return "state of a recurrent operator"
    if outputs > 1 and _is_cache(samples, first=place == 0):
        return "a cache or state, by its name and the input of its shape"
    return ""


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
    if not samples.scores.peaks:
        return False
    even = 1 / samples.classes
    peaked = float(np.mean(samples.scores.peaks)) >= even + PEAK * (1 - even)
    saturated = 1 - float(np.median(samples.scores.peaks)) < SATURATED
    return peaked and not saturated and not samples.one_class
