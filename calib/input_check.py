"""Plausibility of input data: scale, offset and channel order against what the first layer of a model expects.

Data that was preprocessed wrongly raises no error anywhere: calibration and comparison use the same wrong data. A batch
normalization after the first convolution holds the mean and variance of its outputs over the training
data. Without one,
the bias of the convolution gives the order of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import Graph, query
from sbonnx.graph.extract import extract
from sbonnx.graph.model import Node, Tensor
from sbonnx.ops import IMAGE_PREPARATION
from sbonnx.report.codes import Note
from sbonnx.spec import Array

MOST_SAMPLES: Final = 256
MOST_VALUES: Final = 20_000_000
"""Limits of the samples that are checked; of large images, fewer are."""

DIVERGENT: Final = 0.5
"""Mean divergence of the channels (see `divergence`) above which data does not fit the batch normalization.

Measured on ResNet20, MobileNetV1, MobileNetV2 and UltraFace: 0.05 to 0.26 for right data in subsets of 16 samples; 0.51
to 1.2 for pixels from 0 to 1 instead of normalized ones; 5 for a missing factor of 255, 20,000 for one too many.
"""

FAR: Final = 3.0
"""Limit in place of `DIVERGENT` for fewer than `FEW` samples, which spread less than the training data."""

FITS_BETTER: Final = 1.2
SIGNIFICANT: Final = 2.0
"""Ratio of divergences, and standard errors of their difference, from which on the reverse channel order fits better.

Measured on subsets of 16 to 128 samples of the same models: no false alarm in 1,700 subsets. A wrong order is found in
81 % of the subsets of 128 (ResNet20), in all of them (MobileNetV1), in all of 24 (UltraFace); never on MobileNetV2,
whose first layer responds alike to both orders.
"""

FEW: Final = 16
RESAMPLES: Final = 100
"""Minimum number of samples to tell the channel order, and bootstrap resamples of them."""

TIMES_BIAS: Final = (0.05, 100.0)
SPREAD: Final = (0.03, 10.0)
"""Standard deviation of the first convolution's outputs, over the magnitude of its bias and absolute, outside of which
data is too small or too large. Measured on SqueezeNet and FastestDet: 2.7 and 4.5, 0.27 and 0.81 for right data."""


CONSTANT_VALUES: Final = 16
"""Number of values of a feed from which equal ones are no coincidence."""


@dataclass(frozen=True)
class FirstLayer:
    """The first layer behind an image input, and what it tells about its input.

    Attributes:
        input: name of the input.
        piece: the model from the input to `tensor`.
        tensor: output of the convolution, or what the batch normalization normalizes.
        node: name of the convolution or batch normalization.
        mean, variance: over the training data, float64 (C,); None without a batch normalization.
        bias: bias of the convolution, (C,); None without one.
        channels: input channels where they are on axis 1 of the input; None: unknown.
    """

    input: str
    piece: Graph
    tensor: str
    node: str
    mean: Array | None = None
    variance: Array | None = None
    bias: Array | None = None
    channels: int | None = None


def first_layer_of(graph: Graph) -> FirstLayer | None:
    """Return the first convolution or batch normalization behind the only image input (rank 4); None without one."""
    images = [tensor for tensor in graph.inputs if query.rank(tensor) == 4]
    if len(images) != 1:
        return None
    (image,) = images
    node, direct = _first_node(image)
    if node is None:
        return None
    norm: Node | None = node if node.op == "BatchNormalization" else None
    if norm is None:
        readers = query.readers(node.outputs[0])
        norm = readers[0][0] if len(readers) == 1 and readers[0][0].op == "BatchNormalization" else None
    tensor = node.outputs[0] if node.op == "Conv" else node.inputs[0]
    try:
        piece = extract(graph, [image.name], [tensor.name])
    except ModelError:  # it needs another input
        return None
    mean = variance = bias = None
    if norm is not None and not query.attribute(norm, "training_mode", 0):
        mean, variance = (query.constant(norm.inputs[place]) for place in (3, 4))
    elif node.op == "Conv":
        bias = query.constant(query.optional_input(node, 2))
    weight = query.constant(node.inputs[1]) if node.op == "Conv" and direct else None
    channels = None if weight is None else int(weight.shape[1]) * int(query.attribute(node, "group", 1))
    if mean is None or variance is None:
        mean = variance = None
    return FirstLayer(image.name, piece, tensor.name, node.name, mean, variance, bias, channels)


def _first_node(image: Tensor) -> tuple[Node | None, bool]:
    """Return the first Conv or BatchNormalization that an input reaches, and whether it reads the input itself."""
    front, seen = [image], {id(image)}
    while front:
        tensor = front.pop(0)
        for node, place in query.readers(tensor):
            if node.op in ("Conv", "BatchNormalization") and place == 0:
                return node, tensor is image
            if node.op in IMAGE_PREPARATION:
                fresh = [output for output in node.outputs if id(output) not in seen]
                seen.update(map(id, fresh))
                front.extend(fresh)
    return None, False


def doubts_about(layer: FirstLayer | None, data: Dataset) -> tuple[Note, ...]:
    """Return the findings about data: that of `constant_data`, else those of `check_inputs` with the first layer.

    Raises:
        DataError: see `check_inputs`.
    """
    constant = constant_data(data)
    return (constant,) if constant else () if layer is None else check_inputs(layer, data)


def constant_data(data: Dataset) -> Note | None:
    """Return a sentence if each input is one number over all samples, such as zeros of a reader that failed.

    Reads up to the first difference.
    """
    values: dict[str, Array] = {}
    most = 0
    for _, feed in data.items():
        for name, array in feed.items():
            if array.size:
                first = values.setdefault(name, array.reshape(-1)[:1])
                most = max(most, array.size)
                if not (array == first).all():
                    return None
    if most < CONSTANT_VALUES:
        return None
    what = ", ".join(f"'{name}' is {first[0] + 0:.6g} everywhere" for name, first in list(values.items())[:4])
    return Note(
        "data-constant", f"{data.name} holds no information: input {what}: check how the data is read and preprocessed"
    )


def check_inputs(layer: FirstLayer, data: Dataset) -> tuple[Note, ...]:
    """Compare data with what the first layer expects, on up to `MOST_SAMPLES` samples.

    Returns:
        One sentence for each finding: values too large, too small or shifted; channels in reverse order; constant ones.

    Raises:
        DataError: a feed cannot be read, or its layout is not that of the model.
    """
    samples = list(_samples(layer, data))
    if not samples:
        return ()
    with LayerRunner(layer.piece, name="the first layer") as run:
        given = _moments(run, layer, samples)
        doubts = [_constant_channels(layer, samples)]
        low, high = min(float(x.min()) for x in samples), max(float(x.max()) for x in samples)
        held = f"input '{layer.input}' holds values from {low:.4g} to {high:.4g}"
        if layer.mean is None or layer.variance is None:
            doubts.append(_against_bias(layer, given, held))
        elif (far := _against_norm(layer, given, held)) is not None:
            doubts.append(far)
        elif samples[0].shape[1] == 3 and len(given) >= FEW:
            reverse = _moments(run, layer, [np.ascontiguousarray(x[:, ::-1]) for x in samples])
            doubts.append(_order(layer, given, reverse))
    return tuple(note for note in doubts if note is not None)


def _samples(layer: FirstLayer, data: Dataset) -> Iterator[Array]:
    """Yield the image arrays of the first feeds, as far as the limits allow."""
    count = values = 0
    for where, feed in data.items():
        x = feed.get(layer.input)
        if x is None or not x.size or x.dtype.kind != "f":
            return
        if layer.channels is not None and x.shape[1] != layer.channels and x.shape[-1] == layer.channels:
            raise DataError(
                f"{where} holds {x.shape} for input '{layer.input}', and the model reads {layer.channels} channels on "
                "axis 1 (NCHW): transpose the data, x.transpose(0, 3, 1, 2), or set layout: nchw in the preprocessing"
            )
        count, values = count + len(x), values + x.size
        yield x
        if count >= MOST_SAMPLES or values >= MOST_VALUES:
            return


def _moments(run: LayerRunner, layer: FirstLayer, samples: list[Array]) -> Array:
    """Return the mean and mean square of each sample and channel, float64 (samples, 2, C)."""
    rows = []
    for x in samples:
        y = run({layer.input: x}, [layer.tensor])[layer.tensor]
        y = y.reshape(*y.shape[:2], -1)
        square = np.einsum("ncp,ncp->nc", y, y, dtype=np.float64) / y.shape[2]
        rows.append(np.stack([y.mean(2, dtype=np.float64), square], axis=1))
    values: Array = np.concatenate(rows)
    return values


def divergence(moments: Array, mean: Array, variance: Array) -> float:
    """Return the mean Kullback-Leibler divergence of normal distributions of the channels from the training data's.

    Args:
        moments: mean and mean square by sample and channel, (samples, 2, C).
        mean, variance: over the training data, (C,). Channels with next to no variance do not count.
    """
    m, square = moments.mean(axis=0)
    v = np.maximum(square - m * m, 1e-12 * np.maximum(variance, 1e-30))
    live = variance > 1e-3 * np.median(variance)
    channel_divergences = 0.5 * (v / variance + (m - mean) ** 2 / variance - 1 - np.log(v / variance))[live]
    return float(channel_divergences.mean())


def _against_norm(layer: FirstLayer, moments: Array, held: str) -> Note | None:
    assert layer.mean is not None and layer.variance is not None
    mean, variance = layer.mean.astype(np.float64), layer.variance.astype(np.float64)
    if not (variance > 0).any() or divergence(moments, mean, variance) <= (DIVERGENT if len(moments) >= FEW else FAR):
        return None
    m, square = moments.mean(axis=0)
    live = variance > 1e-3 * np.median(variance)
    ratio = float(np.sqrt(np.median(np.maximum(square - m * m, 0)[live] / variance[live])))
    spread = f"{ratio:.3g} times"
    return Note(
        "data-unlike-training",
        f"{held}, which does not look like the training data: the outputs of '{layer.node}' spread {spread} as far "
        "as its batch normalization recorded, or are shifted; check scale, mean and std of the data",
    )


def _against_bias(layer: FirstLayer, moments: Array, held: str) -> Note | None:
    if layer.bias is None or not len(layer.bias) or not np.median(np.abs(layer.bias)):
        return None
    m, square = moments.mean(axis=0)
    spread = float(np.median(np.sqrt(np.maximum(square - m * m, 0))))
    times = spread / float(np.median(np.abs(layer.bias)))
    if times > TIMES_BIAS[1] and spread > SPREAD[1]:
        what = "large"
    elif times < TIMES_BIAS[0] and spread < SPREAD[0]:
        what = "small"
    else:
        return None
    return Note(
        "data-too-large-or-small",
        f"{held}, which looks too {what} for the model: the outputs of '{layer.node}' spread {times:.3g} times "
        "as far as its bias is large; check the scale of the data",
    )


def _order(layer: FirstLayer, given: Array, reverse: Array) -> Note | None:
    """Return a note if the batch normalization fits the reverse order of channels significantly better."""
    assert layer.mean is not None and layer.variance is not None
    mean, variance = layer.mean.astype(np.float64), layer.variance.astype(np.float64)
    here, there = divergence(given, mean, variance), divergence(reverse, mean, variance)
    if here < FITS_BETTER * there:
        return None
    rng, count = np.random.default_rng(0), len(given)
    gains = []
    for _ in range(RESAMPLES):
        rows = rng.integers(0, count, count)
        gains.append(divergence(given[rows], mean, variance) - divergence(reverse[rows], mean, variance))
    if np.mean(gains) < SIGNIFICANT * np.std(gains):
        return None
    return Note(
        "channel-order",
        f"the channels of input '{layer.input}' seem to be in the wrong order (RGB or BGR): reversed, they fit the "
        f"batch normalization after '{layer.node}' better "
        f"(divergence {there:.3g} instead of {here:.3g}, {count} samples)",
    )


def _constant_channels(layer: FirstLayer, samples: list[Array]) -> Note | None:
    """Return a note on channels that are constant in all samples while others are not."""
    if layer.channels is None or layer.channels < 2:
        return None
    low = np.min([x.min(axis=(0, 2, 3)) for x in samples], axis=0)
    high = np.max([x.max(axis=(0, 2, 3)) for x in samples], axis=0)
    fixed = np.flatnonzero(low == high)
    if not len(fixed) or len(fixed) == layer.channels:
        return None
    which = ", ".join(f"{place} ({low[place]:.4g})" for place in fixed[:4])
    return Note(
        "channels-constant",
        f"input '{layer.input}' is constant in channel {which} over all samples: check the preprocessing",
    )
