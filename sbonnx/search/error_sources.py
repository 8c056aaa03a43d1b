"""Sources of the error of a finished run: weights or activations, and the layers that are sensitive."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Final, Literal

from sbonnx.calib.quantized.forward import Forward
from sbonnx.metrics.pairs import run_pairs
from sbonnx.profiling import Candidate, WalkOptions, sensitivity
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FLOAT
from sbonnx.search.bit_groups import energy
from sbonnx.stages.state import PipelineState

FEEDS: Final = 4
"""Feeds on which the errors of weights, activations and single layers are measured."""

DOMINATES: Final = 4.0
"""One side is to blame if its error energy is larger than that of the other by this factor, and the other is `GOOD`."""

GOOD: Final = 10**-1.4
"""Error energy, relative to that of the outputs, up to which a side may stay as it is: 14 dB."""

MOST_LAYERS: Final = 200
"""Maximum number of layers for the search for sensitive ones, whose time is quadratic in layers."""

STAND_OUT: Final = 0.75
"""Share of the error energy of all layers that a few layers must have to be sensitive ones."""

FEW_LAYERS: Final = 0.1
"""Maximum share of the layers that are left in float, and at least `MIN_LAYERS`."""

MIN_LAYERS: Final = 3

Side = Literal["weights", "activations", "both"]


def width_of(recipe: Recipe, side: Literal["w", "a"]) -> int:
    """Return the width of a side, 0 if it is float."""
    if side == "a" and recipe.mode == "weight_only":
        return FLOAT
    section = recipe.w.quantizer if side == "w" else recipe.a.quantizer
    return FLOAT if section.disable else section.bit


def blame(state: PipelineState, weights: int, activations: int) -> tuple[Side, bool]:
    """Return the side that makes the larger error, by `DOMINATES`, and whether each side alone loses too much."""
    if not (weights and activations):
        return ("weights" if weights else "activations"), False
    by_weights, by_activations = side_energies(state)
    if min(by_weights, by_activations) > GOOD:
        return "both", True
    if by_weights > DOMINATES * by_activations:
        return "weights", False
    return ("activations" if by_activations > DOMINATES * by_weights else "both"), False


def side_energies(state: PipelineState) -> tuple[float, float]:
    """Return the error energy of the worst output with weights quantized alone, and with activations alone.

    It is relative to the energy of the float output.
    """
    prepared, device = state.prepared, state.prepared.recipe.device
    network = (prepared.graph, prepared.plan, state.solution)
    with (
        Forward(*network, w_quant=False, a_quant=False, device=device) as plain,
        Forward(*network, a_quant=False, device=device) as weights,
        Forward(*network, w_quant=False, device=device) as activations,
    ):
        samples = islice(_judged(state).items(), FEEDS)
        sides = run_pairs(plain, (weights, activations), samples, plain.outputs)
    by_weights, by_activations = (
        max((output.relative for output in side.result()), default=math.inf) for side in sides
    )
    return by_weights, by_activations


def sensitive_layers(state: PipelineState) -> tuple[str, ...]:
    """Return the few layers that make most of the error at the outputs when each is quantized alone; () if none do."""
    prepared, solution = state.prepared, state.solution
    layers = {reader.node for site in prepared.plan.sites for reader in site.readers if not site.scope}
    if not layers or len(layers) > MOST_LAYERS:
        return ()
    here = Candidate(width_of(prepared.recipe, "w") or None, width_of(prepared.recipe, "a") or None)
    options = WalkOptions(limit=FEEDS, device=prepared.recipe.device)
    sensitivities = sensitivity(
        prepared.graph,
        prepared.plan,
        solution,
        [here],
        _judged(state),
        network=True,
        solved={here: (prepared.plan, solution)},
        options=options,
    )
    losses = sorted(
        ((energy(row), row.layer) for row in sensitivities.rows if row.network_loss is not None), reverse=True
    )
    total = sum(loss for loss, _ in losses)
    if not losses or not 0 < total < math.inf:
        return ()
    chosen, covered = [], 0.0
    for loss, name in losses[: max(MIN_LAYERS, int(FEW_LAYERS * len(losses)))]:
        chosen.append(name)
        covered += loss
        if covered >= STAND_OUT * total:
            return tuple(chosen)
    return ()


def _judged(state: PipelineState) -> Any:
    assert state.data is not None
    return state.data.judged
