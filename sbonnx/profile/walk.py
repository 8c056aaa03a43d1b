"""The walk over layers: each runs on float activations that wait in a store, the whole network once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Generic, TypeVar, final

import numpy as np

from sbonnx.calib.engine.runner import CPU, providers
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.cpu import cores
from sbonnx.errors import DataError
from sbonnx.graph import Constant, Graph, Node, Tensor
from sbonnx.graph.query import constant, node_by_name, tensors_by_name
from sbonnx.plan.types import Reader
from sbonnx.profile.numbers import Numbers
from sbonnx.profile.pieces import Piece
from sbonnx.profile.steps import Step, steps_of
from sbonnx.spec import Array

T = TypeVar("T")
Values = dict[str, Array]

FLOAT: Final = "float"
QUANTIZED: Final = "quantized"

MEMORY: Final = "512 MiB"
"""For activations that wait; past it they go to disk."""


@dataclass(frozen=True)
class Sample:
    """One feed at one layer.

    Attributes:
        number: of the feed, from 0.
        inputs: float activations that the layer reads, by name.
        outputs: what it gives of them, in float.
        gathered: its outputs in the quantized network; None where that is not asked for, or took another branch.
        strayed: whether the quantized network took another branch, and did not come by.
        read: any float tensor, computed before, that is read after this layer.
    """

    number: int
    inputs: Values
    outputs: Values
    gathered: Values | None
    strayed: bool
    read: Callable[[str], Array]


Look = Callable[[Piece, Sample], T]


@final
class Walk(Generic[T]):
    """Leads all feeds through the network, layer by layer.

    Two streams at most: the float one, and one in which everything is quantized. A tensor that no quantization reaches
    is computed once. Tensors are held from the layer that computes them to the last that reads them, within `memory`
    and then on disk, so that peak memory does not grow with the number of feeds.

    Args:
        graph: the prepared float graph.
        layers: names of the nodes to look at; branches of If included.
        reads: every use that any numbers may replace; `replaced`: constants likewise, by name.
        quantized: numbers of the quantized stream; None: there is none.
        wanted: tensors of the main graph that are computed besides, and kept to the end.
        memory: bytes for activations.
        threads: feeds that run at a time, each on one thread; None: as many as cores (1 on CUDA).
    """

    def __init__(
        self,
        graph: Graph,
        layers: Collection[str],
        *,
        reads: Collection[Reader],
        replaced: Collection[str] = (),
        quantized: Numbers | None = None,
        wanted: Sequence[str] = (),
        device: str = "cpu",
        memory: str | int = MEMORY,
        threads: int | None = None,
    ) -> None:
        self.graph, self.quantized = graph, quantized
        self.index = tensors_by_name(graph)
        self.steps = steps_of(graph, layers, wanted)
        self.feeds = 0
        self._layers, self._reads, self._replaced = frozenset(layers), reads, frozenset(replaced)
        self._device, self._memory = device, memory
        self._threads = (threads or cores()) if providers(device) == [CPU] else 1
        self._wanted = tuple(wanted)
        self._later = _read_later(self.steps, self.index)
        self._dirty = self._reached() if quantized is not None else frozenset()
        self._readers: dict[str, int] = {}
        for names in (*(step.reads for step in self.steps), self._wanted):
            for name in names:
                self._readers[name] = self._readers.get(name, 0) + 1

    def read_after(self, step: Step) -> tuple[str, ...]:
        """Tensors of the main graph, inputs included, computed before `step` and read after it."""
        return self._later[id(step)]

    def __call__(
        self,
        data: Iterable[Mapping[str, Array]],
        look: Look[T],
        *,
        limit: int | None = None,
        end: Callable[[Values, Values], None] | None = None,
    ) -> Iterator[tuple[Piece, Iterator[T]]]:
        """Each layer, with what `look` says of it, feed by feed in order.

        Args:
            data: feeds, walked once; the first `limit` are used.
            look: called for each layer and feed; from several threads at once where there are several.
            end: given the wanted tensors of each feed at last, in float and in the quantized network.

        Raises:
            DataError: there are no feeds, or the model cannot run on one.
        """
        with ExitStack() as stack:
            store = stack.enter_context(TensorStore(self._memory))
            pool = stack.enter_context(ThreadPoolExecutor(self._threads))
            self._load(store, data, limit)
            for step in self.steps:
                if step.choice:
                    self._choose(store, step)
                    continue
                with Piece(
                    self.graph,
                    step,
                    reads=self._reads,
                    replaced=self._replaced,
                    index=self.index,
                    device=self._device,
                ) as piece:
                    seen = self._pass(store, pool, piece, look)
                    if step.layer:
                        yield piece, seen
                    for _ in seen:  # what the caller left, and what lies between layers
                        pass
            for number in range(self.feeds if end is not None else 0):
                floats, quantized = (self._finals(store, stream, number) for stream in (FLOAT, QUANTIZED))
                if end is not None:
                    end(floats, quantized)

    def _finals(self, store: TensorStore, stream: str, number: int) -> Values:
        """The wanted tensors of one feed, as far as they were computed."""
        found = ((name, self._get(store, stream, name, number)) for name in self._wanted)
        return {name: value for name, value in found if value is not None}

    def _load(self, store: TensorStore, data: Iterable[Mapping[str, Array]], limit: int | None) -> None:
        """Put what the graph takes into the store."""
        self.feeds = 0
        for feeds in islice(iter(data), limit):
            for tensor in self.graph.inputs:
                readers = self._readers.get(tensor.name, 0)
                store.put((FLOAT, tensor.name, self.feeds), feeds[tensor.name], readers=readers, copy=True)
            self.feeds += 1
        if not self.feeds:
            raise DataError("there is nothing to profile on: the data holds no feeds")

    def _reached(self) -> frozenset[str]:
        """Names of the tensors that differ in the quantized stream."""
        found: set[str] = set()
        sites = {reader.node for reader in self._reads}
        nodes = node_by_name(self.graph)
        for step in self.steps:
            own = any(name in sites or self._corrects(nodes[name]) for name in step.nodes)
            if own or found.intersection(step.reads):
                found.update(step.outputs)
        return frozenset(found)

    def _corrects(self, node: Node) -> bool:
        return any(tensor.name in self._replaced for tensor in node.inputs)

    def _get(self, store: TensorStore, stream: str, name: str, number: int) -> Array | None:
        """A tensor of a stream; None where a branch that did not run would have made it."""
        key = (stream if name in self._dirty else FLOAT, name, number)
        if key in store:
            return store.get(key)
        return constant(self.index[name])

    def _runs(self, store: TensorStore, stream: str, step: Step, number: int) -> bool:
        """Whether a feed comes by a step."""
        for name, wanted in step.conditions:
            value = self._get(store, stream, name, number)
            if value is None or bool(np.asarray(value).item()) != wanted:
                return False
        return True

    def _release(self, store: TensorStore, step: Step, number: int) -> None:
        """The step has read what it reads."""
        for name in step.reads:
            for stream in (FLOAT, QUANTIZED):
                if (stream, name, number) in store:
                    store.release((stream, name, number))

    def _keep(self, store: TensorStore, stream: str, values: Values, number: int) -> None:
        for name, value in values.items():
            readers = self._readers.get(name, 0)
            if readers and (stream == FLOAT or name in self._dirty):
                store.put((stream, name, number), value, readers=readers)

    def _pass(self, store: TensorStore, pool: ThreadPoolExecutor, piece: Piece, look: Look[T]) -> Iterator[T]:
        """All feeds through one step, a few at a time; what was seen of those that came by."""
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
                sample = Sample(number, inputs, floats, quantized, strayed, read)
                found = look(piece, sample)
            self._release(store, step, number)
            return found

        for start in range(0, self.feeds, self._threads):
            for found in list(pool.map(one, range(start, min(start + self._threads, self.feeds)))):
                if found is not None:
                    yield found

    def _stream(self, store: TensorStore, piece: Piece, stream: str, number: int) -> Values | None:
        """One feed of one stream through a step; None where it does not come by."""
        if not self._runs(store, stream, piece.step, number):
            return None
        numbers = self.quantized if stream == QUANTIZED else None
        values = {name: self._known(store, name, number, stream) for name in piece.step.inputs}
        outputs = piece.run(values, numbers)
        self._keep(store, stream, outputs, number)
        return outputs

    def _known(self, store: TensorStore, name: str, number: int, stream: str = FLOAT) -> Array:
        value = self._get(store, stream, name, number)
        if value is None:
            raise ValueError(f"'{name}' of feed {number} is read before it is computed")
        return value

    def _choose(self, store: TensorStore, step: Step) -> None:
        """What an If gives is what the branch that ran gave."""
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


def _read_later(steps: Sequence[Step], index: Mapping[str, Tensor]) -> dict[int, tuple[str, ...]]:
    """By the id of each step: the variables computed before it, or by it, that later steps read."""
    made = {name: number for number, step in enumerate(steps) for name in step.outputs}
    last = {name: number for number, step in enumerate(steps) for name in step.reads}
    variables = [name for name in last if not isinstance(index[name], Constant)]
    return {
        id(step): tuple(name for name in variables if made.get(name, -1) <= number < last[name])
        for number, step in enumerate(steps)
    }
