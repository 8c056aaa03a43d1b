"""Runs the segments over the data and updates the sketches of the observed tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.cuda import DeviceRun, DeviceSampleRunner, fetched, place_on
from sbonnx.calib.engine.layerwise import LayerVisitor, Step, run_layerwise
from sbonnx.calib.engine.runner import LayerRunner, providers
from sbonnx.calib.engine.sample_runner import Key, SampleRunner, StatsRequest, last_reads, run_sample
from sbonnx.calib.engine.segments import Segment, needed
from sbonnx.calib.engine.threads import in_order
from sbonnx.calib.observers import make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError, ModelError, NumericError
from sbonnx.graph import Graph
from sbonnx.graph.extract import extract
from sbonnx.graph.query import dtype, scopes, tensors_by_name
from sbonnx.patterns.blocks.masks import mask_ways
from sbonnx.planning.types import Site
from sbonnx.progress import Progress
from sbonnx.spec import Array


def nonfinite_error(
    graph: Graph, segment: Segment, tensor: str, known: Mapping[str, Any], unit: Sample
) -> NumericError:
    """Build the error for an observed tensor with NaN or Inf: the sample, the counts, and the first layer with any.

    Args:
        segment: the piece that computed `tensor`.
        known: its inputs and outputs for this sample.
    """
    x = known[tensor]
    nan, inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    text = f"activation '{tensor}' holds {nan} NaN and {inf} infinite values at {unit.where}"
    first = first_nonfinite(graph, segment, tensor, known)
    if first:
        text += f"; the first layer with any is {first}"
    return NumericError(f"{text}: fix the model or the data, or exclude that part from quantization")


def first_nonfinite(graph: Graph, segment: Segment, tensor: str, known: Mapping[str, Any]) -> str | None:
    """Find the topologically first node upstream of `tensor` in its segment with a non-finite output, or None.

    The segment is run again without optimisation, in one session with all intermediate tensors as outputs.
    """
    body = next(scope for where, scope in scopes(graph) if where == segment.scope)
    inside = set(segment.nodes)
    nodes = [node for node in needed(body, [tensor]) if node.name in inside]
    makers = {
        out.name: node for node in nodes for out in node.outputs if out.name and getattr(dtype(out), "kind", "") == "f"
    }
    if not makers:
        return None
    try:
        piece = extract(graph, segment.inputs, list(makers), scope=segment.scope)
        with LayerRunner(piece, optimisation="off", threads=1) as run:
            values = run({spec.name: known[spec.name] for spec in run.input_specs if spec.name in known})
    except (ModelError, DataError):  # only the origin is unknown; the NaN or Inf is still reported
        return None
    for name, node in makers.items():
        value: Array = values[name]
        if not np.isfinite(value).all():
            return f"'{node.name}' ({node.op}), output '{name}'"
    return None


def requests_of(sites: Iterable[Site], masks: Collection[str] = ()) -> dict[Key, StatsRequest]:
    """Return the statistics that the observers of `sites` need, by tensor and axis.

    Args:
        masks: tensors that may hold masks, which a histogram tells from other values.
    """
    requests: dict[Key, StatsRequest] = {}
    for site in sites:
        needs = make_observer(site.observer.name, site.observer.arguments).needs
        histogram = needs == "histogram" or (site.tensor in masks and site.spec.axis is None)
        request = StatsRequest("histogram" if histogram else "range", needs == "track")
        key = (site.tensor, site.spec.axis)
        requests[key] = requests.get(key, request) | request
    return requests


CHUNK: Final = 8
"""Samples that a thread runs through a layer at a time: handing over a sample may take longer than a layer."""


class Observation:
    """Sketches over segments. The result does not depend on the threads or on the order of the samples.

    Args:
        graph: the model.
        segments: in the order to run them.
        requests: what to observe; each tensor is in `observed` of one segment.
        device, threads: where the sessions run, and the number of samples at a time.
        any_layout: tensors that only sketches read, to be left in onnxruntime's native layout.
        on_device: `stream` reduces outputs on the device, see `sbonnx.calib.engine.cuda`; None: if that is a GPU.
        tolerant: non-finite values are counted and raise no error; nothing is reduced on a device then.
    """

    def __init__(
        self,
        graph: Graph,
        segments: Sequence[Segment],
        requests: Mapping[Key, StatsRequest],
        *,
        device: str,
        threads: int,
        any_layout: frozenset[str] = frozenset(),
        on_device: bool | None = None,
        tolerant: bool = False,
    ) -> None:
        self.graph = graph
        self.segments = tuple(segments)
        self.threads = threads
        self.samples = 0
        self.requests = dict(requests)
        self._watched = self.requests  # sketched tensors: in layer-wise runs, those of the current layer
        self._device = device
        self._any_layout = any_layout
        self._place = place_on(providers(device))
        self._tolerant = tolerant
        self._masks = frozenset(mask_ways(graph)) & {tensor for tensor, _ in requests}
        reduces = not tolerant and not self._masks
        self._on_device = (self._place != "cpu" if on_device is None else on_device) and reduces
        self._index = tensors_by_name(graph)
        self._found = {key: request.sketch(key[1]) for key, request in requests.items()}
        self._runners: list[SampleRunner | DeviceSampleRunner] = []
        self._idle: list[SampleRunner | DeviceSampleRunner] = []
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._runs: list[LayerRunner | DeviceRun | None] = []

    def found(self) -> dict[Key, Sketch]:
        """Return the sketches so far; must not be called while samples are running."""
        for runner in self._runners:
            runner.settle()
            for key, sketch in runner.sketches.items():
                self._found[key].merge(sketch)
        self._runners.clear()
        self._idle.clear()
        return self._found

    def add(self, sketches: Mapping[Key, Sketch]) -> None:
        """Merge sketches of an earlier run."""
        self.samples += max((sketch.samples for sketch in sketches.values()), default=0)
        for key, sketch in sketches.items():
            self._found[key].merge(sketch)

    def stream(self, units: Iterator[Sample], keep: Sequence[str] = ()) -> Iterator[tuple[Sample, dict[str, Any]]]:
        """Run each sample through all segments; yield (unit, values of `keep`) in the order of the data.

        Nothing else is kept: memory does not grow with the data. The sessions stay open until `close`.
        """
        work = self.work(keep)
        for unit, kept in in_order(work, units, self.threads):
            self.samples += unit.samples
            yield unit, kept

    def work(self, keep: Sequence[str] = ()) -> Callable[[Sample], dict[str, Any]]:
        """Return a thread-safe function that runs a sample through all segments and returns `keep`; see `stream`."""
        last = {**last_reads(self.segments), **dict.fromkeys(keep, len(self.segments))}
        if not self._runs:
            begin = self._reduce if self._on_device else self.open
            self._runs = [begin(self._stack, segment, frozenset(last)) for segment in self.segments]

        def work(unit: Sample) -> dict[str, Any]:
            with self.runner(self._on_device) as runner:
                return run_sample(runner, self.segments, self._runs, last, unit, self.blame, keep)

        return work

    def close(self) -> None:
        """Free the sessions. Idempotent."""
        self._runners.clear()
        self._idle.clear()
        self._stack.close()
        self._runs = []

    def layerwise(
        self,
        units: Iterator[Sample],
        store: TensorStore,
        progress: Progress,
        model: Callable[[Segment], Graph] | None = None,
    ) -> Iterator[tuple[str, ...]]:
        """Run all samples through a segment, then through the next; activations in between are held in `store`.

        Args:
            model: builds the model of a segment right before it runs; None: the segment unchanged.

        Yields: the tensors that were observed, segment by segment.
        """
        for segment in run_layerwise(self.segments, units, [store], _Observing(self, model), self.threads, progress):
            yield segment.observed
        self._watched = self.requests

    def watch(self, segment: Segment) -> None:
        """Observe the tensors of one segment from here on."""
        self._watched = {key: request for key, request in self.requests.items() if key[0] in segment.observed}

    def open(
        self,
        stack: ExitStack,
        segment: Segment,
        read: frozenset[str] | None,
        model: Callable[[Segment], Graph] | None = None,
    ) -> LayerRunner | None:
        """Open a session for a segment; None if there is nothing to run. One thread: the same sums on any machine.

        Args:
            read: tensors with other readers than sketches; None: all may have them.
        """
        if not segment.outputs:
            return None
        piece = segment.model(self.graph, self._index) if model is None else model(segment)
        free = () if read is None else (self._any_layout & set(segment.outputs)) - read
        return stack.enter_context(
            LayerRunner(piece, device=self._device, threads=1, name=_name(segment), any_layout=free)
        )

    def _reduce(self, stack: ExitStack, segment: Segment, read: frozenset[str]) -> DeviceRun | None:
        """Open a session for a segment whose observed tensors stay on the device."""
        if not segment.outputs:
            return None
        piece = segment.model(self.graph, self._index)
        where = {"device": self._device, "place": self._place, "name": _name(segment)}
        return stack.enter_context(DeviceRun(piece, segment, read, self.requests, **where))

    def blame(self, number: int, tensor: str, tensors: Mapping[str, Any], unit: Sample) -> Exception:
        """Build the error for a non-finite tensor; see `nonfinite_error`."""
        segment = self.segments[number]
        if tensor not in tensors:
            piece = segment.model(self.graph, self._index)
            tensors = {**tensors, tensor: fetched(piece, tensor, tensors, self._device)}
        return nonfinite_error(self.graph, segment, tensor, tensors, unit)

    @contextmanager
    def runner(self, on_device: bool = False) -> Iterator[SampleRunner | DeviceSampleRunner]:
        """Yield a runner that no other thread uses."""
        kind: type[SampleRunner | DeviceSampleRunner] = DeviceSampleRunner if on_device else SampleRunner
        with self._lock:
            runner = next((idle for idle in self._idle if isinstance(idle, kind)), None)
            if runner is None:
                runner = (
                    DeviceSampleRunner(self._watched)
                    if on_device
                    else SampleRunner(self._watched, tolerant=self._tolerant, masks=self._masks)
                )
                self._runners.append(runner)
            else:
                self._idle.remove(runner)
        yield runner
        with self._lock:
            self._idle.append(runner)


class _Observing(LayerVisitor[None]):
    """Layer-wise run that updates the sketches of an observation."""

    chunk = CHUNK
    overwrites = True

    def __init__(self, observation: Observation, model: Callable[[Segment], Graph] | None) -> None:
        self._observation = observation
        self._model = model

    def open(self, stack: ExitStack, number: int, segment: Segment) -> Sequence[LayerRunner | None]:
        self._observation.watch(segment)
        return [self._observation.open(stack, segment, None, self._model)]

    @contextmanager
    def reserve(self, number: int, segment: Segment) -> Iterator[Step]:
        with self._observation.runner() as runner:

            def step(run: Any, known: dict[str, Any], unit: Sample) -> None:
                runner.step(number, segment, run, known, unit, self._observation.blame)

            yield step

    def visit(self, number: int, unit: Sample, streams: Sequence[dict[str, Any]]) -> None:
        """Nothing is left to do: `step` updated the sketches."""

    def take(self, number: int, unit: Sample, result: None) -> None:
        if number == 0:
            self._observation.samples += unit.samples

    def close(self, segment: Segment) -> None:
        self._observation.found()  # the runners' buffers belong to this session


def _name(segment: Segment) -> str:
    return f"the branch '{segment.scope}'" if segment.scope else "the model"
