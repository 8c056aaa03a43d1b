"""Errors of quantized activations: isolated error of each tensor, and accumulated error in the quantized network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from sbonnx.calib.quantized.forward import Forward
from sbonnx.graph import Graph
from sbonnx.metrics import ratio_db
from sbonnx.plan import Plan, Site, Solution
from sbonnx.spec import Array

LOST_DB = 3.0
"""Signal-to-noise ratio in dB below which a tensor is considered lost."""


@dataclass(frozen=True)
class LayerError:
    """Errors of one quantized activation.

    Attributes:
        node: name of its first reader.
        tensor: the quantized tensor.
        label: its quantized type.
        alone_db: isolated error: signal-to-noise ratio in dB if only this tensor is quantized.
        sqnr_db: accumulated error: signal-to-noise ratio in dB of the tensor in the fully quantized network, without
            its own rounding.
        scale: scale of the first channel.
    """

    node: str
    tensor: str
    label: str
    alone_db: float
    sqnr_db: float
    scale: float

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


@dataclass
class _Noise:
    signal: float = 0.0
    alone: float = 0.0
    gathered: float = 0.0


def errors(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    *,
    limit: int | None = None,
    device: str = "cpu",
) -> tuple[LayerError, ...]:
    """Measure the error of every quantized activation, in topological order.

    Args:
        graph: the prepared float graph.
        data: feeds; the first `limit` are used.
    """
    sites = [site for site in plan.sites if site.role == "activation" and site.key in solution.qparams]
    sites = [site for site in sites if not site.scope]  # tensors of branches exist only if the branch runs
    names = list(dict.fromkeys(site.tensor for site in sites))
    noise = {site.key: _Noise() for site in sites}
    with (
        Forward(graph, plan, solution, w_quant=False, a_quant=False, device=device, tensors=names) as float_run,
        Forward(graph, plan, solution, device=device, tensors=names) as quant_run,
    ):
        for feeds in islice(iter(data), limit):
            reference, value = float_run(feeds), quant_run(feeds)
            for site in sites:
                _add(noise[site.key], site, solution, reference[site.tensor], value[site.tensor])
    return tuple(_row(site, noise[site.key], solution) for site in sites)


def _add(noise: _Noise, site: Site, solution: Solution, reference: Array, value: Array) -> None:
    ref = reference.astype(np.float64)
    rounded = solution.qparams[site.key].fake_quant(reference).astype(np.float64)
    noise.signal += float((ref**2).sum())
    noise.alone += float(((rounded - ref) ** 2).sum())
    noise.gathered += float(((value.astype(np.float64) - ref) ** 2).sum())


def _row(site: Site, noise: _Noise, solution: Solution) -> LayerError:
    return LayerError(
        node=site.readers[0].node if site.readers else "",
        tensor=site.tensor,
        label=site.spec.label(),
        alone_db=ratio_db(noise.signal, noise.alone),
        sqnr_db=ratio_db(noise.signal, noise.gathered),
        scale=float(solution.qparams[site.key].scale.flat[0]),
    )


def worst_first(rows: Sequence[LayerError]) -> tuple[LayerError, ...]:
    """Sort rows by accumulated error, worst first."""
    return tuple(sorted(rows, key=lambda row: (row.sqnr_db, row.alone_db)))


def first_lost(rows: Sequence[LayerError]) -> LayerError | None:
    """Return the first row, in topological order, whose tensor is lost, or None."""
    return next((row for row in rows if min(row.sqnr_db, row.alone_db) < LOST_DB), None)
