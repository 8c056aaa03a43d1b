"""Layer-wise execution: each layer runs on stored float activations, so the whole network runs once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Generic, TypeVar, final

import numpy as np

from sbonnx.calib.engine.runner import providers
from sbonnx.calib.engine.threads import pool_of
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError
from sbonnx.graph import Constant, Graph, Tensor
from sbonnx.graph.query import constant, node_by_name, tensors_by_name
from sbonnx.profile.pieces import LayerStep, StepSession, is_quantized, steps_of, uses_in
from sbonnx.profile.variants import Variant
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU, cores

T = TypeVar("T")
Values = dict[str, Array]

FLOAT: Final = "float"
QUANTIZED: Final = "quantized"


@dataclass(frozen=True)
class WalkOptions:
    """Resources of a layer-wise run.

    Attributes:
        limit: number of feeds to use, from the first; None: all.
        device: device to run on.
        memory: bytes for stored activations; beyond it they spill to disk.
        threads: number of feeds to run at the same time, each on one thread; None: the number of cores (1 on CUDA).
    """

    limit: int | None = None
    device: str = "cpu"
    memory: str | int = "512 MiB"
    threads: int | None = None


DEFAULTS: Final = WalkOptions()


@dataclass(frozen=True)
class LayerSample:
    """One feed at one layer.

    Attributes:
        number: number of the feed, from 0.
        inputs: float activations that the layer reads, by name.
        outputs: its float outputs.
        gathered: its outputs in the quantized network; None if not requested, or if that took another branch.
        strayed: whether the quantized network took another branch and did not run the layer.
        read: returns any float tensor computed before that is read after this layer.
    """

    number: int
    inputs: Values
    outputs: Values
    gathered: Values | None
    strayed: bool
    read: Callable[[str], Array]


Look = Callable[[StepSession, LayerSample], T]


@final
class Walk(Generic[T]):
    """Layer-wise run of all feeds through the network.

    There are at most two streams: the float one, and one with everything quantized. A tensor that no quantization
    affects is computed once. Tensors are stored from the layer that computes them to the last one that reads them,
    within `memory` and then on disk, so that peak memory does not grow with the number of feeds.

    Args:
        graph: the prepared float graph.
        layers: names of the nodes to visit, including those in branches of If.
        quantized: variant of the quantized stream; None: no such stream.
        wanted: additional tensors of the main graph to compute, stored to the end.
        options: device, memory, threads and number of feeds.
    """

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
        self._readers: dict[str, int] = {}
        for names in (*(step.reads for step in self.steps), self._wanted):
            for name in names:
                self._readers[name] = self._readers.get(name, 0) + 1

    def read_after(self, step: LayerStep) -> tuple[str, ...]:
        """Return the tensors of the main graph, including inputs, computed up to `step` and read after it."""
        return self._later[id(step)]

    def __call__(
        self,
        data: Iterable[Mapping[str, Array]],
        look: Look[T],
        *,
        end: Callable[[Values, Values], None] | None = None,
    ) -> Iterator[tuple[StepSession, Iterator[T]]]:
        """Yield each layer with the results of `look`, feed by feed in order.

        Args:
            data: feeds, iterated once; the first `options.limit` are used.
            look: called for each layer and feed, possibly from several threads at the same time.
            end: called at the end with the wanted tensors of each feed, in float and in the quantized network.

        Raises:
            DataError: there are no feeds, or the model cannot run on one.
        """
        with ExitStack() as stack:
            store = stack.enter_context(TensorStore(self._options.memory))
            pool = stack.enter_context(pool_of(self._threads))
            self._load(store, data)
            for step in self.steps:
                if step.choice:
                    self._choose(store, step)
                    continue
                piece = StepSession(self.graph, step, index=self.index, device=self._options.device)
                with closing(piece):
                    seen = self._pass(store, pool, piece, look)
                    if step.layer:
                        yield piece, seen
                    for _ in seen:  # feeds that the caller left, and nodes between layers
                        pass
            for number in range(self.feeds if end is not None else 0):
                ends: list[Values] = []
                for stream in (FLOAT, QUANTIZED):
                    values = {name: self._get(store, stream, name, number) for name in self._wanted}
                    ends.append({name: value for name, value in values.items() if value is not None})
                if end is not None:
                    end(*ends)

    def _load(self, store: TensorStore, data: Iterable[Mapping[str, Array]]) -> None:
        self.feeds = 0
        for feeds in islice(iter(data), self._options.limit):
            for tensor in self.graph.inputs:
                readers = self._readers.get(tensor.name, 0)
                store.put((FLOAT, tensor.name, self.feeds), feeds[tensor.name], readers=readers, copy=True)
            self.feeds += 1
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

    def _get(self, store: TensorStore, stream: str, name: str, number: int) -> Array | None:
        key = (stream if name in self._dirty else FLOAT, name, number)
        if key in store:
            return store.get(key)
        return constant(self.index[name])

    def _runs(self, store: TensorStore, stream: str, step: LayerStep, number: int) -> bool:
        for name, wanted in step.conditions:
            value = self._get(store, stream, name, number)
            if value is None or bool(np.asarray(value).item()) != wanted:
                return False
        return True

    def _release(self, store: TensorStore, step: LayerStep, number: int) -> None:
        for name in step.reads:
            for stream in (FLOAT, QUANTIZED):
                if (stream, name, number) in store:
                    store.release((stream, name, number))

    def _keep(self, store: TensorStore, stream: str, values: Values, number: int) -> None:
        for name, value in values.items():
            readers = self._readers.get(name, 0)
            if readers and (stream == FLOAT or name in self._dirty):
                store.put((stream, name, number), value, readers=readers)

    def _pass(self, store: TensorStore, pool: ThreadPoolExecutor, piece: StepSession, look: Look[T]) -> Iterator[T]:
        """Run all feeds through one step, a few at a time; yield the results for those that run it."""
        step = piece.step

        def one(number: int) -> T | None:
            floats = self._stream(store, piece, FLOAT, number)
            gathered = floats
            if self.quantized is not None and self._dirty.intersection(step.outputs):
                gathered = self._stream(store, piece, QUANTIZED, number)
            found: T | None = None
            if step.layer and floats is not None:
                inputs = {name: self._known(store, name, number) for name in step.inputs}
                quantized = gathered if self.quantized is not None else None
                strayed = self.quantized is not None and quantized is None
                read = partial(self._known, store, number=number)
                sample = LayerSample(number, inputs, floats, quantized, strayed, read)
                found = look(piece, sample)
            self._release(store, step, number)
            return found

        for start in range(0, self.feeds, self._threads):
            for found in list(pool.map(one, range(start, min(start + self._threads, self.feeds)))):
                if found is not None:
                    yield found

    def _stream(self, store: TensorStore, piece: StepSession, stream: str, number: int) -> Values | None:
        """Run one feed of one stream through a step; None if its conditions do not hold."""
        if not self._runs(store, stream, piece.step, number):
            return None
        variant = self.quantized if stream == QUANTIZED else None
        values = {name: self._known(store, name, number, stream) for name in piece.step.inputs}
        outputs = piece.run(values, variant)
        self._keep(store, stream, outputs, number)
        return outputs

    def _known(self, store: TensorStore, name: str, number: int, stream: str = FLOAT) -> Array:
        value = self._get(store, stream, name, number)
        if value is None:
            raise ValueError(f"'{name}' of feed {number} is read before it is computed")
        return value

    def _choose(self, store: TensorStore, step: LayerStep) -> None:
        """Store the outputs of an If: those of the branch that ran."""
        condition = step.inputs[0]
        for number in range(self.feeds):
            for stream in (FLOAT, QUANTIZED) if self.quantized is not None else (FLOAT,):
                if self._runs(store, stream, step, number):
                    side = 0 if bool(np.asarray(self._known(store, condition, number, stream)).item()) else 1
                    values = {
                        name: self._known(store, ends[side], number, stream) for name, ends in step.choice.items()
                    }
                    self._keep(store, stream, values, number)
            self._release(store, step, number)


def _read_later(steps: Sequence[LayerStep], index: Mapping[str, Tensor]) -> dict[int, tuple[str, ...]]:
    """Return, by id of each step, the variables computed before or by it that later steps read."""
    made = {name: number for number, step in enumerate(steps) for name in step.outputs}
    last = {name: number for number, step in enumerate(steps) for name in step.reads}
    variables = [name for name in last if not isinstance(index[name], Constant)]
    return {
        id(step): tuple(name for name in variables if made.get(name, -1) <= number < last[name])
        for number, step in enumerate(steps)
    }
