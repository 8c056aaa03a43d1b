"""`SparseModel`: pruning step by step, with the life cycle of Sparsebit's class of the same name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx import patterns
from sbonnx.backends import backend_for
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import FeedBuffer
from sbonnx.calib.engine.runner import LayerRunner, providers
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.errors import LifeCycleError, ModelError
from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.query import producer
from sbonnx.graph.storage.output_files import staged
from sbonnx.ops import LINEAR
from sbonnx.options import without_cache
from sbonnx.pipeline import prepare_pruning
from sbonnx.planning import Plan, Solution
from sbonnx.pruning.fine_tuning import require_fine_tuning
from sbonnx.pruning.graph_pruning import Pruned
from sbonnx.pruning.groups.channel_removal import restore
from sbonnx.pruning.settings import pruning_of
from sbonnx.recipe import Recipe, load
from sbonnx.recipe.sections.sparsity import SparseFinetune
from sbonnx.recipe.sections.whole import PRUNING_FORMS
from sbonnx.spec import Array
from sbonnx.stages.channel_pruning import SAME, prune, removal_error
from sbonnx.stages.state import Prepared, Source, run_options

if TYPE_CHECKING:
    from typing_extensions import Self

Feeds = Mapping[str, Any] | Array

BEFORE_ADD: Final = "disable_sparse_before_add"


class SparseModel:
    """A float model that is pruned step by step.

        with sbonnx.SparseModel("resnet.onnx", "sconfig.yaml") as model:
            model.disable_sparse_before_add()
            model.set_ratio("fc*", 0.0)
            model.prepare_calibration()
            for feeds in samples:
                model(feeds)
            model.calc_params()
            scores = model(feeds)
            model.export_onnx("small.onnx")

    `init_finetune` returns the pruned network as a torch module, to train it before the export.

    The graph is simplified and fused at construction. Calling the model runs it: in float until `calc_params`, then
    masked, as the exported file computes. Between `prepare_calibration` and `calc_params` each call also records its
    feeds. Holds onnxruntime sessions; use it as a context manager or call `close`.

    Args:
        model: path or ModelProto. It is never modified.
        config: recipe with the section SPARSE, or Sparsebit's SPARSER: path, nested dict or `Recipe`.
        overrides: recipe keys by keyword, see `sbonnx.prune`.

    Attributes:
        pruned: the result of `calc_params`; None before.

    Raises:
        ModelError, RecipeError: see `sbonnx.prune`.
    """

    def __init__(self, model: Source, config: Any = None, **overrides: Any) -> None:
        keys = {PRUNING_FORMS.get(name, name): value for name, value in overrides.items()}
        self._recipe = load(config, overrides=keys)
        self._state = prepare_pruning(model, self._recipe)
        self._graph = self._state.prepared.graph
        self.pruned: Pruned | None = None
        self._fed: FeedBuffer | None = None
        self._runner: LayerRunner | None = None
        self._trained: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the session and the recorded feeds. The model can still be used; a session is reopened on demand."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        if self._fed is not None:
            self._fed.close()
            self._fed = None

    def to(self, device: Any) -> Self:
        """Run on another device: "cpu", "cuda", "cuda:1", or a torch.device.

        Raises:
            DeviceError: the device is not available.
        """
        providers(str(device))
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._recipe = self._recipe.on_device(str(device))
        if self._trained is not None:
            self._trained.to(device)
        return self

    def cuda(self, device: int | None = None) -> Self:
        """Run on a GPU, by default the first one. Raises: as `to`."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def cpu(self) -> Self:
        """Run on the CPU."""
        return self.to("cpu")

    # --- what is pruned -----------------------------------------------------------------------------

    def set_ratio(self, pattern: str, ratio: float) -> None:
        """Set the share of the output channels to remove from the layers that a pattern matches; the last call wins.

        Args:
            pattern: nodes by name, wildcards allowed: see docs/recipe.md.
            ratio: 0 to 1; 0 keeps all channels.

        Raises:
            LifeCycleError: the channels were chosen already.
            RecipeError: the pattern matches no node, or the ratio is out of range.
        """
        self._add_entries([{pattern: {"RATIO": ratio}}], "set_ratio")

    def disable_sparse_before_add(self) -> tuple[str, ...]:
        """Keep all output channels of the layers whose outputs reach an Add before another layer; return their names.

        Raises:
            LifeCycleError: the channels were chosen already.
        """
        layers = tuple(dict.fromkeys(name for node in self._graph.nodes for name in _layers_before(node)))
        assert self._state.original is not None
        names = {node.name for node in self._state.original.nodes}
        self._add_entries([{f"node:{name}": {"RATIO": 0.0}} for name in layers if name in names], BEFORE_ADD)
        return layers

    def _add_entries(self, entries: Sequence[Mapping[str, Any]], step: str) -> None:
        """Put entries before those of SPARSE.SPECIFIC."""
        if self.pruned is not None:
            raise LifeCycleError(f"call {step}() before calc_params(); prepare_calibration() begins again")
        before = self._recipe.to_dict()["SPARSE"]["SPECIFIC"]
        recipe = load(self._recipe, overrides={"SPARSE.SPECIFIC": [*entries, *before]})
        self._resolved(recipe)
        self._recipe = recipe

    def _resolved(self, recipe: Recipe | None = None) -> Recipe:
        """Return the recipe with its patterns resolved."""
        original = self._state.original
        assert original is not None
        return (recipe or self._recipe).for_model(original.nodes, original.tensors)[0]

    # --- running ------------------------------------------------------------------------------------

    def __call__(self, feeds: Feeds) -> dict[str, Array]:
        """Run the model on arrays by input name, or on one array, and return its outputs by name.

        After `calc_params`: the masked network; after `init_finetune`: the torch module.

        Raises:
            DataError: the feeds do not fit the model.
        """
        feed = next(iter(datasets.read([feeds], self._graph)))
        if self._fed is not None and self.pruned is None:
            self._fed.add(feed)
        if self._trained is not None:
            from sbonnx.qat.workflow import run_module

            outputs = run_module(self._trained, feed, gradients=False)
            return {name: value.cpu().numpy() for name, value in outputs.items()}
        if self._runner is None:
            graph = self._graph if self.pruned is None else self.pruned.masked
            self._runner = LayerRunner(graph, device=self._recipe.device)
        wanted = [tensor.name for tensor in self._graph.outputs]
        values = self._runner.run(feed, wanted, where="this feed")
        return {name: np.array(values[name]) for name in wanted}

    def prepare_calibration(self) -> None:
        """Begin to record feeds, and discard what `calc_params` made."""
        self.close()
        self.pruned = self._trained = None
        self._fed = FeedBuffer(self._graph)

    def calc_params(self) -> Pruned:
        """Choose the channels to remove and refit the remaining weights on the recorded feeds.

        Without feeds, norms of weights decide and nothing is refitted.

        Raises:
            LifeCycleError: the channels were chosen already.
            RecipeError, DataError, ModelError: see `sbonnx.prune`.
        """
        if self.pruned is not None:
            raise LifeCycleError("calc_params() was called already; prepare_calibration() begins again")
        recipe = self._resolved()
        data = self._fed.dataset() if self._fed is not None and self._fed.count else None
        prepared = replace(self._state.prepared, graph=graphs.copy(self._graph), recipe=recipe)
        options = without_cache(run_options(recipe))
        split = None if data is None else HeldOutSplit.whole(Samples.of(data, self._graph, options))
        state = replace(self._state, prepared=prepared, data=split)
        removed = prune(state, options).removed
        assert removed is not None
        worst = 0.0 if data is None else removal_error(removed, data)
        if worst > SAME:
            raise ModelError(f"removing channels differs from masking them by {worst:.1e}: please report this model")
        self.close()
        self.pruned = removed
        return removed

    def _chosen(self, step: str) -> Pruned:
        if self.pruned is None:
            raise LifeCycleError(f"call calc_params() before {step}()")
        return self.pruned

    # --- training -----------------------------------------------------------------------------------

    def init_finetune(self, *, device: str | None = None) -> Any:
        """Convert the pruned model to a torch module that learns from the original one; see `sbonnx.qat.train`.

        From here on feeds run through the module, and `export_onnx` writes its values. Weights that are zero stay
        exactly zero. Layers with SKIP are not trained.

        Args:
            device: torch device; default: the device of the recipe.

        Returns:
            The `torch.nn.Module`.

        Raises:
            LifeCycleError: `calc_params` was not called.
            DeviceError: torch is not installed.
            ModelError: torch cannot train the graph (the message names the node), or a weight is not float32.
        """
        pruned, recipe = self._chosen("init_finetune"), self._resolved()
        self._trained = None
        require_fine_tuning(pruned.graph, SparseFinetune(0))
        from sbonnx.qat.module import set_teacher, trainable
        from sbonnx.training.finetune import freeze

        prepared = Prepared(pruned.graph, Plan(()), recipe, backend_for(recipe.backend, recipe.version))
        module = trainable(prepared, Solution({}, {}, {}), device=device or recipe.device, zeros=0.0)
        layers = pruning_of(recipe, self._graph).layers
        freeze(module, pruned.graph, [name for name, layer in layers.items() if layer.skip])
        original = graphs.copy(self._graph)
        patterns.apply(original, patterns.FUSE)
        set_teacher(module, original)
        self._trained = module
        return module

    def _graphs(self, step: str) -> tuple[Graph, Graph]:
        """Return the pruned and the masked graph, with the trained values."""
        pruned = self._chosen(step)
        if self._trained is None:
            return pruned.graph, pruned.masked
        from sbonnx.qat.workflow import learned

        trained, masked = learned(self._trained)[0].graph, graphs.copy(pruned.masked)
        restore(masked, pruned.plan, pruned.graph, trained)
        return trained, masked

    # --- export -------------------------------------------------------------------------------------

    def export_onnx(self, path: str | os.PathLike[str], *, masked: bool = False, force: bool = False) -> Path:
        """Write the pruned model, with the values of the module of `init_finetune` if there is one.

        Args:
            path: target file.
            masked: keep the shapes: weights that read removed channels are zero.
            force: overwrite an existing file.

        Raises:
            LifeCycleError: `calc_params` was not called.
            NumericError: training made a weight NaN or infinite.
            OutputError, ModelError: the file cannot be written, or is not valid. No partial file is left.
        """
        small, same_shapes = self._graphs("export_onnx")
        graph, target = same_shapes if masked else small, Path(path)
        with staged(target, self._graph.info.files, force=force) as file:
            graphs.save(graph, file)
            graphs.check_file(file)
        return target


def _layers_before(add: Node) -> Iterator[str]:
    """Yield the names of the linear layers that an Add of two activations reads, directly or through other nodes."""
    if add.op != "Add" or any(isinstance(tensor, Constant) for tensor in add.inputs):
        return
    pending, seen = list(add.inputs), set[int]()
    while pending:
        maker = producer(pending.pop())
        if maker is None or id(maker) in seen:
            continue
        seen.add(id(maker))
        if maker.op in LINEAR:
            yield str(maker.name)
        else:
            pending += maker.inputs
