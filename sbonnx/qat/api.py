"""Quantization-aware training from file to file: `prepare`, `train` or your own loop, `export`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx import pipeline
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.errors import RecipeError
from sbonnx.graph.query import shape
from sbonnx.plan import Solution
from sbonnx.plan.make import LEARNS
from sbonnx.progress import Progress
from sbonnx.qat.adapters.adapters import Adapters, add_adapters
from sbonnx.qat.agreement import disagreements
from sbonnx.qat.export import learned
from sbonnx.qat.fakequant import quant_parameters
from sbonnx.qat.module import float_twin, keep_source, origin_of, source_of, trainable
from sbonnx.qat.onnx_to_torch.feature_taps import BLOCKS, Taps, inner_tensors, with_inner
from sbonnx.qat.training import loop
from sbonnx.qat.training.augment import Augment, make_augment, names_of
from sbonnx.qat.training.loop import Trained
from sbonnx.qat.training.losses import Loss, distillation, with_divergence
from sbonnx.qat.training.settings import Settings
from sbonnx.recipe.names import BY_WIDTH
from sbonnx.report import Report
from sbonnx.stages.state import Prepared, Request, Source, read_recipe

COMPARED: Final = 8
"""Number of feeds on which the exported file is compared with the module."""


def prepare(
    model: Source,
    data: Any,
    recipe: Any = None,
    *,
    backend: str | None = None,
    weights: str | None = None,
    activations: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    adapters: Adapters | int | None = None,
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    device: str = "cpu",
    split: int | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> fx.GraphModule:
    """Calibrate a float model and return it as a trainable module, initialized with the calibrated scales and weights.

        module = sbonnx.qat.prepare("resnet.onnx", "calibration/", bits="w4a4")
        sbonnx.qat.train(module, "calibration/")
        sbonnx.qat.export(module, "resnet_w4a4.onnx", "calibration/")

    Args:
        model: path or ModelProto.
        data: calibration data; see `sbonnx.quantize`, also for `recipe`, `backend`, `split` and `overrides`.
        weights, activations: keys of `METHODS`, for all layers. None: W.QUANTIZER.TYPE and A.QUANTIZER.TYPE of the
            recipe, including its SPECIFIC entries, if they name a learning method, else "lsq".
        options: options of methods, by method name.
        adapters: low-rank adapters, or their rank, that are trained instead of the weights; see `Adapters`.
        fixed: inputs that have the same value for every feed, by name; makes the conditions of Ifs on them constant.
        shapes: shapes of inputs with dynamic axes, by name, if the condition of an If depends on them.
        device: torch device of the module; "auto": "cuda" if available, else "cpu".
        progress: progress display of the calibration.

    Raises:
        SbonnxError: a subclass; see `sbonnx.quantize`, `trainable` and `add_adapters`.
    """
    wishes, rules = read_recipe(recipe, backend, overrides)
    if wishes.w.qscheme == BY_WIDTH:  # in training, weights with scheme "auto" are symmetric at any width
        wishes, rules = read_recipe(wishes, None, {"w_qscheme": "per-channel-symmetric"})
    if wishes.mode != "static":
        raise RecipeError(
            f"MODE: {wishes.mode} has no ranges of activations to train: leave MODE out, and say bits: w4a0 for "
            "weights alone"
        )
    state = pipeline.solve(Request(model, wishes, rules, data=data, split=split), progress)
    return from_calibration(
        state.prepared,
        state.solution,
        model,
        weights=weights,
        activations=activations,
        options=options,
        adapters=adapters,
        fixed=fixed,
        shapes=shapes,
        device=device,
    )


def from_calibration(
    prepared: Prepared,
    solution: Solution,
    model: Source,
    *,
    weights: str | None = None,
    activations: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    adapters: Adapters | int | None = None,
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    device: str = "cpu",
) -> fx.GraphModule:
    """Return the trainable module of an existing calibration; used by `QuantModel.init_QAT`.

    Args:
        prepared, solution: result of one calibration.
        model: the float model that the exported file will be compared with.
        weights, activations, options, adapters, fixed, shapes, device: see `prepare`.
    """
    done = tuple(refusal for refusal in prepared.refusals if refusal.what != LEARNS)
    module = trainable(
        replace(prepared, refusals=done),
        solution,
        weights=weights,
        activations=activations,
        options=options,
        fixed=fixed,
        shapes=shapes,
        device=_placed(device),
    )
    keep_source(module, model)
    if adapters is not None:
        add_adapters(module, adapters)
    return module


def _placed(device: str) -> str:
    """Return the torch device name; resolves "auto"."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def train(
    module: nn.Module,
    data: Any,
    settings: Settings | None = None,
    *,
    loss: Loss = distillation,
    inner: str | Sequence[str] | None = None,
    augment: Augment | str | Sequence[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    split: int | None = None,
    progress: Progress | None = None,
    **wishes: Any,
) -> Trained:
    """Train `module` in place by distillation from its float network on `data`; see `sbonnx.qat.training.loop.train`.

    Args:
        module: result of `prepare`.
        data: as for `sbonnx.quantize`; held in memory.
        settings: see `Settings`.
        loss, checkpoint, progress: see `sbonnx.qat.training.loop.train`.
        inner: intermediate tensors whose error is added to the loss with weight ``settings.inner_weight``: their names
            in the graph, or "blocks" for the outputs of its residual blocks (see
            `sbonnx.qat.onnx_to_torch.feature_taps.inner_tensors`). None: "blocks" with a loss of this package, no
            tensors with a user-defined loss. (): no tensors.
        augment: augmentation of each batch, applied before both networks: a function, or names of
            `sbonnx.qat.training.augment.AUGMENTATIONS`, such as "flip,shift".
        split: number of samples per piece into which each feed is split.
        wishes: single settings, such as ``epochs=20``, that override `settings`.

    Raises:
        SbonnxError: a subclass.
    """
    chosen = replace(settings or Settings(), **wishes)
    prepared = origin_of(module).prepared
    if fixed_batch(prepared) is not None:
        chosen = replace(chosen, batch=1)
    twin = float_twin(module, device=str(next(iter(module.parameters())).device))
    if inner is None:
        inner = BLOCKS if loss in (distillation, with_divergence) else ()
    names = inner_tensors(prepared.graph, inner) if chosen.inner_weight else ()
    changed = augment if augment is None or callable(augment) else make_augment(augment)
    feeds = datasets.read(data, prepared.graph, split=split)
    with Taps(module, prepared.graph, names) as tapped, Taps(twin, prepared.graph, names) as teacher:
        return loop.train(
            module,
            _by_python_names(module, feeds),
            teacher,
            chosen,
            quant=[parameter for _, parameter in quant_parameters(module)],
            loss=with_inner(loss, names, chosen.inner_weight) if names else loss,
            forward=tapped,
            augment=changed,
            checkpoint=checkpoint,
            agree={"inner tensors": list(names), "augmentations": names_of(changed)},
            progress=progress,
        )


def fixed_batch(prepared: Prepared) -> int | None:
    """Return the leading size of the inputs if the model fixes it (each feed is then one batch), else None."""
    for tensor in prepared.graph.inputs:
        known = shape(tensor)
        if known and isinstance(known[0], int):
            return known[0]
    return None


def _by_python_names(module: nn.Module, feeds: datasets.Dataset) -> list[dict[str, Any]]:
    """Return the feeds by the input names of the module."""
    origin = origin_of(module)
    return [origin.feed(feed) for feed in feeds]


def export(
    module: nn.Module,
    path: str | os.PathLike[str],
    data: Any = None,
    *,
    force: bool = False,
    verify: bool = True,
    split: int | None = None,
) -> Report:
    """Export the trained module to a quantized ONNX file, and verify the file as `sbonnx.quantize` does.

    The trained values are written into the original graph; names, structure and metadata are the same as after
    calibration alone. With data, the file is also compared with the module itself; see `sbonnx.qat.agreement`.

    Args:
        module: result of `prepare`, trained or not, wrapped (DistributedDataParallel) or not.
        path: target file.
        data: samples for the comparison; None: the file is only checked and opened.
        force: overwrite an existing file.
        verify: verify the file.
        split: see `sbonnx.quantize`.

    Raises:
        SbonnxError: a subclass. No partial file is left behind.
    """
    target, origin, model = Path(path), origin_of(module), source_of(module)
    taken = [Path(model)] if isinstance(model, (str, os.PathLike)) else []
    graphs.check_target(target, inputs=taken, force=force)
    prepared, solution = learned(module)
    samples = None if data is None else datasets.read(data, prepared.graph, split=split)
    division = None if samples is None else HeldOutSplit(samples, samples)
    request = Request(model, prepared.recipe, prepared.backend, output=target, force=force, verify=verify)
    report = pipeline.write(request, prepared, solution, division)
    if not verify or samples is None:
        return report
    feeds: Sequence[Mapping[str, np.ndarray[Any, Any]]] = list(islice(samples, COMPARED))
    with torch.no_grad():
        found = disagreements(module, origin, solution, target, feeds)
    return replace(report, problems=(*report.problems, *found))
