"""Quantization-aware training from file to file: `prepare`, a loop, `export`."""

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
from sbonnx.prepare import Prepared, Source, read_recipe
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

COMPARED: Final = 8
"""Feeds on which the file is held against the module."""


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
    """Calibrate a float model, and give it as a module to be trained, which begins where calibration ended.

        module = sbonnx.qat.prepare("resnet.onnx", "calibration/", bits="w4a4")
        sbonnx.qat.train(module, "calibration/")
        sbonnx.qat.export(module, "resnet_w4a4.onnx", "calibration/")

    Args:
        model: path or ModelProto.
        data: what is calibrated on; see `sbonnx.quantize`, as for `recipe`, `backend`, `split` and `overrides`.
        weights, activations: methods of `METHODS`, for all layers; None: W.QUANTIZER.TYPE and A.QUANTIZER.TYPE of
            the recipe, and those of its entries of SPECIFIC, where they name one that learns, else "lsq".
        options: of methods, by their name.
        adapters: low-rank adapters, or their rank, to be trained in place of the weights; see `Adapters`.
        fixed: values of inputs that are the same in training whatever the feed, so that an If on one is settled.
        shapes: sizes of inputs that the model leaves open and that an If asks for.
        device: torch's name of where the module lies; "auto": "cuda" where torch has one.

    Raises:
        SbonnxError: one of its kinds; see `sbonnx.quantize`, `trainable` and `add_adapters`.
    """
    wishes, rules = read_recipe(recipe, backend, overrides)
    if wishes.w.qscheme == BY_WIDTH:  # what learns scales learns them about 0
        wishes, rules = read_recipe(wishes, None, {"w_qscheme": "per-channel-symmetric"})
    if wishes.mode != "static":
        raise RecipeError(
            f"MODE: {wishes.mode} has no ranges of activations to train: leave MODE out, and say bits: w4a0 for "
            "weights alone"
        )
    prepared, _, solution = pipeline.solve(model, data, wishes, rules, split=split, progress=progress)
    return from_calibration(
        prepared,
        solution,
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
    """`prepare`, where calibration is done: `QuantModel.init_QAT`.

    Args:
        prepared, solution: of one calibration.
        model: the float model that the file will be held against.
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
    """torch's name for a device."""
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
    """Train `module`, in place, to give what its float network gives on `data`; see `sbonnx.qat.training.loop.train`.

    Args:
        module: of `prepare`.
        data: as for `sbonnx.quantize`; held in memory.
        settings: see `Settings`.
        loss, checkpoint, progress: see `sbonnx.qat.training.loop.train`.
        inner: tensors inside the network that are to agree too, beside the outputs, with the weight
            ``settings.inner_weight``: their names in the graph, or "blocks" for the ends of its blocks (see
            `sbonnx.qat.onnx_to_torch.feature_taps.inner_tensors`). None: "blocks" with a loss of this package, none
            with one of your own. (): none.
        augment: changes each batch before both networks see it: a function, or names of
            `sbonnx.qat.training.augment.AUGMENTATIONS`, such as "flip,shift".
        split: cut each feed into pieces of so many samples before they are read.
        wishes: single settings, such as ``epochs=20``, over `settings`.

    Raises:
        SbonnxError: one of its kinds.
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
    """The size of the leading axis of the inputs where the model fixes it; its feeds are batches then."""
    for tensor in prepared.graph.inputs:
        known = shape(tensor)
        if known and isinstance(known[0], int):
            return known[0]
    return None


def _by_python_names(module: nn.Module, feeds: datasets.Dataset) -> list[dict[str, Any]]:
    """The feeds by the names of the module's inputs."""
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
    """Write what `module` has learned into the graph that it came from, and prove the file as `sbonnx.quantize` does.

    Names, structure and metadata are those that calibration alone would have written. With data, the file is also
    held against the module itself: see `sbonnx.qat.agreement`.

    Args:
        module: of `prepare`, trained or not; what wraps it (DistributedDataParallel) is looked through.
        path: where the file goes.
        data: to compare on; None: the file is checked and opened.
        force: write over a file that is there.
        verify: prove the file.
        split: see `sbonnx.quantize`.

    Raises:
        SbonnxError: one of its kinds. Nothing is left half-written.
    """
    target, origin, model = Path(path), origin_of(module), source_of(module)
    taken = [Path(model)] if isinstance(model, (str, os.PathLike)) else []
    graphs.check_target(target, inputs=taken, force=force)
    prepared, solution = learned(module)
    samples = None if data is None else datasets.read(data, prepared.graph, split=split)
    division = None if samples is None else HeldOutSplit(samples, samples)
    report = pipeline.write(model, prepared, division, solution, target, force=force, verify=verify)
    if not verify or samples is None:
        return report
    feeds: Sequence[Mapping[str, np.ndarray[Any, Any]]] = list(islice(samples, COMPARED))
    with torch.no_grad():
        found = disagreements(module, origin, solution, target, feeds)
    return replace(report, problems=(*report.problems, *found))
