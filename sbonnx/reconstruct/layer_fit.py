"""Layer-wise weight fitting by input moments: codes, scales, and biases that compensate the mean error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.calib.cache.rounded_weights import RoundedWeights
from sbonnx.calib.qparams.safe_scales import limits_for
from sbonnx.calib.qparams.solve import scale_type
from sbonnx.calib.quantized.stream_state import QuantState
from sbonnx.errors import NumericError
from sbonnx.graph import Graph
from sbonnx.moments import (
    HELD,
    Compensation,
    Means,
    Moments,
    compensation_of,
    rows_a_sample,
    shift_gains,
    shrinkage_of,
)
from sbonnx.planning.types import Gain, Plan, RoundingChoice, Site
from sbonnx.recipe.sections.base import parameter
from sbonnx.recipe.sections.stages import MomentsOf
from sbonnx.reconstruct.layer_inputs import WHAT, Layer, Seen, Watched, WatchedMeans, watched
from sbonnx.reconstruct.stored_layers import restore_layer, stored_layer
from sbonnx.report import Note, Reason, Refusal
from sbonnx.rounding import ROUNDERS, make_rounder
from sbonnx.rounding.base import kept_zeros
from sbonnx.rounding.output_slices import joined, output_slices, round_in_slices
from sbonnx.rounding.range_search import search_bounds
from sbonnx.spec import Array, Bounds, QParams

NEVER_REACHED: Final = Reason(
    "expert-never-reached", "the router sent no row of the calibration data to it: its weight goes to the nearest codes"
)

STEPS: Final = 256
"""The resolution of an input is its range over this number, whatever its width."""


class Reconstruction(MomentsOf):
    """Options of layer-wise weight reconstruction: CALIBRATION.MOMENTS, with the number of samples resolved.

    The share is that of `Moments.towards`; None: the share of least error on a hold-out set, see `share_of`.

    Attributes:
        correct: correct biases that belong to one layer by the mean output shift that rounding causes.
        seed: of the row picks.
    """

    correct: bool = parameter(True)
    seed: int = parameter(0)

    @property
    def quantized(self) -> bool:
        """Whether inputs come from the quantized network: all layers before are quantized."""
        return self.inputs == "quantized"

    @property
    def holds_out(self) -> bool:
        """Whether some samples are accumulated separately as a hold-out set."""
        return self.quantized and self.share is None


def gain_notes(gains: Mapping[str, Gain]) -> list[Note]:
    """Summarize how much of the layers' errors each input-aware rounding left, one sentence for each method."""
    sentences: list[Note] = []
    for name in dict.fromkeys(gain.rounding for gain in gains.values()):
        left = [gain.loss / gain.nearest for gain in gains.values() if gain.rounding == name and gain.nearest > 0]
        if left:
            sentences.append(
                Note(
                    "rounding-gain",
                    f"{len(left)} weights rounded by {name}: the error of a layer is {np.median(left):.3g} of what the "
                    f"nearest codes make (median; {min(left):.3g} to {max(left):.3g})",
                )
            )
    return sentences


@dataclass
class LayerFitter:
    """Rounds the weight of each layer as soon as its moments are complete.

    Attributes:
        graph, plan, floats: see `QuantState`.
        options: of the reconstruction.
        samples: number of samples.
        stored: layers of an interrupted run; None: there is no cache.
        numbers: results so far.
        gains: by site key.
        refusals: layers without usable input statistics.
    """

    graph: Graph
    plan: Plan
    floats: Mapping[str, Bounds]
    options: Reconstruction
    samples: int
    stored: RoundedWeights | None = None
    numbers: QuantState = field(init=False)
    gains: dict[str, Gain] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = QuantState(self.graph, self.plan, self.floats, self._round)
        self._moments: dict[str, Moments] = {}  # by key of the weight's site, of the current layers

    def watch(self, layers: Sequence[Layer]) -> list[Seen]:
        """Create accumulators for these layers, shared by all layers that read the same tensor the same way.

        Layers that an interrupted run has rounded are restored and need none.
        """
        return watched(
            [layer for layer in layers if not self._restored(layer)],
            two_streams=self.options.quantized,
            hold_out=-(-self.samples // HELD) if self.options.holds_out else 0,
            rows=self._rows,
            resolution=self._resolution,
            seed=self.options.seed,
        )

    def _rows(self, layer: Layer) -> int | None:
        """Return the number of rows per sample that a layer uses; None: all."""
        if not self.options.rows:
            return None
        return rows_a_sample(layer.layout.inputs, self.samples * len(layer.uses), self.options.rows)

    def _resolution(self, layer: Layer) -> float | None:
        """Return the error of the input of a layer that counts as none; None if the input is not quantized."""
        qparams = None if layer.reads is None else self.numbers.params(layer.reads)
        if qparams is None:
            return None
        limits = qparams.limits
        return float(np.max(limits.hi - limits.lo)) / STEPS

    def take(self, sums: Sequence[Seen]) -> None:
        """Round the weights of layers whose moments are complete, and correct their biases."""
        for layer_sums in sums:
            choices = [self._choice(layer_sums, layer) for layer in layer_sums.layers]
            if isinstance(layer_sums, Watched):
                layer_sums.alike = len({(chosen.centred, chance) for chosen, chance in choices}) == 1
            for layer, choice in zip(layer_sums.layers, choices, strict=True):
                if layer.gate is not None and not layer_sums.means(layer).rows:
                    self.refusals.append(Refusal(WHAT, layer.node.name, NEVER_REACHED))
                    continue
                try:
                    self._take(layer_sums, layer, choice)
                    self._store(layer)
                except NumericError as error:
                    why = Reason("moments-failed", f"{error}: its weight goes to the nearest codes")
                    self.refusals.append(Refusal(WHAT, layer.node.name, why))
                self._moments.pop(layer.site.key, None)
            layer_sums.release()

    def _restored(self, layer: Layer) -> bool:
        """Restore a layer from the cache; return whether it was there."""
        stored = None if self.stored is None else self.stored.load(layer.key)
        if stored is not None:
            restore_layer(self.numbers, self.gains, layer, stored)
        return stored is not None

    def _store(self, layer: Layer) -> None:
        """Store a rounded layer in the cache."""
        arrays = {} if self.stored is None else stored_layer(self.numbers, self.gains, layer)
        if arrays and self.stored is not None:
            self.stored.save(layer.key, arrays)

    def _choice(self, one: Seen, layer: Layer) -> tuple[Compensation, float]:
        """Return what a layer compensates, and by how much its correlations shrink: by parts of the moments."""
        corrects = layer.bias is not None
        chosen, chance = Compensation(self.options.share or 0.0, corrects), 0.0
        if isinstance(one, WatchedMeans):
            return chosen, chance
        fit, held = one.parts(layer)
        if not all(_finite(part.means) for part in (fit, held) if part is not None):
            return chosen, chance
        pairs = [] if one.rows is None else one.rows.pairs()
        if pairs:
            weight = fit.layout.matrices(self.numbers.weight(layer.site))
            chosen = compensation_of(weight, fit, pairs, bias=corrects)
        if held is not None and fit.rows:
            # with all samples, noise is lower in proportion to the number of rows
            chance = shrinkage_of(fit, held, centred=chosen.centred) * (fit.rows / (fit.rows + held.rows))
        return chosen, chance

    def _take(self, one: Seen, layer: Layer, choice: tuple[Compensation, float]) -> None:
        means = one.means(layer)
        if means.rows == 0:
            raise NumericError("its inputs were never computed")
        if not _finite(means):
            raise NumericError("its inputs hold NaN or infinite values")
        corrects = layer.bias is not None
        if isinstance(one, Watched):
            chosen, chance = choice
            self._moments[layer.site.key] = one.moments(
                layer, centred=chosen.centred, share=chosen.share, shrunk=chance
            )
            corrects = chosen.centred
        self.numbers.codes_of(layer.site)
        if corrects:
            held = one.rows.pairs() if isinstance(one, WatchedMeans) and one.rows is not None else []
            self._correct(layer, means, held)

    def fake_quant(self, site: Site | None, value: Array) -> Array:
        """Quantize and dequantize an activation as the layer reads it in the quantized stream."""
        qparams = None if site is None else self.numbers.params(site)
        return value if qparams is None else qparams.fake_quant(value).astype(value.dtype)

    def _round(self, site: Site, weight: Array, qparams: QParams) -> tuple[Array, QParams]:
        """Round a weight (a `RoundSite`) by its moments if available, else to nearest."""
        if site.key not in self._moments:
            return qparams.quantize(weight), qparams
        moments, choice = self._moments[site.key], site.rounding
        free = site.fixed is None and self.numbers.members(site) == 1
        if choice.scale == "search" and free:
            tensor = self.numbers.tensors[site.tensor]
            slices, given = list(output_slices(moments.layout, qparams)), self.numbers.bounds[site.key]
            parts = [
                search_bounds(
                    weight[output_slice.index],
                    site.spec,
                    Bounds(np.asarray(given.lo[output_slice.scales]), np.asarray(given.hi[output_slice.scales])),
                    moments.with_layout(output_slice.layout),
                    self.plan.scale_rule,
                    by="nearest" if choice.name == "nearest" else "gptq",
                    scale_dtype=scale_type(tensor, self.plan),
                    least=limits_for(self.plan, tensor).least,
                )
                for output_slice in slices
            ]
            ends = ([getattr(part, end) for part in parts] for end in ("lo", "hi"))
            self.numbers.limit(site, Bounds(*(joined(slices, end, scales=True) for end in ends)))
            qparams = self.numbers.params(site) or qparams
        rounder = ROUNDERS[choice.name]
        if (rounder.moves_scales and not free) or (not rounder.keeps_zeros and kept_zeros(weight) is not None):
            choice = RoundingChoice("gptq")
        rounded = round_in_slices(make_rounder(choice.name, choice.arguments), weight, qparams, moments)
        if rounded.loss is not None and rounded.nearest is not None:
            self.gains[site.key] = Gain(choice.name, rounded.loss, rounded.nearest)
        return rounded.codes, rounded.qparams

    def _correct(self, layer: Layer, means: Means, held: Sequence[tuple[Array, Array]]) -> None:
        """Add the mean error to the bias, unless typical ones of the rows `held` lose by it."""
        codes, qparams = self.numbers.codes.get(layer.site.key), self.numbers.params(layer.site)
        if layer.bias is None or codes is None or qparams is None:
            return
        layout = means.layout
        weights = layout.matrices(self.numbers.weight(layer.site)), layout.matrices(qparams.dequantize(codes))
        error = means.mean_error(*weights)
        if held and not shift_gains(*weights, error, held, pooled=bool(layout.kernel)):
            return
        shift, values = error.reshape(-1), np.asarray(layer.bias.values)
        self.numbers.constants[layer.bias.name] = (
            (values.reshape(-1) + shift).reshape(values.shape).astype(values.dtype)
        )


def _finite(means: Means) -> bool:
    """Return whether all means are finite."""
    return bool(np.isfinite(means.mean).all() and np.isfinite(means.mean_quantized).all())
