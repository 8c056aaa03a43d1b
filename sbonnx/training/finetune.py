"""Fine-tuning of a float graph by distillation from the graph that it was pruned from: graph in, graph out.

No labels are needed. Weights and biases are trained; batch norms that were not fused keep their statistics. Entries of
weights that are zero stay zero (`masks.keep_zeros`). The weights that are kept are those with the least loss on
hold-out samples, the initial ones included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import torch
from torch import Tensor, fx

from sbonnx import graph as graphs
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.errors import ModelError, NumericError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype, node_by_name, shape
from sbonnx.options import RunOptions
from sbonnx.spec import Array
from sbonnx.torchnet.onnx_to_torch.reimport import META, reimport
from sbonnx.torchnet.onnx_to_torch.write_back import write_parameters
from sbonnx.training.batches import CHANNELS, Batch, ShuffledBatches, make_augment
from sbonnx.training.distillation import (
    BLOCKS,
    Kept,
    Taps,
    distillation,
    inner_tensors,
    require_same_interface,
    shared_tensors,
    with_inner,
)
from sbonnx.training.fixed_zeros import keep_zeros
from sbonnx.training.loop import Objective, Settings, train

Feed = Mapping[str, Array]
"""One input of the model: arrays by name."""

AUTO: Final = "auto"
"""Augmentation that depends on the inputs; see `augmentation`."""

NONE: Final = "none"
"""No augmentation."""

FOR_IMAGES: Final = "flip,shift,mixup"
"""Augmentations of "auto" for images."""

LEAST_SIDE: Final = 16
"""Least height and width of an image for "auto"; smaller inputs are rather feature maps."""


@dataclass(frozen=True)
class FineTuned:
    """Result of `finetune`.

    Attributes:
        graph: a copy of the given graph with the kept weights.
        before, after: loss on the hold-out samples with the initial and with the kept weights; see `distillation`.
        epoch: the kept weights are those after this epoch; 0: the initial ones, because no epoch was better.
        epochs: number of completed epochs.
        augment: names of the augmentations.
        masked: initializers whose zeros were kept.
        stopped: reason why the training ended early, or "".
    """

    graph: Graph
    before: float
    after: float
    epoch: int
    epochs: int
    augment: tuple[str, ...]
    masked: tuple[str, ...]
    stopped: str = ""


def require_trainable(graph: Graph) -> None:
    """Check that a graph can be converted to torch and trained.

    Raises:
        ModelError: an op is not supported in training (the message names the node), the condition of a branch is not
            constant, or a parameter is not float32.
    """
    _float32(reimport(graph))


def augmentation(graph: Graph, wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of augmentations for a graph.

    Args:
        wanted: names, see `batches.make_augment`; "none"; or "auto": flip, shift, mixup if the only input of the model
            are images (float32, four axes, 1, 3 or 4 channels, at least `LEAST_SIDE` pixels high and wide as far as
            the sizes are known), else none.

    Raises:
        RecipeError: there is no such augmentation.
    """
    if wanted == AUTO:
        wanted = FOR_IMAGES if _takes_images(graph) else NONE
    return () if wanted == NONE else make_augment(wanted).names


def finetune(
    graph: Graph,
    teacher: Graph,
    data: HeldOutSplit,
    settings: Settings,
    *,
    kept: Kept | None = None,
    frozen: Collection[str] = (),
    augment: str | Sequence[str] = AUTO,
    options: RunOptions | None = None,
) -> FineTuned:
    """Train the weights of a graph so that its outputs match those of the teacher.

    The loss is the relative squared error of the outputs plus ``settings.inner_weight`` times that of inner tensors
    (see `inner_tensors`): those entries of the teacher's tensors that the graph still has. Runs on the CPU. On one
    machine, with the same number of threads, the same samples in the same order give the same bits.

    Args:
        graph: float graph without unfused parts that torch cannot train; not changed.
        teacher: float graph with the same inputs and outputs; not changed.
        data: samples to train on, and samples that select the epoch; held in memory.
        settings: see `Settings`; the batch is one feed if the model has a fixed leading axis.
        kept: remaining entries of tensors that lost channels. Tensors without an entry are compared if they have the
            same known shape in both graphs.
        frozen: names of nodes whose constants are not trained.
        augment: see `augmentation`.
        options: threads of torch (None: torch's default), and progress, advanced at each step.

    Raises:
        ModelError: see `require_trainable` and `require_same_interface`.
        RecipeError: see `augmentation`.
        DataError: there are no samples, or no float output to compare.
    """
    require_same_interface(graph, teacher)
    module, reference = reimport(graph), reimport(teacher).eval().requires_grad_(False)
    _float32(module)
    freeze(module, graph, frozen)
    masked = keep_zeros(module)
    names = augmentation(graph, augment)
    augmenting = make_augment(names)
    inputs = {source: name for name, source in module.meta[META]["inputs"].items()}
    settings = replace(settings, freeze_norms=0.0, batch=1 if _has_fixed_batch(graph) else settings.batch)
    inner = inner_tensors(teacher, BLOCKS) if settings.inner_weight else ()
    compared = shared_tensors(inner, graph, teacher, kept)
    feeds = [_renamed(feed, inputs) for feed in data.fit.data]
    options = options or RunOptions()
    with _torch_threads(options.threads):
        selection = _Selection(module, reference, [_renamed(feed, inputs) for feed in data.judged], settings.batch)
        stopped = ""
        with Taps(module, graph, compared) as tapped, Taps(reference, teacher, compared) as target:
            objective = Objective(
                _Remaining(target, kept or {}),
                loss=with_inner(distillation, compared, settings.inner_weight) if compared else distillation,
                forward=tapped,
                augment=lambda batch, chance: _channels_last(augmenting(batch, chance)),
            )
            try:
                train(module, feeds, objective, settings, progress=options.progress, after_epoch=selection.consider)
            except NumericError as error:
                stopped = str(error)
        selection.load()
    trained = graphs.copy(graph)
    write_parameters(trained, module)
    return FineTuned(
        trained, selection.before, selection.best, selection.epoch, selection.epochs, names, masked, stopped
    )


@final
class _Selection:
    """The parameters with the least loss on hold-out samples so far.

    Attributes:
        before, best: loss of the initial and of the best parameters.
        epoch, epochs: epoch of the best parameters (0: initial), and number of completed epochs.
    """

    def __init__(self, module: fx.GraphModule, reference: fx.GraphModule, held: Sequence[Feed], size: int) -> None:
        self._module = module
        self._batches = [_channels_last(batch) for batch in ShuffledBatches(held, size, seed=0).epoch(0)]
        with torch.no_grad():
            self._targets = [reference(**batch) for batch in self._batches]
        self.epoch = self.epochs = 0
        self.before = self.best = self._loss()
        self._state = self._copy()

    def consider(self, epochs: int) -> None:
        """Compare the parameters after another epoch."""
        self.epochs = epochs
        loss = self._loss()
        if loss < self.best:
            self.best, self.epoch, self._state = loss, epochs, self._copy()

    def load(self) -> None:
        """Load the best parameters into the module."""
        self._module.load_state_dict(self._state)

    def _loss(self) -> float:
        """Compute the relative squared error of all hold-out samples at once, mean over float outputs."""
        self._module.eval()
        with torch.no_grad():
            outputs = [self._module(**batch) for batch in self._batches]
        return float(distillation(_joined(outputs), _joined(self._targets)))

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._module.state_dict().items()}


def _joined(results: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the float outputs of all batches, flattened, since shapes may differ between batches."""
    names = [name for name, value in results[0].items() if value.is_floating_point()]
    return {name: torch.cat([result[name].reshape(-1) for result in results]) for name in names}


def _channels_last(batch: Batch) -> Batch:
    """Convert images to the memory layout in which torch's convolutions are faster on CPUs (by a third, measured)."""
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in batch.items()
    }


def _renamed(feed: Feed, inputs: Mapping[str, str]) -> dict[str, Array]:
    return {inputs[name]: value for name, value in feed.items() if name in inputs}


@final
class _Remaining:
    """The teacher, with those entries of inner tensors that the pruned network has."""

    def __init__(self, teacher: Taps, kept: Kept) -> None:
        self._teacher = teacher
        self._kept = {
            name: [(axis, torch.from_numpy(places)) for axis, places in lines] for name, lines in kept.items()
        }

    def __call__(self, **batch: Tensor) -> dict[str, Tensor]:
        """Run the teacher."""
        values = self._teacher(**batch)
        for name in values.keys() & self._kept.keys():
            for axis, places in self._kept[name]:
                values[name] = values[name].index_select(axis, places)
        return values


def freeze(module: fx.GraphModule, graph: Graph, nodes: Collection[str]) -> None:
    """Exclude the constants that nodes read from training.

    Args:
        module: `graph` in torch; changed in place.
        graph: the graph.
        nodes: names of nodes.
    """
    names = {tensor.name for name, node in node_by_name(graph).items() if name in nodes for tensor in node.inputs}
    for parameter, initializer in module.meta[META]["parameters"].items():
        if initializer in names:
            module.get_parameter(parameter).requires_grad_(False)


def _takes_images(graph: Graph) -> bool:
    if len(graph.inputs) != 1 or dtype(graph.inputs[0]) != np.float32:
        return False
    dims = shape(graph.inputs[0]) or ()
    if len(dims) != 4:
        return False
    sides = dims[2:] if dims[1] in CHANNELS else dims[1:3] if dims[3] in CHANNELS else None
    return sides is not None and all(not isinstance(side, int) or side >= LEAST_SIDE for side in sides)


def _has_fixed_batch(graph: Graph) -> bool:
    """Return whether an input has a fixed leading size, so that each feed is one batch."""
    return any(isinstance(size, int) for tensor in graph.inputs for size in (shape(tensor) or ())[:1])


def _float32(module: fx.GraphModule) -> None:
    for name, value in module.named_parameters():
        if value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            where = module.meta[META]["parameters"].get(name, name)
            raise ModelError(f"weight '{where}' is {kind}: fine-tuning needs a float32 model; export it in float32")


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
