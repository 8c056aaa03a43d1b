"""Choice of the few activations that get a wider type where the outputs of the narrow one would be lost.

The error at the outputs of each activation alone is measured in simulated quantization, with the scales that were
solved: one session, in which every pair can be switched on and off. Errors of single activations are assumed to add up.
An error disappears if the units at both ends are wide. From all units wide, the one whose error is smallest for the
number of activations that it writes is made narrow again and again; of the sets on this way, the smallest whose outputs
reach `GOOD_DB` together is taken, else the largest within the share of activations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sbonnx.backends.base import WideTypes
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.quantized.switched_network import SwitchedNetwork
from sbonnx.graph import Graph, query
from sbonnx.planning.override_file import TensorOverride
from sbonnx.planning.types import Plan, Solution
from sbonnx.precision.node_units import NodeUnits, UnitEdge
from sbonnx.report import Note

SAMPLES: Final = 2
"""Samples on which errors are measured."""

LOST_DB: Final = 12.0
"""SQNR of the worst output by activations alone below which some are widened: errors of a quarter of the amplitude.

Measured on three encoders: minilm_l6 gains from 2.4 dB, minilm_l3 from 7.1 (its file 6.9 -> 20.8 dB, 12 % wide), and
rxn_albert at 8.9 gains less than `LEAST_GAIN_DB`. `GOOD_DB` was chosen on minilm_l6 alone."""

GOOD_DB: Final = 20.0
"""SQNR of the worst output by activations alone from which no more are widened."""

LEAST_GAIN_DB: Final = 3.0
"""Smallest gain for which activations are widened."""

MOST_EDGES: Final = 2000
"""Largest number of activations between units: each is measured in a run of the network."""


@dataclass(frozen=True)
class WideActivations:
    """The activations to widen.

    Attributes:
        overrides: types of tensors, by name.
        wide, count: number of wide activations, and of all quantized ones.
        before_db, after_db: SQNR of the worst output by quantized activations alone.
    """

    overrides: Mapping[str, TensorOverride]
    wide: int
    count: int
    before_db: float
    after_db: float

    @property
    def note(self) -> Note:
        """Line of the report."""
        return Note(
            "activations-widened",
            f"{self.wide} of {self.count} activations in 16 bits, and a scale for each column of matrix products: by "
            f"activations alone, the worst output has {self.after_db:.1f} dB, and {self.before_db:.1f} dB with 8 bits; "
            "WIDE_ACTIVATIONS: 0 widens none",
        )


def choose_wide(
    graph: Graph, plan: Plan, solution: Solution, samples: Samples, *, wide: WideTypes, share: float
) -> WideActivations | None:
    """Choose the activations to widen. Return None if the outputs are not lost, or widening does not help.

    Args:
        graph: simplified and fused; not changed.
        samples: of the graph, of which `SAMPLES` are run.
        wide: types of the backend.
        share: largest share of the quantized activations that are wide.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    if any(site.scope for site in plan.sites) or not plan.of_role("activation"):
        return None
    units = NodeUnits(graph, plan, wide.mixed)
    if len(units.edges) > MOST_EDGES:
        return None
    feeds = [dict(unit.feed) for unit in samples.first(SAMPLES)]
    outputs = [tensor.name for tensor in graph.outputs if query.dtype(tensor) is not None]
    switches = {edge: edge.uses for edge in units.edges}
    with SwitchedNetwork(graph, plan, solution, switches, outputs, feeds, samples.options.device) as network:
        before = network.error(units.edges)
        if before < LOST_DB:
            samples.options.progress.start("outputs by activation", None)
            noise = {edge: 10 ** (-network.error([edge]) / 10) for edge in units.edges}
            total = sum(units.written.values())
            chosen, after = _smallest(network, units, noise, int(share * total))
            if after >= before + LEAST_GAIN_DB:
                overrides = {**units.overrides(chosen, wide.bits), **units.channel_scales(wide.channels)}
                return WideActivations(overrides, sum(units.written[unit] for unit in chosen), total, before, after)
    return None


def _smallest(
    network: SwitchedNetwork[UnitEdge], units: NodeUnits, noise: Mapping[UnitEdge, float], most: int
) -> tuple[frozenset[str], float]:
    """Return the smallest set of wide units with good outputs, else the largest of `most` activations; and the SQNR."""
    sets = [wide for wide in peeled(units, noise) if sum(units.written[unit] for unit in wide) <= most]

    def error_of(wide: Collection[str]) -> float:
        return network.error([edge for edge in units.edges if not edge.units <= set(wide)])

    low, high = 0, len(sets) - 1  # from the largest set to the empty one
    best = error_of(sets[0])
    while low < high and best >= GOOD_DB:
        middle = (low + high + 1) // 2
        error = error_of(sets[middle])
        low, high = (middle, high) if error >= GOOD_DB else (low, middle - 1)
    return sets[low], error_of(sets[low])


def peeled(units: NodeUnits, noise: Mapping[UnitEdge, float]) -> Iterator[frozenset[str]]:
    """Yield sets of wide units: all, then without the unit that matters least for what it writes, down to none."""
    wide = {unit for edge in units.edges for unit in edge.units}
    yield frozenset(wide)
    while wide:
        removed = dict.fromkeys(sorted(wide), 0.0)
        for edge in units.edges:
            if edge.units <= wide:
                for unit in edge.units:
                    removed[unit] += noise[edge]
        wide.discard(min(removed, key=lambda unit: removed[unit] / max(units.written[unit], 0.5)))
        yield frozenset(wide)
