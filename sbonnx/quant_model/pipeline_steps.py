"""`PipelineSteps`: the pipeline step by step, from a float model to calibrated scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sbonnx import patterns
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import FeedBuffer
from sbonnx.calib.engine.runner import providers
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.calib.quantized.forward import Forward
from sbonnx.calib.sketches import Sketch
from sbonnx.correct.batchnorm_tuning import Reference, tune_norms
from sbonnx.errors import DataError, LifeCycleError, RecipeError
from sbonnx.options import without_cache
from sbonnx.pipeline import MEASURE, prepare, run
from sbonnx.planning import Solution
from sbonnx.quant_model.layer_access import Side, Switch, switched, with_keys, with_ranges
from sbonnx.recipe import Recipe
from sbonnx.recipe.torch_modules import ModuleCall
from sbonnx.reconstruct.solution import QuantizedInputs
from sbonnx.spec import Array
from sbonnx.stages.measure import tune_batchnorms
from sbonnx.stages.state import PipelineState, Prepared, Request, Source, read_recipe, rounding_of, run_options

if TYPE_CHECKING:
    from typing_extensions import Self

Feeds = Mapping[str, Array] | Array

FUSED_AWAY: Final = "disable_unnecessary_quant"
"""The ancestor's fusion that is a placement rule here: SCHEDULE.DISABLE_UNNECESSARY_QUANT."""


CALC_QPARAMS: Final = tuple(stage for stage in MEASURE if stage is not tune_batchnorms)
"""Stages of `calc_qparams`; batch norms are tuned by `batchnorm_tuning`."""


class PipelineSteps:
    """Calibration and the simulated forward; see `QuantModel`."""

    def __init__(
        self,
        model: Source,
        config: Any = None,
        *,
        backend: str | None = None,
        custom_fuse_list: Sequence[str] | None = None,
        **overrides: Any,
    ) -> None:
        fusions = None if custom_fuse_list is None else _checked_fusions(custom_fuse_list)
        if fusions is not None and FUSED_AWAY not in fusions:
            overrides = {f"SCHEDULE.{FUSED_AWAY.upper()}": False} | overrides
        recipe, rules = read_recipe(config, backend, overrides)
        if recipe.mode == "dynamic":
            why = "the scales of activations are computed as the exported file runs"
            raise RecipeError(f"QuantModel cannot simulate MODE: dynamic, {why}. Use sbonnx.quantize, run its result")
        if recipe.sparse.wanted:
            why = "it would have to read data first. Prune by sbonnx.prune or sbonnx.SparseModel, and open the result"
            raise RecipeError(f"QuantModel cannot prune (SPARSE), {why}")
        self._model = model
        self._rules = rules
        self._fusions = fusions
        self._prepared = prepare(model, recipe, rules, fusions=fusions)
        self._changed: Recipe | None = None
        self.solution: Solution | None = None
        self._calibrator: Calibrator | None = None
        self._fed: FeedBuffer | None = None
        self._tuning: FeedBuffer | None = None
        self._quant = (False, False)
        self._switches: dict[Switch, bool] = {}
        self._observed: dict[tuple[Side, str], Sketch] = {}  # by single quantizers
        self._forward: Forward | None = None

    @property
    def prepared(self) -> Prepared:
        """Graph and plan. After a recipe change both are rebuilt first, and the recorded feeds are observed again."""
        if self._changed is not None:
            self._prepared = prepare(self._model, self._changed, self._rules, fusions=self._fusions)
            self._changed = None
            self._observe_again()
        return self._prepared

    def _change_recipe(self, recipe: Recipe) -> None:
        """Use another recipe from here on. Planning is deferred, so that several changes are planned once."""
        self._changed = recipe
        self._close_forward()

    def _move(self, device: str) -> None:
        """Run on another device from here on.

        Raises:
            DeviceError: the device is not available.
        """
        providers(device)
        self._close_forward()
        if self._changed is not None:
            self._changed = self._changed.on_device(device)
        else:
            self._prepared = replace(self._prepared, recipe=self._prepared.recipe.on_device(device))
            self._observe_again()

    @property
    def _recipe(self) -> Recipe:
        """The recipe including pending changes."""
        return self._changed or self._prepared.recipe

    def _new_calibrator(self) -> Calibrator:
        prepared = self._prepared
        return Calibrator(prepared.graph, prepared.plan, without_cache(run_options(prepared.recipe)))

    def _samples(self, fed: FeedBuffer) -> Samples:
        """Return recorded feeds as samples of the prepared model."""
        return Samples.of(fed.dataset(), self._prepared.graph, run_options(self._prepared.recipe))

    def _observe_again(self) -> None:
        """Replace the calibrator by one for the current graph and plan, and observe the recorded feeds again."""
        if self._calibrator is None or self._fed is None:
            return
        self._calibrator.close()
        self._calibrator = self._new_calibrator()
        if self._fed.count:
            self._calibrator.observe_all(self._samples(self._fed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all sessions and recorded feeds. The model can still be used; sessions are reopened on demand."""
        self._close_forward()
        if self._calibrator is not None:
            self._calibrator.close()
            self._calibrator = None
        if self._fed is not None:
            self._fed.close()
            self._fed = None
        if self._tuning is not None:
            self._tuning.close()
            self._tuning = None

    def _close_forward(self) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = None

    def _feeds(self, feeds: Feeds) -> dict[str, Array]:
        return next(iter(datasets.read([feeds], self.prepared.graph)))

    # --- calibration --------------------------------------------------------------------------------

    def prepare_calibration(self) -> None:
        """Reset the observers and start observing.

        Until `calc_qparams`, feeds are buffered (beyond 64 MiB on disk), because ``asym`` runs them again.
        """
        self.close()
        self.solution = None
        self._quant = (False, False)
        self._switches = {}
        self._observed = {}
        self._fed = FeedBuffer(self.prepared.graph)
        self._calibrator = self._new_calibrator()

    def calc_qparams(self, asym: bool = False, w_quant: bool = False, a_quant: bool = False) -> Solution:
        """Compute scales, zero points and quantized weights from the recorded feeds.

        Args:
            asym: run the recorded feeds once more, layer by layer, with all upstream layers quantized. The ranges of
                activations are measured on these quantized inputs (in the ancestor only AdaRound used them, and ranges
                came from the float network: CALIBRATION.ASYM.RANGES: false), and weights are rounded on them.
            w_quant, a_quant: what `asym` quantizes upstream: weights, activations. If both are False, `asym` has no
                effect.

        Raises:
            LifeCycleError: `prepare_calibration` was not called.
            DataError: there are no recorded feeds.
            NumericError: NaN or Inf in an activation or weight.
        """
        prepared = self.prepared
        measured = prepared.needs_data or (self._fed is not None and self._fed.count > 0)
        if measured and (self._calibrator is None or self._fed is None):
            raise LifeCycleError("call prepare_calibration() and run some samples before calc_qparams()")
        state = PipelineState(Request(self._model, prepared.recipe, self._rules), prepared)
        if measured and self._fed is not None and self._calibrator is not None:
            if not self._fed.count:
                raise DataError("nothing was observed: calibration needs at least one feed")
            split = HeldOutSplit.whole(self._samples(self._fed).uncached)
            state = replace(state, data=split, ranges=self._calibrator.ranges())
            self._calibrator.close()
        rounding, section = rounding_of(prepared), prepared.recipe.calibration.asym
        if asym:
            rounding = replace(rounding, inputs=QuantizedInputs(w_quant, a_quant, section.ranges, section.rounding))
        elif rounding.reconstruction is None:
            rounding = replace(rounding, inputs=None)
        state = run(CALC_QPARAMS, replace(state, rounding=rounding), without_cache(run_options(prepared.recipe)))
        self.close()
        self._prepared, self.solution = state.prepared, state.solution
        return self.solution

    @contextmanager
    def batchnorm_tuning(self, reference: Reference = "float") -> Iterator[None]:
        """Re-estimate batch norm statistics of the quantized network from the feeds run inside the with block.

            with model.batchnorm_tuning():
                for feeds in samples:
                    model(feeds)

        Everything before a batch norm is quantized and tuned when it is measured, regardless of `set_quant`. Scales of
        weights and biases change, quantized weights do not. If the block raises, nothing changes.

        Args:
            reference: "float": match the mean and variance of the float network on the same feeds; "norm": match those
                implied by gamma and beta, as in the ancestor. The latter also treats the difference between the feeds
                and the training data as an error.

        Raises:
            LifeCycleError: there are no scales yet.
            DataError: there are no recorded feeds.
            NumericError: see `tune_norms`.
        """
        solution = self._solved("batchnorm_tuning")
        self._tuning = kept = FeedBuffer(self.prepared.graph)
        try:
            yield
            tuned = tune_norms(
                self.prepared.graph,
                self.prepared.plan,
                solution,
                self._samples(kept),
                reference=reference,
            )
        finally:
            kept.close()
            self._tuning = None
        self.solution = tuned
        self.set_quant(*self._quant)

    # --- running ------------------------------------------------------------------------------------

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch fake quantization of weights and activations in the simulated forward.

        Raises:
            LifeCycleError: there are no scales yet.
        """
        if (w_quant or a_quant) and self.solution is None:
            raise LifeCycleError("call calc_qparams() before set_quant(): there are no scales yet")
        self._close_forward()
        self._quant = (w_quant, a_quant)
        self._switches = {}

    def _run(self, feeds: Feeds, tensors: Sequence[str] = ()) -> dict[str, Array]:
        """Return outputs and inner tensors (before their own rounding) by name; during calibration also observe."""
        values = self._feeds(feeds)
        if self._tuning is not None:
            self._tuning.add(values)
        outputs: dict[str, Array] = {}
        if self._calibrator is not None and self._fed is not None:
            outputs = dict(self._calibrator.observe(values))
            self._fed.add(values)
        if tensors:
            with self._open_forward(tensors) as run:
                return run(values)
        if outputs:
            return outputs
        if self._forward is None:
            self._forward = self._open_forward()
        return self._forward(values)

    def _open_forward(self, tensors: Iterable[str] = ()) -> Forward:
        w_quant, a_quant = self._quant
        plan = self.prepared.plan
        if self._switches:
            plan, w_quant, a_quant = switched(plan, self._quant, self._switches)
        solution = self.solution or Solution({}, {}, {})
        return Forward(
            self.prepared.graph,
            plan,
            solution,
            w_quant=w_quant,
            a_quant=a_quant,
            device=self.prepared.recipe.device,
            tensors=list(tensors),
        )

    def _set_keys(self, layer: ModuleCall, side: Side, keys: dict[str, Any]) -> None:
        """Change the recipe for one side of a layer.

        Raises:
            LifeCycleError: there are scales already, computed with the old recipe.
            RecipeError: the backend does not support it.
        """
        if self.solution is not None:
            raise LifeCycleError(
                f"change '{layer.name}' before calc_qparams(), or after prepare_calibration(): its scales are there"
            )
        self._change_recipe(with_keys(self, layer.nodes, side, keys))

    def _set_ranges(self, layer: ModuleCall, ranges: Mapping[str, tuple[float, float]]) -> None:
        """Fix the ranges of tensors that a layer reads.

        Raises:
            LifeCycleError: there are scales already.
        """
        if self.solution is not None:
            raise LifeCycleError(
                f"set the range of '{layer.name}' before calc_qparams(), or after prepare_calibration()"
            )
        self._change_recipe(with_ranges(self._recipe, ranges))

    def _switch(self, layer: ModuleCall, side: Side, *, on: bool) -> None:
        """Switch one quantizer of the simulated forward.

        Raises:
            LifeCycleError: there are no scales yet.
        """
        self._solved(f"{layer.name}.{side}_quantizer.{'enable' if on else 'disable'}_quant")
        self._switches |= {(side, node): on for node in layer.nodes}
        self._close_forward()

    def _solved(self, step: str) -> Solution:
        if self.solution is None:
            raise LifeCycleError(f"call calc_qparams() before {step}(): there are no scales yet")
        return self.solution


def _checked_fusions(names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of a custom_fuse_list.

    Raises:
        RecipeError: unknown fusion.
    """
    fusions = [*(pattern.name for pattern in patterns.FUSE), FUSED_AWAY]
    for name in names:
        if name not in fusions:
            raise RecipeError(f"custom_fuse_list: there is no fusion '{name}'; there are: {', '.join(fusions)}")
    return tuple(names)
