"""What the targets are measured on: the models of the pack and two nets with random weights, with their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import models
from benchmarks.accuracy import BATCH, HEADLINE, Run, peer, peer_input

Feed = dict[str, Any]

RANDOM: dict[str, Callable[[], onnx.ModelProto]] = {"resnet18": models.resnet, "mobilenetv2": models.mobilenet}
NAMES = (*HEADLINE, *RANDOM)
RANDOM_SAMPLES = 16
SIZES = (1, 8)
"""Batch sizes for latency measurements."""

PEERS: dict[str, dict[str, bool]] = {
    f"{types} {'per-channel' if per_channel else 'per-tensor'}": {"per_channel": per_channel, "signed": signed}
    for types, signed in (("U8S8", False), ("S8S8", True))
    for per_channel in (True, False)
}
"""Settings of quantize_static for activations and weights."""

DYNAMIC = ("minilm_l6",)
"""Models that are also quantized with the peer's dynamic quantization."""


@dataclass(frozen=True)
class Subject:
    """A float model with its data.

    Attributes:
        name: name in the tables.
        model: ONNX file.
        feeds: calibration data, in batches.
        singles: feeds of one sample each, at least as many as the largest batch size.
    """

    name: str
    model: Path
    feeds: list[Feed]
    singles: list[Feed]

    def batches(self) -> dict[int, Feed]:
        """Return feeds by batch size: all of `SIZES`, or only the batch size that the model supports."""
        axes = open_axes(self.model)
        if not any(axis is not None for axis in axes.values()):
            return {1: self.singles[0]}
        return {count: stacked(self.singles[:count], axes) for count in SIZES}


def open_axes(path: Path) -> dict[str, int | None]:
    """Return the first dynamic axis of each input, or None."""
    graph = onnx.load(str(path), load_external_data=False).graph
    held = {tensor.name for tensor in graph.initializer}
    found: dict[str, int | None] = {}
    for value in graph.input:
        if value.name not in held:
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            found[value.name] = sizes.index(0) if 0 in sizes else None
    return found


def stacked(feeds: Sequence[Feed], axes: Mapping[str, int | None]) -> Feed:
    """Combine samples to one feed; inputs without a dynamic axis are taken from the first sample."""
    made: Feed = {}
    for name, value in feeds[0].items():
        axis = axes.get(name)
        made[name] = value if axis is None else np.concatenate([feed[name] for feed in feeds], axis)
    return made


def subject(name: str, pack: Any, folder: Path) -> Subject:
    """Return a model by its name; models with random weights are written to `folder`."""
    if name not in RANDOM:
        fixed = name == "silero_vad"
        feeds = pack.load_calib(name, batch=1 if fixed else BATCH)
        return Subject(name, Path(pack.model_path(name)), feeds, pack.load_calib(name, batch=1, limit=max(SIZES)))
    path = folder / f"{name}.onnx"
    made = RANDOM[name]()
    onnx.save(made, str(path))
    rng = np.random.default_rng(0)
    shape = (1, *(dim.dim_value for dim in made.graph.input[0].type.tensor_type.shape.dim[1:]))
    feeds = [{made.graph.input[0].name: rng.normal(0, 1, shape).astype(np.float32)} for _ in range(RANDOM_SAMPLES)]
    return Subject(name, path, feeds, feeds)


def peers(one: Subject, folder: Path) -> dict[str, Run]:
    """Return the peer's settings by name; each writes a quantized model to a given path."""
    prepared = peer_input(one.model, folder)
    found: dict[str, Run] = {
        label: lambda output, given=given: peer(prepared, one.feeds, output, **given)  # type: ignore[misc]
        for label, given in PEERS.items()
    }
    if one.name in DYNAMIC:
        found["dynamic"] = lambda output: dynamic(prepared, output)
    return found


def dynamic(model: Path, output: Path) -> None:
    """Quantize with the peer's dynamic quantization, int8 weights."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(model), str(output), weight_type=QuantType.QInt8)


def first_line(error: Exception) -> str:
    """Return the first line of an error, short enough for a table cell."""
    lines = str(error).splitlines() or [type(error).__name__]
    return f"fails: {lines[0][:120]}"
