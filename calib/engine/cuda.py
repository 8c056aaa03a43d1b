"""Observation on a GPU: only sketches are copied back, tensors stay on the device.

torch, if installed with CUDA, computes the minimum and maximum of outputs that never leave the device, and counts their
leading bits for histograms. Without it, and for unsupported cases, tensors are copied and observed as on a CPU. The
sketches are bit-identical either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.sample_runner import Blame, Key, StatsRequest
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.sketches.kernels import PAGES, Pages
from sbonnx.calib.sketches.sketch import CHANNEL_MANTISSA, EXACT, MANTISSA
from sbonnx.errors import NumericError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU

FLOATS: Final = tuple(np.dtype(kind) for kind in ("float16", "float32", "float64"))

COUNTERS: Final = 1 << 24
"""Number of counters, of 8 bytes each, that torch fills at a time; channels share them."""


class DeviceRun:
    """Session over a piece of a graph whose observed tensors stay on the device. Must be closed.

    Args:
        piece: the model; is changed.
        segment: the segment that it belongs to.
        read: tensors with other readers than sketches: they are copied to the host.
        requests: what to observe.
        device: see `providers`.
        place: where outputs stay: "cpu", "cuda:0".
        name: name of the model in messages.

    Attributes:
        torch: the module, or None: all tensors are copied to the host.
        kept: tensors that stay on the device.

    Raises: see `LayerRunner`.
    """

    def __init__(
        self,
        piece: Graph,
        segment: Segment,
        read: Collection[str],
        requests: Mapping[Key, StatsRequest],
        *,
        device: str,
        place: str,
        name: str,
    ) -> None:
        tensors = {tensor.name: tensor for tensor in piece.outputs}
        here = {name for name, _ in requests if name in segment.observed and name in tensors and name not in read}
        self.torch = torch_on(place)
        self.kept = {name for name in here if self.torch is not None and dtype(tensors[name]) in FLOATS}
        outputs = here | (tensors.keys() & set(read))
        piece.outputs[:] = [tensor for tensor in piece.outputs if tensor.name in outputs]
        self._places = {tensor.name: place if tensor.name in self.kept else "cpu" for tensor in piece.outputs}
        self._binding: Any = None  # holds the outputs of the last run
        self._runner = LayerRunner(piece, device=device, threads=1, name=name)

    def run(self, known: Mapping[str, Any], *, where: str) -> tuple[dict[str, Array], dict[str, Any]]:
        """Run one sample; return (arrays copied to the host, torch's tensors on the device).

        The tensors on the device are valid until the next run.

        Raises:
            DataError: the model cannot run on it.
        """
        if not self._places:
            return {}, {}
        self._binding = self._runner.run_bound(known, self._places, where=where)
        values = dict(zip(self._places, self._binding.get_outputs_as_ortvaluevector(), strict=True))
        kept = {name: self.torch.from_dlpack(values.pop(name).to_dlpack()) for name in self.kept}
        return {name: value.numpy() for name, value in values.items()}, kept

    def close(self) -> None:
        """Free the session. Idempotent."""
        self._binding = None
        self._runner.close()

    def __enter__(self) -> DeviceRun:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()


class DeviceSampleRunner:
    """Counterpart of `SampleRunner` for `DeviceRun`s."""

    def __init__(self, requests: Mapping[Key, StatsRequest]) -> None:
        self.sketches = {key: request.sketch(key[1]) for key, request in requests.items()}

    def step(
        self, number: int, segment: Segment, run: DeviceRun | None, known: dict[str, Any], unit: Sample, blame: Blame
    ) -> None:
        """Run one sample through one segment; see `SampleRunner.step`.

        The non-finite tensor may be missing in the `known` argument of `blame`.
        """
        if not segment.runs_with(known):
            return
        copied, kept = ({}, {}) if run is None else run.run(known, where=unit.where)
        known.update(copied)
        here = {key: sketch for key, sketch in self.sketches.items() if key[0] in segment.observed}
        before = {key: sketch.nan + sketch.inf for key, sketch in here.items()}
        on_device = [(sketch, kept[name]) for (name, _), sketch in here.items() if name in kept]
        if run is not None and on_device:
            observe_tensors(run.torch, on_device, unit)
        for (name, _), sketch in here.items():
            if name not in kept:
                sketch.observe(known[name], unit.index, unit.samples)
        for key, sketch in here.items():
            if sketch.nan + sketch.inf != before[key]:
                raise blame(number, key[0], known, unit)

    def settle(self) -> None:
        """Do nothing: the sketches are always complete."""


def torch_on(place: str) -> Any:
    """Return torch if it is installed and works on `place`, else None."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: its libraries do not load
        return None
    return torch if place == "cpu" or torch.cuda.is_available() else None


def observe_tensors(torch: Any, pairs: Sequence[tuple[Sketch, Any]], unit: Sample) -> None:
    """Update sketches as `Sketch.observe` would, from torch float16, float32 or float64 tensors on one device.

    The extremes of all are copied to the host at once: a copy waits for the device. A tensor is copied and observed on
    the host if the sketch keeps its values exactly, or tracks samples per channel, or if it is not finite.

    Raises:
        NumericError: see `Sketch.observe`.
    """
    reduced = [(sketch, x, _reduced(torch, sketch, x)) for sketch, x in pairs]
    parts = [part for _, _, few in reduced for part in few]
    numbers = torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.float32)
    finite, start = np.isfinite(numbers), 0
    for sketch, x, few in reduced:
        ends = np.cumsum([start, *map(len, few)])
        values = [numbers[at:end] for at, end in itertools.pairwise(ends)]
        fine, start = bool(finite[start : ends[-1]].all()), int(ends[-1])
        if not few or not fine:
            sketch.observe(x.cpu().numpy(), unit.index, unit.samples)
            continue
        pages = None
        if sketch.detail == "histogram":
            pages = count(torch, _rows(torch, sketch, x), MANTISSA if sketch.axis is None else CHANNEL_MANTISSA)
        _merge(sketch, unit, x.numel(), values[0], values[1], pages, values[2:])


def _reduced(torch: Any, sketch: Sketch, x: Any) -> list[Any]:
    """Return float32 vectors: minima and maxima, and with tracks those of the samples; none if the host observes.

    NaN propagates, and a double beyond the range of float32 becomes Inf.
    """
    size, axis = x.numel(), sketch.axis
    exact = sketch.detail == "histogram" and sketch.pages is None and sketch.finite + size <= EXACT
    if not size or exact or (axis is not None and sketch.tracks):
        return []
    if axis is None:
        extremes = [part.reshape(1) for part in torch.aminmax(x)]
    else:
        if axis >= x.dim():
            raise NumericError(f"a range per channel of axis {axis} needs that axis; the shape is {tuple(x.shape)}")
        others = [dim for dim in range(x.dim()) if dim != axis]
        extremes = [x.amin(others), x.amax(others)] if others else [x, x]
    if sketch.tracks:
        extremes += torch.aminmax(x.reshape(x.shape[0] if x.dim() else 1, -1), dim=1)
    return [part.to(torch.float32) for part in extremes]


def _rows(torch: Any, sketch: Sketch, x: Any) -> Any:
    """Return float32 (C, values of a channel)."""
    values, axis = x.to(torch.float32), sketch.axis
    return values.reshape(1, -1) if axis is None else values.movedim(axis, 0).reshape(x.shape[axis], -1).contiguous()


def count(torch: Any, rows: Any, mantissa: int) -> Pages:
    """Count finite float32 (rows, columns) as `Pages.count`, with torch on their device."""
    bins = PAGES << mantissa
    step = max(1, COUNTERS // bins)
    parts = []
    for start in range(0, len(rows), step):
        bits = rows[start : start + step].view(torch.int32)
        keys = (bits >> (23 - mantissa)) & (bins - 1)  # the shift repeats the sign
        keys += torch.arange(len(bits), dtype=torch.int32, device=bits.device)[:, None] * bins
        counts = torch.bincount(keys.reshape(-1), minlength=len(bits) * bins).reshape(len(bits), PAGES, -1)
        used = counts.any(2).any(0).nonzero().reshape(-1)
        parts.append((start, used.cpu().numpy(), counts[:, used].cpu().numpy()))
    pages = Pages.empty(len(rows), mantissa)
    pages.add_pages(np.unique(np.concatenate([used for _, used, _ in parts])))
    for start, used, counts in parts:
        pages.counts[start : start + len(counts), pages.slots[used]] = counts
    return pages


def _merge(
    sketch: Sketch, unit: Sample, elements: int, lo: Array, hi: Array, pages: Pages | None, tracked: Sequence[Array]
) -> None:
    """Merge one tensor of finite values into a sketch.

    Args:
        lo, hi: float32 (C,).
        pages: its counts, for a sketch with a histogram.
        tracked: nothing, or two float32 (S,): minima and maxima of its samples.
    """
    part = sketch if pages is None else Sketch(axis=sketch.axis, detail=sketch.detail, track=sketch.tracks)
    part.take_summary(unit.samples, elements, lo, hi)
    for row, (low, high) in enumerate(zip(*tracked, strict=True)):
        part.take_track(unit.index, float(low), float(high), row)
    if pages is not None:
        part.pages = pages
        sketch.merge(part)


def fetched(segment: Graph, name: str, known: Mapping[str, Any], device: str) -> Array:
    """Recompute a tensor that stayed on the device and return it on the host. `segment` is changed."""
    segment.outputs[:] = [tensor for tensor in segment.outputs if tensor.name == name]
    with LayerRunner(segment, device=device, threads=1) as run:
        values: Array = run.run(known)[name]
        return values


def place_on(chosen: Sequence[Any]) -> str:
    """Return the device of outputs, "cpu" or "cuda:0", with these execution providers."""
    return "cpu" if chosen[0] == CPU else f"cuda:{chosen[0][1].get('device_id', 0)}"
