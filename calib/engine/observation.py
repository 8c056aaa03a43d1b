"""Runs the segments over the data and lets sketches see what comes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.activation_cache import Keeper
from sbonnx.calib.engine.cuda import DeviceLane, DeviceRun, fetched, place_on
from sbonnx.calib.engine.nonfinite import blame
from sbonnx.calib.engine.runner import LayerRunner, prepare, providers
from sbonnx.calib.engine.sample_runner import Key, Lane, Wish, last_reads, through
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.session import SessionModel
from sbonnx.calib.engine.threads import chunks, in_order
from sbonnx.calib.observers import make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.plan.types import Site
from sbonnx.progress import Progress


def wishes_of(sites: Iterable[Site]) -> dict[Key, Wish]:
    """What the observers of `sites` need to know of each tensor."""
    wishes: dict[Key, Wish] = {}
    for site in sites:
        needs = make_observer(site.observer.name, site.observer.arguments).needs
        wish = Wish("histogram" if needs == "histogram" else "range", needs == "track")
        key = (site.tensor, site.spec.axis)
        wishes[key] = wishes.get(key, wish) | wish
    return wishes


CHUNK: Final = 8
"""Samples that a thread takes through a layer at a time: a layer may take less than handing over a sample does."""


class Observation:
    """Sketches over segments. What they hold does not depend on the threads or on the order of the samples.

    Args:
        graph: the model.
        segments: in the order to run them.
        wishes: what to observe; each tensor is in `observed` of one segment.
        device, threads: where the sessions run, and how many samples at a time.
        any_layout: tensors that nothing but sketches reads, where it pays to leave them as onnxruntime has them.
        on_device: `stream` reduces outputs where they are computed, see `sbonnx.calib.engine.cuda`; None: on a GPU.
        tolerant: values that are not finite are counted, and no error; nothing is reduced on a device then.
    """

    def __init__(
        self,
        graph: Graph,
        segments: Sequence[Segment],
        wishes: Mapping[Key, Wish],
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
        self.wishes = dict(wishes)
        self._watched = self.wishes  # what lanes have sketches for: in layers, of the one at work
        self._device = device
        self._any_layout = any_layout
        self._place = place_on(providers(device))
        self._tolerant = tolerant
        self._on_device = (self._place != "cpu" if on_device is None else on_device) and not tolerant
        self._index = tensors_by_name(graph)
        self._found = {key: wish.sketch(key[1]) for key, wish in wishes.items()}
        self._lanes: list[Lane | DeviceLane] = []
        self._idle: list[Lane | DeviceLane] = []
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._runs: list[LayerRunner | DeviceRun | None] = []

    def found(self) -> dict[Key, Sketch]:
        """What was seen so far; not while samples are under way."""
        for lane in self._lanes:
            lane.settle()
            for key, sketch in lane.sketches.items():
                self._found[key].merge(sketch)
        self._lanes.clear()
        self._idle.clear()
        return self._found

    def add(self, sketches: Mapping[Key, Sketch], samples: int | None = None) -> None:
        """Take in what was seen elsewhere, of so many samples that are not seen here (None: as the sketches say)."""
        seen = max((sketch.samples for sketch in sketches.values()), default=0)
        self.samples += seen if samples is None else samples
        for key, sketch in sketches.items():
            self._found[key].merge(sketch)

    def stream(self, units: Iterator[Unit], keep: Sequence[str] = ()) -> Iterator[tuple[Unit, dict[str, Any]]]:
        """Each sample through all segments: (unit, values of `keep`), in the order of the data.

        Nothing else is kept: data of any length runs in flat memory. The sessions stay open until `close`.
        """
        work = self.work(keep)
        for unit, kept in in_order(work, units, self.threads):
            self.samples += unit.samples
            yield unit, kept

    def work(self, keep: Sequence[str] = ()) -> Callable[[Unit], dict[str, Any]]:
        """What takes a sample through all segments and gives values of `keep`, in any thread; see `stream`."""
        last = {**last_reads(self.segments), **dict.fromkeys(keep, len(self.segments))}
        if not self._runs:
            begin = self._reduce if self._on_device else self._open
            self._runs = [begin(self._stack, segment, frozenset(last)) for segment in self.segments]

        def work(unit: Unit) -> dict[str, Any]:
            with self._lane(self._on_device) as lane:
                return through(lane, self.segments, self._runs, last, unit, self._blame, keep)

        return work

    def models(self) -> list[SessionModel | None]:
        """What another process opens sessions over, to do as `work` does; None where there is nothing to run."""
        read = frozenset(last_reads(self.segments))
        return [self._model(segment, read) for segment in self.segments]

    def close(self) -> None:
        """Free the sessions. Twice is once."""
        self._lanes.clear()
        self._idle.clear()
        self._stack.close()
        self._runs = []

    def layerwise(
        self,
        units: Iterator[Unit],
        store: TensorStore,
        progress: Progress,
        model: Callable[[Segment], Graph] | None = None,
    ) -> Iterator[tuple[str, ...]]:
        """All samples through a segment, then through the next; activations between wait in the store.

        Args:
            model: what to run for a segment, asked for when its turn comes; None: the segment as it is.

        Yields: the tensors that were observed, segment by segment.
        """
        keeper = Keeper(self.segments, store)
        places: list[Unit] = []
        with ExitStack() as lasting:
            for number, segment in enumerate(self.segments):
                progress.state(segment=(number + 1, len(self.segments)), spilled=store.counters.spilled)
                self._watched = {key: wish for key, wish in self.wishes.items() if key[0] in segment.observed}
                with ExitStack() as stack:
                    run = self._open(stack, segment, None, model)

                    def work(
                        some: list[Unit], number: int = number, segment: Segment = segment, run: Any = run
                    ) -> None:
                        with self._lane() as lane:
                            for unit in some:
                                known = keeper.fetch(number, unit)
                                began = time.perf_counter()
                                lane.step(number, segment, run, known, unit, self._blame)
                                keeper.keep(number, unit, run, known, time.perf_counter() - began)

                    for some, _ in in_order(work, chunks(units if number == 0 else iter(places), CHUNK), self.threads):
                        if number == 0:
                            places.extend(Unit(unit.index, unit.where, {}, unit.samples, unit.closes) for unit in some)
                            self.samples += sum(unit.samples for unit in some)
                        progress.advance(sum(unit.closes for unit in some))
                    self.found()  # the lanes' buffers belong to this session
                    if number in keeper.lasting:
                        lasting.push(stack.pop_all())
                yield segment.observed
        self._watched = self.wishes

    def _open(
        self,
        stack: ExitStack,
        segment: Segment,
        read: frozenset[str] | None,
        model: Callable[[Segment], Graph] | None = None,
    ) -> LayerRunner | None:
        """A session for a segment, or None where there is nothing to run. One thread: the same sums on any machine.

        Args:
            read: tensors that others than sketches read; None: all may be.
        """
        if not segment.outputs:
            return None
        piece = segment.model(self.graph, self._index) if model is None else model(segment)
        free = () if read is None else self._free(segment, read)
        return stack.enter_context(
            LayerRunner(piece, device=self._device, threads=1, name=_name(segment), any_layout=free)
        )

    def _reduce(self, stack: ExitStack, segment: Segment, read: frozenset[str]) -> DeviceRun | None:
        """The same where observed tensors stay on the device."""
        if not segment.outputs:
            return None
        piece = segment.model(self.graph, self._index)
        name = _name(segment)
        made = DeviceRun(piece, segment, read, self.wishes, device=self._device, place=self._place, name=name)
        return stack.enter_context(made)

    def _model(self, segment: Segment, read: frozenset[str]) -> SessionModel | None:
        """What `_open` opens a session over."""
        if not segment.outputs:
            return None
        piece = segment.model(self.graph, self._index)
        return prepare(piece, providers(self._device), threads=1, any_layout=self._free(segment, read))

    def _free(self, segment: Segment, read: frozenset[str]) -> frozenset[str]:
        """Outputs of a segment that may have any layout."""
        return (self._any_layout & set(segment.outputs)) - read

    def _blame(self, number: int, tensor: str, known: Mapping[str, Any], unit: Unit) -> Exception:
        """See `blame`."""
        segment = self.segments[number]
        if tensor not in known:
            piece = segment.model(self.graph, self._index)
            known = {**known, tensor: fetched(piece, tensor, known, self._device)}
        return blame(self.graph, segment, tensor, known, unit)

    @contextmanager
    def _lane(self, on_device: bool = False) -> Iterator[Lane | DeviceLane]:
        """A lane that nobody else uses."""
        kind: type[Lane | DeviceLane] = DeviceLane if on_device else Lane
        with self._lock:
            lane = next((idle for idle in self._idle if isinstance(idle, kind)), None)
            if lane is None:
                lane = DeviceLane(self._watched) if on_device else Lane(self._watched, tolerant=self._tolerant)
                self._lanes.append(lane)
            else:
                self._idle.remove(lane)
        yield lane
        with self._lock:
            self._idle.append(lane)


def _name(segment: Segment) -> str:
    """What to call a segment in messages."""
    return f"the branch '{segment.scope}'" if segment.scope else "the model"


__all__ = ["Key", "Observation", "Wish", "wishes_of"]
