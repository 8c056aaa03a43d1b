"""Proof that a quantized file is right: it checks, loads, keeps its interface and its outputs; and what it gained."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.calib.bound import reason
from sbonnx.calib.runner import LEVELS, providers
from sbonnx.calib.store import TensorStore
from sbonnx.errors import DataError, ModelError
from sbonnx.metrics import OutputDifference, OutputDifferences
from sbonnx.runtime import onnxruntime
from sbonnx.spec import Array

Feeds = Mapping[str, Array]

COLLAPSED_DB: Final = 3.0
"""Below this ratio of signal to error an output tells next to nothing of the float one."""

TOGETHER_BYTES: Final = 1 << 30
"""Models that take more in all are opened one after the other, and their latency is not measured."""

WAITING_BYTES: Final = 256 << 20
"""Memory for float outputs that wait for the quantized model's turn."""

LATENCY_SECONDS = 0.5
LATENCY_RUNS = (5, 200)
"""Time and number of runs spent on each model for the latency ratio."""


@dataclass(frozen=True)
class Comparison:
    """A quantized file beside its float model, on the same feeds.

    Attributes:
        outputs: errors by output, in graph order.
        feeds: number of feeds compared.
        bytes_float, bytes_quantized: sizes of the files with their external data; 0 where there is no file.
        ms_float, ms_quantized: best latency of one run of the first feed, milliseconds; both measured
            turn by turn in this process. 0 where not measured.
    """

    outputs: tuple[OutputDifference, ...]
    feeds: int
    bytes_float: int
    bytes_quantized: int
    ms_float: float = 0.0
    ms_quantized: float = 0.0

    @property
    def latency_ratio(self) -> float | None:
        """Quantized over float: below 1 is faster."""
        return self.ms_quantized / self.ms_float if self.ms_float else None

    @property
    def size_ratio(self) -> float | None:
        """Quantized over float."""
        return self.bytes_quantized / self.bytes_float if self.bytes_float else None

    def problems(self) -> tuple[str, ...]:
        """What makes the quantized model useless, one sentence an output."""
        found = []
        for error in self.outputs:
            if not error.compared:
                found.append(f"output '{error.name}' has another shape than in float on all {error.mismatched} feeds")
            elif error.not_finite:
                found.append(
                    f"output '{error.name}' has {error.not_finite} NaN or infinite values where float has none"
                )
            elif error.constant:
                found.append(f"output '{error.name}' is the constant {error.low:.6g}, whatever the input")
            elif error.frozen:
                found.append(f"output '{error.name}' is the same for every sample, in float it is not")
            elif error.sqnr_db < COLLAPSED_DB:
                found.append(f"output '{error.name}' is lost in error: {error.sqnr_db:.1f} dB signal to noise")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "latency_ratio": self.latency_ratio, "size_ratio": self.size_ratio}


def file_bytes(path: Path) -> int:
    """Size of a model file with the external data files it names."""
    model = onnx.load(str(path), load_external_data=False)
    names: set[str] = {
        entry.value
        for tensor in _initializers(model.graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return sum(file.stat().st_size for file in (path, *(path.parent / name for name in names)))


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _initializers(attribute.g)


def session(model: Path | bytes, *, level: str = "all", device: str = "cpu", without: Sequence[str] = ()) -> Any:
    """An onnxruntime session of a file (or serialized model) at an optimisation level.

    Args:
        without: names of onnxruntime's rewrites to leave out.

    Raises:
        ModelError: onnxruntime refuses the model; its first line is in the message.
    """
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, LEVELS[level])
    source = str(model) if isinstance(model, Path) else model
    try:
        return runtime.InferenceSession(source, options, providers=providers(device), disabled_optimizers=list(without))
    except Exception as error:  # onnxruntime's own exceptions share no base class
        name = model if isinstance(model, Path) else "the model"
        raise ModelError(f"onnxruntime refuses {name} at optimisation level '{level}': {reason(error)}") from error


def compare(
    float_model: Path | bytes,
    quantized: Path,
    data: Iterable[Feeds],
    *,
    device: str = "cpu",
    limit: int | None = None,
    latency: bool = True,
    without: Sequence[str] = (),
) -> Comparison:
    """Run both models on the same feeds and measure how far the outputs are apart.

    Args:
        float_model, quantized: files (the float one may be a serialized model).
        data: feeds as the sessions take them; walked more than once.
        limit: at most this many feeds.
        latency: measure the latency ratio too.
        without: rewrites of onnxruntime to leave out of the quantized model's session.

    Raises:
        ModelError: a model does not load, or the interfaces differ.
        DataError: there are no feeds, or a model cannot run one.
    """
    sizes = file_bytes(float_model) if isinstance(float_model, Path) else len(float_model), file_bytes(quantized)
    pair = _Pair(
        lambda: session(float_model, device=device), lambda: session(quantized, device=device, without=without)
    )
    together = sum(sizes) <= TOGETHER_BYTES
    errors, count = (pair.together if together else pair.apart)(data, limit)
    if not count:
        raise DataError("there is nothing to compare on: the data holds no feeds")
    ms = pair.latency(next(iter(data))) if latency and together else (0.0, 0.0)
    return Comparison(errors.result(), count, *sizes, *ms)


@dataclass(frozen=True)
class _Pair:
    """A float and a quantized model, opened when they are needed."""

    open_float: Callable[[], Any]
    open_quantized: Callable[[], Any]

    def together(self, data: Iterable[Feeds], limit: int | None) -> tuple[OutputDifferences, int]:
        """Both on each feed; the differences, and how many feeds there were."""
        one, other = self.open_float(), self.open_quantized()
        errors = OutputDifferences(_same_outputs(_output_names(one), other))
        count = 0
        for feeds in islice(iter(data), limit):
            errors.add(_run(one, feeds, count), _run(other, feeds, count))
            count += 1
        return errors, count

    def apart(self, data: Iterable[Feeds], limit: int | None) -> tuple[OutputDifferences, int]:
        """The same with one model open at a time; float outputs wait, on disk where they are many."""
        with TensorStore(WAITING_BYTES) as store:
            model = self.open_float()
            names = _output_names(model)
            count = 0
            for feeds in islice(iter(data), limit):
                for place, output in enumerate(_run(model, feeds, count)):
                    if isinstance(output, np.ndarray):
                        store.put((count, place), output)
                count += 1
            model = None  # let go of the session before the next is opened
            model = self.open_quantized()
            errors = OutputDifferences(_same_outputs(names, model))
            for number, feeds in enumerate(islice(iter(data), count)):
                keys = [(number, place) for place in range(len(names))]
                waiting = [store.take(key) if key in store else None for key in keys]
                errors.add(waiting, _run(model, feeds, number))
        return errors, count

    def latency(self, feeds: Feeds) -> tuple[float, float]:
        """See `_latency`."""
        return _latency(self.open_float(), self.open_quantized(), feeds)


def _output_names(model: Any) -> list[str]:
    return [output.name for output in model.get_outputs()]


def _same_outputs(names: list[str], model: Any) -> list[str]:
    """`names`, when they are the outputs of the quantized model too."""
    if names != _output_names(model):
        raise ModelError(
            f"the outputs of the quantized model ({', '.join(_output_names(model))}) are not those of the float one "
            f"({', '.join(names)})"
        )
    return names


def _run(model: Any, feeds: Feeds, index: int) -> list[Any]:
    wanted = {entry.name for entry in model.get_inputs()}
    try:
        outputs: list[Any] = model.run(None, {name: value for name, value in feeds.items() if name in wanted})
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise DataError(f"the model cannot run feed {index}: {reason(error)}") from error
    return outputs


def _latency(one: Any, other: Any, feeds: Feeds) -> tuple[float, float]:
    """Best time of one run of each, turn by turn, so that a busy machine hurts both alike."""
    best = [float("inf"), float("inf")]
    least, most = LATENCY_RUNS
    begin = time.perf_counter()
    for turn in range(most):
        for which, model in enumerate((one, other)):
            start = time.perf_counter()
            _run(model, feeds, 0)
            best[which] = min(best[which], time.perf_counter() - start)
        if turn + 1 >= least and time.perf_counter() - begin > LATENCY_SECONDS:
            break
    return best[0] * 1000, best[1] * 1000


def check(
    float_model: Path | bytes,
    quantized: Path,
    data: Iterable[Feeds],
    *,
    device: str = "cpu",
    limit: int | None = None,
    without: Sequence[str] = (),
) -> Comparison:
    """`compare`, after the file has proved valid: onnx.checker with full check, a session at every level.

    The arguments are those of `compare`.

    Raises:
        ModelError: the file is not valid, does not load at some level, or its interface changed.
    """
    try:
        onnx.checker.check_model(os.fspath(quantized), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"{quantized} does not pass onnx.checker: {reason(error)}") from error
    interface = _interface(session(float_model, device=device))
    for level in LEVELS:  # users cannot be asked to choose one
        if not _same_interface(_interface(session(quantized, level=level, device=device)), interface):
            raise ModelError(f"inputs or outputs of {quantized} are not those of the float model")
    return compare(float_model, quantized, data, device=device, limit=limit, without=without)


Entry = tuple[str, str, tuple[Any, ...]]
"""Name, type and shape of an input or output; dynamic axes by their name."""


def _interface(model: Any) -> tuple[list[Entry], list[Entry]]:
    """Inputs and outputs of a session."""
    inputs, outputs = model.get_inputs(), model.get_outputs()
    return [_entry(entry) for entry in inputs], [_entry(entry) for entry in outputs]


def _entry(value: Any) -> Entry:
    return value.name, value.type, tuple(value.shape)


def _same_interface(one: tuple[list[Entry], list[Entry]], other: tuple[list[Entry], list[Entry]]) -> bool:
    """Whether two sessions take and give the same.

    An axis of an output may have a name in one and a number in the other, unless an input's axis has that name:
    exporters give each unknown axis a name, and onnxruntime replaces it by what it infers, which is more where
    the shapes inside are simpler.
    """
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    given = {axis for _, _, shape in one[0] for axis in shape}
    for (name, kind, shape), (other_name, other_kind, other_shape) in zip(one[1], other[1], strict=True):
        if (name, kind, len(shape)) != (other_name, other_kind, len(other_shape)):
            return False
        for axes in zip(shape, other_shape, strict=True):
            names = [axis for axis in axes if not isinstance(axis, int)]
            if axes[0] != axes[1] and (len(names) != 1 or names[0] in given):
                return False
    return True
