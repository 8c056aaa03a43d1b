"""Quantization-aware training from file to file: `prepare`, `train` or your own loop, `export`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx import pipeline
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.correct.biases import with_corrections
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import constant, node_by_name, readers, shape, tensors_by_name
from sbonnx.patterns import FUSE, SIMPLIFY, apply
from sbonnx.planning import Solution
from sbonnx.progress import Progress, shown_by_default
from sbonnx.qat.adapters import Adapters, add_adapters
from sbonnx.qat.agreement import disagreements
from sbonnx.qat.fakequant import FakeQuant, quant_parameters
from sbonnx.qat.lora import Outside, low_ranks, weight_as_read
from sbonnx.qat.module import (
    float_twin,
    keep_source,
    origin_of,
    set_teacher,
    source_of,
    teacher_graph,
    trainable,
    unwrapped,
    weight_parameter,
)
from sbonnx.report import Report
from sbonnx.schemes import BY_WIDTH
from sbonnx.stages.state import Prepared, Request, Source, read_recipe
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths
from sbonnx.torchnet.onnx_to_torch.reimport import META
from sbonnx.torchnet.onnx_to_torch.write_back import differ, set_values, write_parameters
from sbonnx.training import loop
from sbonnx.training.batches import Augment, make_augment, names_of
from sbonnx.training.distillation import (
    BLOCKS,
    Loss,
    Taps,
    distillation,
    inner_tensors,
    shared_tensors,
    with_divergence,
    with_inner,
)
from sbonnx.training.loop import Objective, Settings, Trained
from sbonnx.verify import EvaluationData

COMPARED: Final = 8
"""Number of feeds on which the exported file is compared with the module."""


@shown_by_default
def prepare(  # noqa: PLR0913 - public entry point
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
    teacher: str | os.PathLike[str] | onnx.ModelProto | None = None,
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
        teacher: float model that the module learns from in `train` and that `export` compares the file with. It has
            the same inputs and outputs: the original of a pruned `model`. None: `model`, before pruning if the recipe
            has SPARSE.
        device: torch device of the module; "auto": "cuda" if available, else "cpu".
        progress: progress display of the calibration; None: a bar in notebooks and on terminals.

    Raises:
        SbonnxError: see `sbonnx.quantize`, `trainable`, `set_teacher` and `add_adapters`.
    """
    resolved, rules = read_recipe(recipe, backend, overrides)
    if resolved.w.qscheme == BY_WIDTH:  # in training, weights with scheme "auto" are symmetric at any width
        resolved, rules = read_recipe(resolved, None, {"w_qscheme": "per-channel-symmetric"})
    if resolved.mode != "static":
        raise RecipeError(
            f"MODE: {resolved.mode} has no ranges of activations to train: leave MODE out; to train weights only, use "
            "bits: w4a0"
        )
    state = pipeline.solve(Request(model, resolved, rules, data=data, split=split), progress)
    module = trainable(
        state.prepared,
        state.solution,
        weights=weights,
        activations=activations,
        options=options,
        device=device,
        fixed=fixed,
        shapes=shapes,
    )
    original, pruned = (state.request.model, state.request.pruned) if teacher is None else (teacher, None)
    keep_source(module, original, pruned)
    if teacher is not None or pruned is not None:
        set_teacher(module, _float_graph(original))
    if adapters is not None:
        add_adapters(module, adapters)
    return module


def _float_graph(model: Source) -> Graph:
    """Load a model, and simplify and fuse it, so that its tensors have the names that they have in calibration."""
    graph = graphs.load(model)
    for patterns in (SIMPLIFY, FUSE):
        apply(graph, patterns)
    return graph


@shown_by_default
def train(  # noqa: PLR0913 - public entry point
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
    **overrides: Any,
) -> Trained:
    """Train `module` in place by distillation from its float network on `data`; see `sbonnx.training.loop.train`.

    Args:
        module: result of `prepare`.
        data: as for `sbonnx.quantize`; held in memory.
        settings: see `Settings`.
        loss, checkpoint, progress: see `sbonnx.training.loop.train`.
        inner: intermediate tensors whose error is added to the loss with weight ``settings.inner_weight``: their names
            in the graph, or "blocks" for the outputs of its residual blocks (see
            `sbonnx.training.distillation.inner_tensors`). With another teacher than the model itself, those that
            have the same shape in both. None: "blocks" with a loss of this package, no
            tensors with a user-defined loss. (): no tensors.
        augment: augmentation of each batch, applied before both networks: a function, or names of
            `sbonnx.training.batches.AUGMENTATIONS`, such as "flip,shift".
        split: number of samples per piece into which each feed is split.
        overrides: single settings, such as ``epochs=20``, that override `settings`.

    Raises:
        SbonnxError: a subclass.
    """
    chosen = replace(settings or Settings(), **overrides)
    origin = origin_of(module)
    prepared = origin.prepared
    if fixed_batch(prepared) is not None:
        chosen = replace(chosen, batch=1)
    trainable = next(iter(module.parameters()), None)
    if trainable is None:
        raise ModelError("the model has neither weights nor scales that can be trained: use sbonnx.quantize")
    twin = float_twin(module, device=str(trainable.device))
    if inner is None:
        inner = BLOCKS if loss in (distillation, with_divergence) else ()
    original = teacher_graph(origin)
    names = inner_tensors(original, inner) if chosen.inner_weight else ()
    if origin.teacher is not None:
        names = shared_tensors(names, prepared.graph, original)
    augmentation = augment if augment is None or callable(augment) else make_augment(augment)
    feeds = datasets.read(data, prepared.graph, split=split)
    with Taps(module, prepared.graph, names) as tapped, Taps(twin, original, names) as teacher:
        objective = Objective(
            teacher,
            loss=with_inner(loss, names, chosen.inner_weight) if names else loss,
            forward=tapped,
            augment=augmentation,
            agree={"inner tensors": list(names), "augmentations": names_of(augmentation)},
        )
        return loop.train(
            module,
            [origin.feed(feed) for feed in feeds],
            objective,
            chosen,
            quant=[parameter for _, parameter in quant_parameters(module)],
            checkpoint=checkpoint,
            progress=progress,
        )


def fixed_batch(prepared: Prepared) -> int | None:
    """Return the leading size of the inputs if the model fixes it (each feed is then one batch), else None."""
    for tensor in prepared.graph.inputs:
        dims = shape(tensor)
        if dims and isinstance(dims[0], int):
            return dims[0]
    return None


def run_module(module: nn.Module, feeds: Any, *, gradients: bool) -> dict[str, torch.Tensor]:
    """Run the module and return its outputs by name, on its device.

    Args:
        module: result of `sbonnx.qat.prepare` or `QuantModel.init_QAT`.
        feeds: tensors or arrays by input name, or the only input.
        gradients: record the graph for the backward pass.

    Raises:
        DataError: an input is missing or unknown.
    """
    origin = origin_of(module)
    names = list(origin.inputs)
    values = dict(feeds) if isinstance(feeds, Mapping) else {names[0]: feeds}
    missing = [name for name in names if name not in values] if isinstance(feeds, Mapping) else names[1:]
    unknown = [name for name in values if name not in names and name not in (origin.specialization.get("fixed") or {})]
    if missing or unknown:
        raise DataError(f"the inputs of the network are {', '.join(names)}: missing {missing}, unknown {unknown}")
    place = getattr(next(module.parameters(), None), "device", "cpu")
    inputs = {
        name: (value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))).to(place)
        for name, value in origin.feed(values).items()
    }
    with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
        outputs: dict[str, torch.Tensor] = module(**inputs)
    return outputs


MEAN_INPUT: Final = 3
"""Index of the mean among the inputs of BatchNormalization; the variance is the next input."""


def learned(module: nn.Module) -> tuple[Prepared, Solution]:
    """Return the trained module as graph, plan and solution, ready for the insertion of Q/DQ pairs.

    The graph is a copy of the calibrated one. Weights, biases, norms and statistics have the module's current values
    and their old names.

    Raises:
        ModelError: the module was not made by `sbonnx.qat`, or has adapters outside the rounding, which cannot be
            exported.
        NumericError: training made a scale or a weight NaN or infinite; the message names it.
    """
    origin, inner = origin_of(module), unwrapped(module)
    outside = [name for name, adapter in low_ranks(inner).items() if isinstance(adapter, Outside)]
    if outside:
        raise ModelError(
            f"{len(outside)} adapters are outside the rounding, the first of '{outside[0]}', and cannot be exported: "
            f"fold them into the weights with sbonnx.qat.merge(module)"
        )
    graph = graphs.copy(origin.prepared.graph)
    prepared = replace(origin.prepared, graph=graph)
    tensors = tensors_by_name(graph)
    write_parameters(graph, inner)
    qparams, codes = dict(origin.solution.qparams), dict(origin.solution.codes)
    _write_statistics(graph, inner)
    for name, sites in origin.sites.items():
        fake_quant = inner.get_submodule(name)
        assert isinstance(fake_quant, FakeQuant)
        learned_qparams = fake_quant.qparams()
        for site in sites:
            qparams[site.key] = learned_qparams
            if site.role == "weight":
                weight = weight_as_read(inner, site.tensor, weight_parameter(inner, site))
                codes[site.key] = fake_quant.codes(weight)
                set_values(tensors[site.tensor], fake_quant.export_weight(weight))
    solution = replace(origin.solution, qparams=qparams, codes=codes, constants={})
    return prepared, with_corrections(prepared.plan, tensors, solution, {})


def _write_statistics(graph: Graph, module: fx.GraphModule) -> None:
    """Write mean and variance of batch norms into the graph, in place; a changed shared constant is copied per node."""
    state, nodes, names = module.state_dict(), node_by_name(graph), Names(graph)
    for node_name, buffers in module.meta[META]["statistics"].items():
        node = nodes[node_name]
        for index, buffer in enumerate(buffers, MEAN_INPUT):
            values, tensor = state[buffer].float().cpu().numpy(), node.inputs[index]
            stored = np.asarray(constant(tensor))
            if not differ(stored, values):
                continue
            if len(readers(tensor)) == 1:
                set_values(tensor, values)
            else:
                own = add_constant(graph, f"{tensor.name}_{node_name}", values.astype(stored.dtype), names)
                replace_input(node, index, own)


def export(
    module: nn.Module,
    path: str | os.PathLike[str],
    data: Any = None,
    *,
    force: bool = False,
    verify: bool = True,
    split: int | None = None,
    evaluation: EvaluationData | None = None,
    details: bool = False,
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
        evaluation: labelled data and a metric, computed for the float and the trained model; see `sbonnx.quantize`.
        details: measure what the page shows beyond the figures; see `sbonnx.quantize`.

    Raises:
        SbonnxError: a subclass. No partial file is left behind.
    """
    if evaluation is not None and not verify:
        raise RecipeError("an evaluation is part of the verification: do not switch it off")
    target, origin, (model, pruned) = Path(path), origin_of(module), source_of(module)
    with protecting(input_paths([model, data])):
        graphs.check_target(target, (), force=force, model=True)
    prepared, solution = learned(module)
    samples = None if data is None else datasets.read(data, prepared.graph, split=split)
    division = None if samples is None else HeldOutSplit.whole(Samples.of(samples, prepared.graph))
    request = Request(
        model, prepared.recipe, prepared.backend, output=target, force=force, verify=verify, details=details
    )
    request = replace(request, evaluation=evaluation, pruned=pruned)
    report = pipeline.write(request, prepared, solution, division)
    if not verify or samples is None:
        return report
    feeds: Sequence[Mapping[str, np.ndarray[Any, Any]]] = list(islice(samples, COMPARED))
    with torch.no_grad():
        problems = disagreements(module, origin, solution, target, feeds)
    return replace(report, problems=(*report.problems, *problems))
