"""Layer-wise execution: each layer runs on stored float activations, so the whole network runs once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar, final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import LayerVisitor, Step, run_layerwise
from sbonnx.calib.engine.runner import LayerRunner, providers
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError
from sbonnx.graph import Constant, Graph, Tensor
from sbonnx.graph.query import constant, node_by_name, tensors_by_name
from sbonnx.profiling.pieces import LayerStep, StepSession, is_quantized, steps_of, uses_in
from sbonnx.profiling.variants import Variant
from sbonnx.progress import Silent
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU, cores

T = TypeVar("T")
Values = dict[str, Array]

FLOAT: Final = "float"
QUANTIZED: Final = "quantized"
STREAMS: Final = (FLOAT, QUANTIZED)


@dataclass(frozen=True)
class WalkOptions:
    """Extent and resources of a layer-wise run.

    Attributes:
        limit: number of feeds to use, from the first; None: all.
        device: device to run on.
        memory: bytes for stored activations; beyond it they spill to disk.
        threads: number of feeds to run at the same time, each on one thread; None: the number of cores (1 on CUDA).
        histograms: maximum number of tensors with a histogram (`sbonnx.profiling.details`).
        nodes: names of the layers that `losses` measures; None: all.
    """

    limit: int | None = None
    device: str = "cpu"
    memory: str | int = "512 MiB"
    threads: int | None = None
    histograms: int = 6
    nodes: Collection[str] | None = None


DEFAULTS: Final = WalkOptions()


@dataclass(frozen=True)
class LayerSample:
    """One feed at one layer.

    Attributes:
        inputs: float activations that the layer reads, by name.
        outputs: its float outputs.
        gathered: its outputs in the quantized network; None if not requested, or if that took another branch.
        strayed: whether the quantized network took another branch and did not run the layer.
        read: returns any float tensor computed before that is read after this layer.
    """

    inputs: Values
    outputs: Values
    gathered: Values | None
    strayed: bool
    read: Callable[[str], Array]


Look = Callable[[StepSession, LayerSample], T | None]


@final
class Walk(LayerVisitor[Any], Generic[T]):
    """Layer-wise run of all feeds through the network.

    There are at most two streams: the float one, and one with everything quantized. A tensor that no quantization
    affects is computed and stored once. Tensors are stored from the layer that computes them to the last one that reads
    them, within `memory` and then on disk, so that peak memory does not grow with the number of feeds.

    Args:
        graph: the prepared float graph.
        layers: names of the nodes to visit, including those in branches of If.
        quantized: variant of the quantized stream; None: no such stream.
        wanted: additional tensors of the main graph to compute.
        options: device, memory, threads and number of feeds.
    """

    recompute = False

    def __init__(
        self,
        graph: Graph,
        layers: Collection[str],
        *,
        quantized: Variant | None = None,
        wanted: Sequence[str] = (),
        options: WalkOptions = DEFAULTS,
    ) -> None:
        self.graph, self.quantized = graph, quantized
        self.index = tensors_by_name(graph)
        self.steps = steps_of(graph, layers, wanted)
        self.feeds = 0
        self._options = options
        self._threads = (options.threads or cores()) if providers(options.device) == [CPU] else 1
        self._wanted = tuple(wanted)
        self._later = _read_later(self.steps, self.index)
        self._dirty = frozenset() if quantized is None else self._reached(quantized)

    def read_after(self, step: LayerStep) -> tuple[str, ...]:
        """Return the tensors of the main graph, including inputs, computed up to `step` and read after it."""
        return self._later[id(step)]

    def __call__(
        self,
        data: Iterable[Mapping[str, Array]],
        look: Look[T],
        take: Callable[[StepSession, T], None],
        *,
        end: Callable[[Values, Values], None] | None = None,
    ) -> Iterator[StepSession]:
        """Yield each layer when all feeds have passed it.

        Args:
            data: feeds, iterated once; the first `options.limit` are used.
            look: called for each layer and feed, possibly from several threads at the same time.
            take: called with the results of `look`, feed by feed in order.
            end: called at the end with the wanted tensors of each feed, in float and in the quantized network.

        Raises:
            DataError: there are no feeds, or the model cannot run on one.
        """
        self._look, self._take, self._end = look, take, end
        reads = [step.reads for step in self.steps] + ([] if end is None else [self._wanted])
        segments = [
            Segment(tuple(dict.fromkeys(self._key(stream, name) for stream in STREAMS for name in names)), (), ())
            for names in reads
        ]
        with one_blas_thread(), TensorStore(self._options.memory) as self._store:
            passed = run_layerwise(segments, self._units(data), [self._store], self, self._threads, Silent())
            for number, _ in enumerate(passed):
                if number < len(self.steps) and self.steps[number].layer:
                    yield self._piece

    def _units(self, data: Iterable[Mapping[str, Array]]) -> Iterator[Sample]:
        self.feeds = 0
        for number, feeds in enumerate(islice(iter(data), self._options.limit)):
            self.feeds += 1
            yield Sample(number, f"feed {number}", dict(feeds))
        if not self.feeds:
            raise DataError("there is nothing to profile: the data has no feeds")

    def _reached(self, variant: Variant) -> frozenset[str]:
        """Return the tensors that differ in a variant."""
        reached: set[str] = set()
        nodes = node_by_name(self.graph)
        for step in self.steps:
            if reached.intersection(step.reads) or is_quantized(variant, uses_in(nodes[name] for name in step.nodes)):
                reached.update(step.outputs)
        return frozenset(reached)

    def _key(self, stream: str, name: str) -> str:
        """Return the key of a tensor in a stream: that of float for a tensor that does not differ."""
        return f"{stream}/{name}" if stream == QUANTIZED and name in self._dirty else name

    def _value(self, known: Mapping[str, Any], stream: str, name: str) -> Array | None:
        key = self._key(stream, name)
        return known[key] if key in known else constant(self.index[name])

    def open(self, stack: ExitStack, number: int, segment: Segment) -> Sequence[LayerRunner | None]:
        """Open the sessions of a step."""
        if number < len(self.steps) and not self.steps[number].choice:
            piece = StepSession(self.graph, self.steps[number], index=self.index, device=self._options.device)
            self._piece = stack.enter_context(closing(piece))
        return [None]

    def reserve(self, number: int, segment: Segment) -> AbstractContextManager[Step]:
        """Return the function that runs both streams of a feed through a step."""

        def run(_: LayerRunner | None, known: dict[str, Any], unit: Sample) -> None:
            for stream in STREAMS if number < len(self.steps) else ():
                known.update(self._outputs(self.steps[number], stream, known, unit))

        return nullcontext(run)

    def _outputs(self, step: LayerStep, stream: str, known: Mapping[str, Any], unit: Sample) -> dict[str, Any]:
        """Return the outputs of a step in a stream, by key; none if its conditions do not hold, or they are known."""
        keys = {name: self._key(stream, name) for name in step.outputs}
        conditions = ((self._value(known, stream, name), picks) for name, picks in step.conditions)
        if known.keys() >= set(keys.values()):
            return {}
        if any(value is None or bool(np.asarray(value).item()) != picks for value, picks in conditions):
            return {}
        values = {name: value for name in step.inputs if (value := self._value(known, stream, name)) is not None}
        if step.choice:
            side = 0 if bool(np.asarray(values[step.inputs[0]]).item()) else 1
            return {keys[name]: self._value(known, stream, ends[side]) for name, ends in step.choice.items()}
        variant = self.quantized if stream == QUANTIZED else None
        return {keys[name]: value for name, value in self._piece.run(values, variant, where=unit.where).items()}

    def visit(self, number: int, unit: Sample, streams: Sequence[dict[str, Any]]) -> Any:
        """Return what `look` returns of a layer that the float network ran; at the end, the wanted tensors."""
        if number == len(self.steps):
            return [self._tensors(streams[0], stream, self._wanted) for stream in STREAMS]
        step, (tensors,) = self.steps[number], streams
        floats, quantized = (self._tensors(tensors, stream, step.outputs) for stream in STREAMS)
        if not step.layer or not floats:
            return None
        sample = LayerSample(
            inputs=self._tensors(tensors, FLOAT, step.inputs),
            outputs=floats,
            gathered=None if self.quantized is None else quantized or None,
            strayed=not quantized,
            read=lambda name: self._store.get((unit.index, name)),
        )
        return self._look(self._piece, sample)

    def _tensors(self, known: Mapping[str, Any], stream: str, names: Iterable[str]) -> Values:
        return {name: value for name in names if (value := self._value(known, stream, name)) is not None}

    def take(self, number: int, unit: Sample, result: Any) -> None:
        """Hand on the result of a feed."""
        if number == len(self.steps) and self._end is not None:
            self._end(*result)
        elif result is not None:
            self._take(self._piece, result)


def _read_later(steps: Sequence[LayerStep], index: Mapping[str, Tensor]) -> dict[int, tuple[str, ...]]:
    """Return, by id of each step, the variables computed before or by it that later steps read."""
    producers = {name: number for number, step in enumerate(steps) for name in step.outputs}
    last = {name: number for number, step in enumerate(steps) for name in step.reads}
    variables = [name for name in last if not isinstance(index[name], Constant)]
    return {
        id(step): tuple(name for name in variables if producers.get(name, -1) <= number < last[name])
        for number, step in enumerate(steps)
    }
