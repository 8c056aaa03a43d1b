"""Observation on a GPU: only sketches are copied back, tensors stay on the device.

Minimum and maximum are computed by nodes added to the model (`add_extremes`). For histograms torch,
if installed with CUDA, counts the leading bits of outputs that never leave the device. Without it, and for unsupported
cases, tensors are copied and observed as on a CPU. The sketches are bit-identical either way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from sbonnx.graph import Graph, Tensor, Variable
from sbonnx.graph.edit import Names, add_constant, add_node
from sbonnx.graph.query import dtype, rank
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU

EXTREMES: Final = "sbonnx/extremes"
SIZES: Final = "sbonnx/sizes"
"""Added outputs.

`EXTREMES`: float32 (M,), for each key its minima, its maxima, and a check that is 0 or NaN. `SIZES`: int64, for each
key the sizes of its axes, or the number of its elements, see `Layout`.
"""

FLOATS: Final = tuple(np.dtype(kind) for kind in ("float16", "float32", "float64"))

AXES_ARE_INPUTS: Final = 18
"""Opset since which ReduceMin and ReduceMax take their axes as an input."""


@dataclass(frozen=True)
class Extremes:
    """Minimum and maximum of a tensor, reduced on the device.

    Attributes:
        elements: number of its values.
        lo, hi: float32: per channel, per sample (slice of the leading axis), or (1,).
        finite: it holds no NaN and no Inf; else lo and hi are undefined.
    """

    elements: int
    lo: Array
    hi: Array
    finite: bool


def reducible(tensor: Tensor, axis: int | None, request: StatsRequest) -> bool:
    """Return whether added nodes can compute the statistics: no histogram, and a known rank if one is needed."""
    if request.detail != "range" or dtype(tensor) not in FLOATS:
        return False
    dims = rank(tensor)
    if axis is None:
        return dims is not None or not request.track
    return dims is not None and axis < dims and not request.track


@dataclass(frozen=True)
class Layout:
    """How the added outputs describe one key.

    Attributes:
        rank: number of its entries in `SIZES`, the sizes of its axes; None: one entry, the number of its elements.
        axis: axis whose size is the number of its minima; None: there is one.
    """

    rank: int | None
    axis: int | None = None

    @classmethod
    def of(cls, tensor: Tensor, axis: int | None, request: StatsRequest) -> Layout:
        """Return the layout of a `reducible` key."""
        dims = rank(tensor)
        return cls(dims, 0 if axis is None and request.track and dims else axis)


def add_extremes(piece: Graph, keys: Sequence[tuple[Key, StatsRequest]], tensors: dict[str, Tensor]) -> list[Layout]:
    """Append the nodes in place. The outputs that `read_extremes` reads follow those of `piece`.

    Few of them: a kernel of a GPU takes microseconds to launch, whatever it computes.

    Args:
        keys: `reducible` ones.
        tensors: of the main graph of `piece`, by name.

    Returns:
        The layout of each key.
    """
    adder = _Adder(piece)
    extremes: list[Tensor] = []
    sizes: list[Tensor] = []
    layouts = [Layout.of(tensors[name], axis, request) for (name, axis), request in keys]
    for ((name, axis), _), layout in zip(keys, layouts, strict=True):
        x = tensors[name]
        if axis is not None:
            rows, axes = x, [i for i in range(layout.rank or 0) if i != axis]
        else:
            rows = adder.add("Reshape", x, adder.one_row) if layout.axis is None else adder.add("Flatten", x, axis=1)
            axes = [1]
        lo, hi = (adder.reduce(op, rows, axes) for op in ("ReduceMin", "ReduceMax"))
        # min and max do not propagate NaN on every device; 0 x is NaN for NaN and Inf, and sums propagate that
        zeros = adder.add("Mul", x, adder.zero_like(x))
        check = adder.row(adder.add("ReduceSum", zeros, keepdims=0))
        extremes += [adder.float32(value) for value in (lo, hi, check)]
        sizes.append(adder.row(adder.add("Size", x)) if layout.rank is None else adder.add("Shape", x))
    for name, kind, parts in ((EXTREMES, np.float32, extremes), (SIZES, np.int64, sizes)):
        out = Variable(name, np.dtype(kind), [None])
        add_node(piece, "Concat", parts, names=adder.names, stem=name, attrs={"axis": 0}, outputs=[out])
        piece.outputs.append(out)
    return layouts


def read_extremes(layouts: Sequence[Layout], extremes: Array, sizes: Array) -> Iterator[Extremes]:
    """Parse the added outputs for each key."""
    dims, at, start = sizes.tolist(), 0, 0
    finite = np.isfinite(extremes)
    for layout in layouts:
        count = 1 if layout.rank is None else layout.rank
        shape = dims[start : start + count]
        length = 1 if layout.axis is None else shape[layout.axis]
        lo, hi = extremes[at : at + length], extremes[at + length : at + 2 * length]
        elements = math.prod(shape)
        fine = not elements or bool(finite[at : at + 2 * length + 1].all())
        start, at = start + count, at + 2 * length + 1
        yield Extremes(elements, lo, hi, fine)


class _Adder:
    def __init__(self, piece: Graph) -> None:
        self.names = Names(piece)
        self._piece = piece
        self._inputs = piece.opset >= AXES_ARE_INPUTS
        self._flat = self.constant(np.array([-1], np.int64))
        self.one_row = self.constant(np.array([1, -1], np.int64))
        self._zeros: dict[np.dtype[Any], Tensor] = {}

    def add(self, op: str, *inputs: Tensor, **attrs: Any) -> Tensor:
        """Append a node and return its output."""
        node = add_node(self._piece, op, inputs, names=self.names, stem=f"sbonnx/{op}", attrs=attrs)
        return node.outputs[0]

    def constant(self, values: Array) -> Tensor:
        """Append a constant."""
        return add_constant(self._piece, "sbonnx/number", values, self.names)

    def zero_like(self, x: Tensor) -> Tensor:
        """Return the constant zero of the type of `x`, which is added when it is needed first."""
        kind = np.dtype(dtype(x))
        if kind not in self._zeros:
            self._zeros[kind] = self.constant(np.zeros((), kind))
        return self._zeros[kind]

    def reduce(self, op: str, x: Tensor, axes: list[int]) -> Tensor:
        """Append `op` over axes, without keepdims."""
        if not axes:
            return x
        if self._inputs:
            return self.add(op, x, self.constant(np.array(axes, np.int64)), keepdims=0)
        return self.add(op, x, axes=axes, keepdims=0)

    def row(self, x: Tensor) -> Tensor:
        """Flatten `x` to one axis."""
        return self.add("Reshape", x, self._flat)

    def float32(self, x: Tensor) -> Tensor:
        """Cast `x` to float32: a double beyond its range becomes Inf, as in a sketch."""
        return self.add("Cast", x, to=onnx_dtype(np.float32))


COUNTERS: Final = 1 << 24
"""Number of counters, of 8 bytes each, that torch fills at a time; channels share them."""


class DeviceRun:
    """Session over a piece of a graph that reduces its observed tensors on the device. Must be closed.

    Args:
        piece: the model; is changed.
        segment: the segment that it belongs to.
        read: tensors with other readers than sketches: they are copied to the host.
        requests: what to observe.
        device: see `providers`.
        place: where outputs stay: "cpu", "cuda:0".
        name: name of the model in messages.

    Attributes:
        nodes: keys whose minimum and maximum are computed by added nodes.
        counted: tensors that stay on the device for torch to count.

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
        here = [key for key in requests if key[0] in segment.observed and key[0] in tensors and key[0] not in read]
        self.torch = torch_on(place)
        self.nodes = [key for key in here if reducible(tensors[key[0]], key[1], requests[key])]
        others = {key[0] for key in here if key not in self.nodes}
        self.counted = {name for name in others if self.torch is not None and dtype(tensors[name]) in FLOATS}
        outputs = others | (tensors.keys() & set(read))
        piece.outputs[:] = [tensor for tensor in piece.outputs if tensor.name in outputs]
        self._places = dict.fromkeys((tensor.name for tensor in piece.outputs), "cpu")
        self._places.update(dict.fromkeys(self.counted, place))
        if self.nodes:
            self._layouts = add_extremes(piece, [(key, requests[key]) for key in self.nodes], tensors)
            self._places.update({EXTREMES: "cpu", SIZES: "cpu"})
        self._binding: Any = None  # holds the outputs of the last run
        self._runner = LayerRunner(piece, device=device, threads=1, name=name)

    def run(
        self, known: Mapping[str, Any], *, where: str
    ) -> tuple[dict[str, Array], dict[str, Any], dict[Key, Extremes]]:
        """Run one sample; return (arrays copied to the host, torch's tensors on the device, extremes by key).

        The tensors on the device are valid until the next run.

        Raises:
            DataError: the model cannot run on it.
        """
        if not self._places:
            return {}, {}, {}
        self._binding = self._runner.run_bound(known, self._places, where=where)
        values = dict(zip(self._places, self._binding.get_outputs_as_ortvaluevector(), strict=True))
        extremes: dict[Key, Extremes] = {}
        if self.nodes:
            numbers, sizes = (values.pop(name).numpy() for name in (EXTREMES, SIZES))
            extremes = dict(zip(self.nodes, read_extremes(self._layouts, numbers, sizes), strict=True))
        counted = {name: self.torch.from_dlpack(values.pop(name).to_dlpack()) for name in self.counted}
        return {name: value.numpy() for name, value in values.items()}, counted, extremes

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
        copied, counted, extremes = ({}, {}, {}) if run is None else run.run(known, where=unit.where)
        known.update(copied)
        for key, sketch in self.sketches.items():
            name = key[0]
            if name not in segment.observed:
                continue
            if key in extremes:
                fine = take_extremes(sketch, extremes[key], unit)
            else:
                before = sketch.nan + sketch.inf
                if name in counted and run is not None:
                    observe_tensor(run.torch, sketch, counted[name], unit)
                else:
                    sketch.observe(known[name], unit.index, unit.samples)
                fine = sketch.nan + sketch.inf == before
            if not fine:
                raise blame(number, name, known, unit)

    def settle(self) -> None:
        """Do nothing: the sketches are always complete."""


def torch_on(place: str) -> Any:
    """Return torch if it is installed and works on `place`, else None."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: its libraries do not load
        return None
    return torch if place == "cpu" or torch.cuda.is_available() else None


def take_extremes(sketch: Sketch, found: Extremes, unit: Sample) -> bool:
    """Update a range sketch as `Sketch.observe` would. Return False, without a change, if the tensor is not finite."""
    if not found.finite:
        return False
    if not found.elements:
        channels = 1 if sketch.axis is None else len(found.lo)
        none = np.full(channels, np.inf, np.float32)
        _merge(sketch, unit, 0, none, -none)
    elif sketch.axis is None:
        tracked = (found.lo, found.hi) if sketch.tracks else None
        _merge(sketch, unit, found.elements, found.lo.min(keepdims=True), found.hi.max(keepdims=True), None, tracked)
    else:
        _merge(sketch, unit, found.elements, found.lo, found.hi)
    return True


def observe_tensor(torch: Any, sketch: Sketch, x: Any, unit: Sample) -> None:
    """Update a sketch as `Sketch.observe` would, from a torch float16, float32 or float64 tensor on any device.

    The tensor is copied to the host and observed there if the sketch keeps its values exactly, has no histogram, or
    tracks samples per channel, or if the tensor is not finite.

    Raises:
        NumericError: see `Sketch.observe`.
    """
    size = x.numel()
    kept = sketch.pages is None and sketch.finite + size <= EXACT
    if not size or kept or sketch.detail == "range" or (sketch.axis is not None and sketch.tracks):
        sketch.observe(x.cpu().numpy(), unit.index, unit.samples)
        return
    axis = sketch.axis
    if axis is not None and axis >= x.dim():
        raise NumericError(f"a range per channel of axis {axis} needs that axis; the shape is {tuple(x.shape)}")
    values = x.to(torch.float32)
    rows = values.reshape(1, -1) if axis is None else values.movedim(axis, 0).reshape(x.shape[axis], -1).contiguous()
    lo, hi = rows.amin(1), rows.amax(1)  # NaN if there is any
    if not bool((torch.isfinite(lo) & torch.isfinite(hi)).all()):
        sketch.observe(x.cpu().numpy(), unit.index, unit.samples)
        return
    tracked = None
    if sketch.tracks:
        samples = values.reshape(x.shape[0] if x.dim() else 1, -1)
        tracked = (samples.amin(1).cpu().numpy(), samples.amax(1).cpu().numpy())
    pages = count(torch, rows, MANTISSA if axis is None else CHANNEL_MANTISSA)
    _merge(sketch, unit, size, lo.cpu().numpy(), hi.cpu().numpy(), pages, tracked)


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
    sketch: Sketch,
    unit: Sample,
    elements: int,
    lo: Array,
    hi: Array,
    pages: Pages | None = None,
    tracked: tuple[Array, Array] | None = None,
) -> None:
    """Merge one tensor of finite values into a sketch.

    Args:
        lo, hi: float32 (C,).
        pages: its counts, for a sketch with a histogram.
        tracked: two float32 (S,): minima and maxima of its samples.
    """
    part = sketch if pages is None else Sketch(axis=sketch.axis, detail=sketch.detail, track=sketch.tracks)
    part.take_summary(unit.samples, elements, lo, hi)
    for row, (low, high) in enumerate(zip(*tracked, strict=True) if tracked is not None else ()):
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
