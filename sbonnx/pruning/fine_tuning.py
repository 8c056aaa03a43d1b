"""Fine-tuning after pruning: the pruned graph learns from the original one, without labels. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import divide
from sbonnx.graph import Graph
from sbonnx.graph.query import shape, tensors_by_name
from sbonnx.pruning.groups.channel_removal import restore
from sbonnx.pruning.groups.dimensions import along_axis, dependencies
from sbonnx.pruning.groups.pruning_plan import PruningPlan
from sbonnx.pruning.settings import Pruning
from sbonnx.recipe.sections.sparsity import SparseFinetune
from sbonnx.report.pruned import FineTuneRow
from sbonnx.spec import Array

HELD_OUT: Final = 0.1
"""Share of the samples on which the epoch is selected; below 64 samples, all of them (see `divide`)."""

INNER_WEIGHT: Final = 15.0
"""Weight of inner tensors in the loss: few samples say little at the outputs alone, and the network overfits them."""


def require_fine_tuning(graph: Graph, tuning: SparseFinetune) -> None:
    """Check that a graph can be fine-tuned, before the time for pruning is spent.

    Raises:
        DeviceError: torch is not installed.
        ModelError: torch cannot train the graph; the message names the node.
        RecipeError: there is no such augmentation.
    """
    from sbonnx.training.finetune import augmentation, require_trainable

    augmentation(graph, tuning.augment)
    require_trainable(graph)


def fine_tune(
    original: Graph,
    plan: PruningPlan,
    graph: Graph,
    masked: Graph,
    samples: Samples,
    settings: Pruning,
) -> tuple[Graph, Graph, FineTuneRow]:
    """Train the remaining weights of a pruned graph to reproduce the outputs of the original one.

    The masked graph gets the same values, so that it remains the definition of what the pruned graph computes.

    Args:
        original: the float graph that was pruned.
        plan: channels that were removed.
        graph: the pruned graph; not changed.
        masked: the masked graph; not changed.
        samples: of the original; a part of them selects the epoch. Other numbers of threads change the last bits.
        settings: with `finetune`; layers that are skipped are not trained.

    Returns:
        The trained pruned graph and masked graph, or the given ones if no epoch was better, and the row.

    Raises:
        DeviceError, ModelError, RecipeError: see `require_fine_tuning`.
        DataError: there are no samples.
    """
    from sbonnx.training.finetune import finetune
    from sbonnx.training.loop import Settings

    tuning = settings.finetune
    assert tuning is not None
    tuned = finetune(
        graph,
        original,
        divide(samples, HELD_OUT),
        Settings(epochs=tuning.epochs, lr=tuning.lr, inner_weight=INNER_WEIGHT),
        kept=remaining_entries(original, plan),
        frozen=[name for name, layer in settings.layers.items() if layer.skip],
        augment=tuning.augment,
        options=samples.options,
    )
    row = FineTuneRow(
        tuned.epochs, tuned.epoch, tuned.before, tuned.after, tuned.augment, len(tuned.masked), tuned.stopped
    )
    if not tuned.epoch:
        return graph, masked, row
    masked = graphs.copy(masked)
    restore(masked, plan, graph, tuned.graph)
    return tuned.graph, masked, row


def remaining_entries(graph: Graph, plan: PruningPlan) -> Mapping[str, tuple[tuple[int, Array], ...]]:
    """Return the remaining entries of each tensor that loses channels: pairs of an axis and indices along it.

    Args:
        graph: the graph before removal.
        plan: what is removed.

    Raises:
        ModelError: the plan does not fit the graph, see `Dependencies.kept`.
    """
    dependency, tensors = dependencies(graph), tensors_by_name(graph)
    keep = dependency.kept(plan)
    entries = {}
    for name, ids in dependency.ids.items():
        mask, size = keep[ids], shape(tensors[name]) if name in tensors else None
        if mask.all() or size is None:
            continue
        mask = mask.reshape((1,) * (len(size) - mask.ndim) + mask.shape)
        lines = [(axis, along_axis(mask, axis)) for axis in range(mask.ndim)]
        entries[name] = tuple((axis, np.flatnonzero(line)) for axis, line in lines if not line.all())
    return entries
