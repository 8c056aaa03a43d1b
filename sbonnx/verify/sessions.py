"""onnxruntime sessions of files: pairs of models, interface, outputs, size, latency measured alternately."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx

from sbonnx.backends.onnxruntime.graph_transformers import blame, broken_rewrites
from sbonnx.backends.runtime_types import Runtime
from sbonnx.calib.data import InputSpec
from sbonnx.calib.engine.runner import providers
from sbonnx.errors import DataError, ModelError, UnknownOperatorError
from sbonnx.graph import read_proto
from sbonnx.graph.protos import first_node
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.report.figures import Kernels
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU, cores, target_cpu
from sbonnx.system.input_files import native_source
from sbonnx.system.runtime import RECORD_PROVIDERS, open_session, reason, require_device, session_options
from sbonnx.system.runtime import libraries_of as libraries_of
from sbonnx.system.runtime import use_libraries as use_libraries
from sbonnx.verify.intervals import UNKNOWN, Interval, of_median
from sbonnx.verify.kernel_count import count, count_layers
from sbonnx.verify.load import OtherLoad
from sbonnx.verify.other_cpu.saturating_session import SaturatingSession

Feeds = Mapping[str, Array]

LEVEL_NAMES: Final = ("off", "basic", "extended", "all")
"""onnxruntime's optimization levels, from the graph as stored to the default."""
OFF: Final = LEVEL_NAMES[0]

MANY_NODES: Final = 20_000
"""Nodes of the quantized file above which only `ENDS` of the levels are opened.

onnxruntime (1.31) sorts the graph in every pass of its optimization, in a time that grows with the square of the
DequantizeLinear nodes of constants: 2 CPU seconds a level at 7,700 nodes, 20 to 28 at 25,600.
"""

ENDS: Final = (OFF, LEVEL_NAMES[-1])
"""The graph as stored, and the default, which users run."""

OPTIMIZED: Final = LEVEL_NAMES[2:]
"""Levels at which onnxruntime makes the products of integer operators exact, see `EXACT_PRODUCTS`."""

BESIDE_BYTES: Final = 1024
"""Minimum bytes of weights that are stored in a separate file next to an optimized graph, which is limited to 2 GB."""

HALF: Final = np.dtype(np.float16)

FLOATS: Final = ("tensor(float16)", "tensor(bfloat16)")
"""Types that replace float32 in narrowed inputs and outputs of a model."""


class BrokenByRewrite(ModelError):
    """Raised for a model that runs as stored and that onnxruntime's own rewrites break.

    Attributes:
        names: the graph transformers, as in ``disabled_optimizers``.
    """

    def __init__(self, text: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.names = names


@dataclass(frozen=True)
class _Opening:
    """Arguments with which a session was opened."""

    model: Path | bytes
    level: str
    device: str
    without: tuple[str, ...]
    exact: bool | None

    @property
    def name(self) -> str:
        return str(self.model) if isinstance(self.model, Path) else "the model"

    def broken(self, error: Exception, feeds: Mapping[str, Array] | None) -> BrokenByRewrite | None:
        """Return the error that names the rewrites, if the model runs `feeds` (None: opens) as stored; else None."""

        def attempt(level: str, names: tuple[str, ...]) -> None:
            opened = self.open(level, names)
            if feeds is not None:
                opened.run(None, feeds)

        if self.level == OFF:
            return None
        try:
            attempt(OFF, ())
        except Exception:  # onnxruntime's own exceptions share no base class
            return None  # the model itself, or the feeds
        names = broken_rewrites(lambda some: attempt(self.level, some))
        text = f"{self.name} does not run at optimisation level '{self.level}': {blame(names, str(error))}"
        return BrokenByRewrite(" ".join(text.split()), names)

    def open(self, level: str, names: tuple[str, ...] = ()) -> Any:
        """Open another session, without these graph transformers as well."""
        source = native_source(self.model) if isinstance(self.model, Path) else self.model
        options = session_options(level, threads=cores(), exact=bool(self.exact))
        return open_session(source, options, providers(self.device), disabled=(*self.without, *names))


_OPENINGS: Final[weakref.WeakKeyDictionary[Any, _Opening]] = weakref.WeakKeyDictionary()
"""Arguments by session, to explain an error of a run."""

Entry = tuple[str, str, tuple[Any, ...]]
"""Name, type and shape of an input or output; dynamic axes by their name."""


def session(
    model: Path | bytes,
    *,
    level: str = "all",
    device: str = "cpu",
    without: Sequence[str] = (),
    write: Path | None = None,
    packs: bool = True,
    threads: int | None = None,
    exact: bool | None = None,
) -> Any:
    """Create an onnxruntime session of a file (or serialized model) at an optimization level.

    Args:
        without: names of onnxruntime's graph transformers to disable.
        write: where to write the optimized graph; its larger weights are stored in a second file.
        packs: pack weights for the kernels; else mapped weights are not read before they are used.
        threads: threads inside operators; None: number of cores that this process may use.
        exact: whether sums of 8-bit products are exact, by `sbonnx.system.runtime.EXACT_PRODUCTS` if this CPU's
            saturate, or saturate, computed by a `SaturatingSession` if this CPU's do not; None: as on this CPU.

    Raises:
        BrokenByRewrite: onnxruntime rejects what its own rewrites make of the model.
        ModelError: onnxruntime rejects the model, or cannot write; the message has the first line of its error.
    """
    if exact is False and packs and target_cpu().exact and providers(device) == [CPU]:
        return _saturating(model, write, threads, level=level, device=device, without=without)
    opening = _Opening(model, level, device, tuple(without), exact)
    # onnxruntime ignores the process's CPU affinity
    threads = threads or (cores() if cores() < (os.cpu_count() or 1) else None)
    options = session_options(level, threads=threads, exact=bool(exact))
    if device != "cpu":
        options.add_session_config_entry(*RECORD_PROVIDERS)
    if not packs:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if write is not None:
        options.optimized_model_filepath = str(write)
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", f"{write.name}.weights")
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(BESIDE_BYTES))
    try:
        source = native_source(model) if isinstance(model, Path) else model
        opened = open_session(source, options, providers(device), disabled=without)
    except UnknownOperatorError as error:
        node = first_node(model, error.domain, error.op)
        raise ModelError(f"onnxruntime refuses {opening.name}: at node '{node}', {error}") from error
    except Exception as error:  # onnxruntime's own exceptions share no base class
        if exact:  # onnxruntime 1.32 cannot prepare a weight that two nodes share for exact products
            plain = partial(session, model, level=level, device=device, without=without)
            return plain(write=write, packs=packs, threads=threads)
        broken = opening.broken(error, None) if write is None else None
        text = f"onnxruntime refuses {opening.name} at optimisation level '{level}': {reason(error)}"
        raise broken or ModelError(text) from error
    require_device(device, opened.get_providers()[0])
    _OPENINGS[opened] = opening
    return opened


def _saturating(model: Path | bytes, write: Path | None, threads: int | None, **more: Any) -> Any:
    """Create a session whose sums saturate as on CPUs without 8-bit dot products, which this CPU has."""
    with ExitStack() as stack:
        path = write or stack.enter_context(temporary_folder()) / "optimized.onnx"
        opened = session(model, write=path, threads=threads, **more)
        cut = SaturatingSession(opened, path, threads)
        if not (cut.computed or cut.unknown):
            return opened
        weakref.finalize(cut, stack.pop_all().close)
    _OPENINGS[cut] = _OPENINGS[opened]
    return cut


def run(model: Any, feeds: Feeds, index: int) -> list[Any]:
    """Run a session and return its outputs in order.

    Feeds that are not inputs of the model are ignored; float feeds become float16 if the model's input is.

    Args:
        index: number of the feed, for messages.

    Raises:
        BrokenByRewrite: onnxruntime's own rewrites of the model cannot run them, and the model as stored can.
        DataError: the model cannot run on these feeds.
    """
    wanted = {entry.name: HALF if entry.type == "tensor(float16)" else None for entry in model.get_inputs()}
    given = {
        name: value if wanted[name] is None or value.dtype.kind != "f" else value.astype(wanted[name], copy=False)
        for name, value in feeds.items()
        if name in wanted
    }
    try:
        outputs: list[Any] = model.run(None, given)
    except Exception as error:  # onnxruntime's own exceptions share no base class
        opening = _OPENINGS.get(model)
        broken = None if opening is None else opening.broken(error, given)
        raise broken or DataError(f"the model cannot run feed {index}: {reason(error)}") from error
    return outputs


def file_bytes(path: Path, model: onnx.ModelProto | None = None) -> int:
    """Compute the size of a model file with its external data files; `model`: its contents, if already read."""
    read = read_proto(path) if model is None else model
    names: set[str] = {
        entry.value for tensor in _initializers(read.graph) for entry in tensor.external_data if entry.key == "location"
    }
    return sum(file.stat().st_size for file in (path, *(path.parent / name for name in names)))


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _initializers(attribute.g)


def output_names(model: Any) -> list[str]:
    """Return the names of a session's outputs, in order."""
    return [output.name for output in model.get_outputs()]


ELEMENTS: Final[Mapping[str, Any]] = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "bool": np.bool_,
    "string": object,
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}
"""numpy types of onnxruntime's element types."""


def input_specs(model: Any) -> tuple[InputSpec, ...]:
    """Return names, types and shapes of a session's inputs, for `sbonnx.calib.data.dataset.read`."""
    return tuple(
        InputSpec(
            entry.name,
            np.dtype(ELEMENTS[element]) if (element := entry.type[len("tensor(") : -1]) in ELEMENTS else None,
            tuple(entry.shape) if entry.shape else None,
            masks=True,  # whether a softmax reads it is not known: outputs that are not finite are reported
        )
        for entry in model.get_inputs()
    )


def interface(model: Any, *, keep_io: bool = True) -> tuple[list[Entry], list[Entry]]:
    """Return inputs and outputs of a session.

    Args:
        keep_io: False treats narrow floats as float32.
    """
    entries = ((value.name, value.type, tuple(value.shape)) for value in (*model.get_inputs(), *model.get_outputs()))
    plain = [
        (name, "tensor(float)" if kind in FLOATS and not keep_io else kind, shape) for name, kind, shape in entries
    ]
    inputs = len(model.get_inputs())
    return plain[:inputs], plain[inputs:]


def same_interface(one: tuple[list[Entry], list[Entry]], other: tuple[list[Entry], list[Entry]]) -> bool:
    """Return whether two sessions have the same interface.

    An axis of an output may have a name in one and a number in the other, unless an axis of an input has that name:
    exporters give each unknown axis a name, and onnxruntime replaces it by the inferred size, which it can do more
    often if the shapes inside are simpler. An axis without name and number matches any.
    """
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    given = {axis for _, _, shape in one[0] for axis in shape}
    for (name, kind, shape), (other_name, other_kind, other_shape) in zip(one[1], other[1], strict=True):
        if (name, kind) != (other_name, other_kind):
            return False
        if not shape or not other_shape:  # onnxruntime's form of an unknown shape
            continue
        if len(shape) != len(other_shape):
            return False
        for axes in zip(shape, other_shape, strict=True):
            names = [axis for axis in axes if not isinstance(axis, int)]
            if None not in axes and axes[0] != axes[1] and (len(names) != 1 or names[0] in given):
                return False
    return True


WRITTEN: Final = ("extended", "all")
"""Levels whose optimized graphs are saved, to count kernels in them."""


@dataclass
class Models:
    """Sessions of two models.

    Attributes:
        floats, quantized: files (the float one may be a serialized model).
        device: device to run on.
        without: onnxruntime graph transformers to disable in the quantized model's sessions.
        together: the float and the quantized session may be open at the same time; if so, they are kept open.
        folder: where optimized graphs are written for counting; None: nothing is counted.
        levels: the optimization levels to open, from `LEVEL_NAMES`.
        runs: the sessions are run, so their weights are packed.
        runtime: executes the quantized model, and the float one for times; None: onnxruntime.
        exact: whether sums of 8-bit products of the quantized model are exact, see `session`.
        broken_in_float: graph transformers that break the float model, and are disabled for both.
        saturating, unknown_sums: operators that onnxruntime's session at level "all" has, see `SaturatingSession`.
    """

    floats: Path | bytes
    quantized: Path
    device: str
    without: Sequence[str]
    together: bool
    folder: Path | None = None
    levels: Sequence[str] = LEVEL_NAMES
    runs: bool = True
    runtime: Runtime | None = None
    exact: bool | None = None
    broken_in_float: tuple[str, ...] = ()
    saturating: Sequence[str] = ()
    unknown_sums: Sequence[str] = ()
    _open: dict[str, Any] = field(default_factory=dict)
    _unwritten: str = ""

    def open_float(self) -> Any:
        """Return a session of the float model; not optimized if it is not run, as folding copies weights."""
        if "float" not in self._open or not self.together:
            level = "all" if self.runs else OFF
            disabled = self.broken_in_float
            opened = session(self.floats, level=level, device=self.device, without=disabled, packs=self.runs)
            return self._kept("float", opened)
        return self._open["float"]

    def leave_out_broken(self, feeds: Feeds) -> None:
        """Disable the rewrites that break the float model on `feeds` in the sessions of both models.

        Raises:
            DataError, ModelError: the float model does not run as stored either.
        """
        try:
            run(self.open_float(), feeds, 0)
        except BrokenByRewrite as error:
            if not error.names:
                raise
            self._open.clear()
            self.broken_in_float = error.names
            self.without = (*self.without, *error.names)

    def open_quantized(self, level: str = "all") -> Any:
        """Return a session of the quantized model at a level, and write its optimized graph if that is needed.

        Raises:
            ModelError: onnxruntime rejects the model.
        """
        if level in self._open:
            return self._open[level]
        path = self._place(level) if providers(self.device) == [CPU] else None
        opened = self._written(level, path) if path is not None else None
        if opened is None:
            opened = self._session(level, device=self.device)
        if level != "all":
            return opened
        if isinstance(opened, SaturatingSession):
            self.saturating, self.unknown_sums = opened.computed, opened.unknown
        return self._kept(level, opened)

    def executed(self) -> Any:
        """Return the session of the quantized model in its runtime.

        Raises:
            ModelError: the runtime rejects the model.
        """
        return self.open_quantized() if self.runtime is None else self._own("own quantized", self.quantized)

    def executed_float(self) -> Any:
        """Return the session of the float model in the runtime of the quantized one, for times.

        Raises:
            ModelError: the runtime rejects the model.
        """
        return self.open_float() if self.runtime is None else self._own("own float", self.floats)

    def _own(self, name: str, model: Path | bytes) -> Any:
        assert self.runtime is not None
        return self._open[name] if name in self._open else self._kept(name, self.runtime.open(model, None))

    def _kept(self, name: str, made: Any) -> Any:
        if self.together:
            self._open[name] = made
        return made

    def _session(self, level: str, **more: Any) -> Any:
        return session(self.quantized, level=level, without=self.without, packs=self.runs, exact=self.exact, **more)

    def _place(self, level: str) -> Path | None:
        """Return the path for the optimized graph of a level, or None if it is not needed."""
        wanted = self.folder is not None and level in WRITTEN and (self.together or level != "all")
        path = None if self.folder is None else self.folder / f"{level}.onnx"
        return path if wanted and path is not None and not path.exists() and not self._unwritten else None

    def _written(self, level: str, path: Path) -> Any | None:
        """Return a session whose optimized graph is written to `path`, or None if that fails."""
        try:
            return self._session(level, write=path)
        except ModelError as error:  # the model itself, or the disk: the caller retries without writing
            self._unwritten = f"its optimised graph could not be written next to temporary files ({error})"
            return None

    def kernels(self, model: onnx.ModelProto) -> Kernels:
        """Count the integer kernels on the CPU; `model`: contents of the quantized file."""
        if self.runtime is not None:
            return count_layers(model, self.executed().layers(), self.runtime.title)
        optimized: dict[str, onnx.ModelProto] = {}
        wanted = [level for level in WRITTEN if level in self.levels]
        for level in wanted:
            path = self._place(level)
            if path is not None:
                self._written(level, path)
            if self.folder is not None and (self.folder / f"{level}.onnx").exists():
                optimized[level] = onnx.load(str(self.folder / f"{level}.onnx"), load_external_data=False)
        if wanted[0] not in optimized:
            return Kernels(skipped=self._unwritten or "onnxruntime wrote no optimised graph")
        return count(model, optimized[wanted[0]], optimized.get(WRITTEN[1]))


SECONDS: Final = 0.25
RUNS: Final = (5, 200)
"""Time limit in seconds and (least, most) runs for a pair of models."""


@dataclass(frozen=True)
class Latency:
    """Latency of the float and of the quantized model, in milliseconds.

    Attributes:
        best: shortest run of each.
        middle: median run of each.
        runs: number of runs of each.
        interval: confidence interval of `ratio`.
        ratio: median of the ratios quantized / float, run by run; 0 if not measured. On a busy machine, the ratio of
            the medians scatters more, and may lie outside the interval.
        busy: whether other processes used the processors meanwhile.
    """

    best: tuple[float, float] = (0.0, 0.0)
    middle: tuple[float, float] = (0.0, 0.0)
    runs: int = 0
    interval: Interval = UNKNOWN
    ratio: float = 0.0
    busy: bool = False


def side_by_side(one: Any, other: Any, feeds: Feeds) -> Latency:
    """Measure two models with `alternately`.

    Args:
        one, other: onnxruntime sessions.

    Raises:
        DataError: a model cannot run on these feeds.
    """
    load = OtherLoad()
    taken = alternately((one, other), [feeds], seconds=SECONDS, most=RUNS[1])
    return latency_of(taken[0], taken[1], busy=load.busy)


def latency_of(float_ms: Sequence[float], quantized_ms: Sequence[float], *, busy: bool) -> Latency:
    """Compute the latency from the milliseconds of runs in turn.

    Args:
        busy: whether other processes used the processors meanwhile.
    """
    ratios = np.array(quantized_ms) / np.array(float_ms)
    best, middle = (min(float_ms), min(quantized_ms)), (median(float_ms), median(quantized_ms))
    return Latency(best, middle, len(float_ms), of_median(ratios), float(np.median(ratios)), busy)


def alternately(models: Sequence[Any], feeds: Sequence[Feeds], *, seconds: float, most: int) -> list[list[float]]:
    """Run models with `in_turn`, in each round on the next feed.

    Args:
        models: onnxruntime sessions.
        seconds, most: see `in_turn`; each feed is run once at least.

    Raises:
        DataError: a model cannot run on these feeds.
    """

    def run_next(model: Any, turns: Iterator[tuple[int, Feeds]]) -> None:
        number, feed = next(turns)
        run(model, feed, number)

    runs = [partial(run_next, model, cycle(enumerate(feeds))) for model in models]
    return in_turn(runs, seconds=seconds, most=most, least=max(RUNS[0], len(feeds)))


def in_turn(
    runs: Sequence[Callable[[], Any]],
    *,
    seconds: float,
    most: int,
    least: int = RUNS[0],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Call functions in turn, in reverse order every other round, so that a busy machine affects all equally.

    Args:
        seconds: time limit, but at least `least` rounds run.
        most, least: largest and smallest number of rounds.
        clock: returns seconds.

    Returns:
        The milliseconds of each call, by function.
    """
    taken: list[list[float]] = [[] for _ in runs]
    begin = clock()
    for turn in range(most):
        for which in range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs))):
            start = clock()
            runs[which]()
            taken[which].append(1000 * (clock() - start))
        if turn + 1 >= least and clock() - begin > seconds:
            break
    return taken
