"""`Comparison`: measurements of a quantized file against its float model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from sbonnx.report.codes import PROBLEMS, Note, Problem, WithProblems
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.report.figures import (
    Evaluation,
    Kernels,
    LevelDifference,
    Nature,
    OutputDifference,
    OutputQuality,
    OwnMetric,
)
from sbonnx.report.notebook import Result
from sbonnx.report.verdict import (
    AS_FAST,
    COLLAPSED_DB,
    ON_CPU,
    WIDE,
    WITHOUT_ERROR,
    Verdict,
    collapsed_text,
    interval_text,
)
from sbonnx.system.cpu import target_cpu
from sbonnx.values import INLINE, INTERNAL, OBJECT, OPTIONAL

GAP_DB: Final = 6.0
"""Gap in dB between calibration samples and hold-out samples above which calibration did not generalize."""

SURE: Final = 3.0
"""Minimum size of the gap in standard errors: outputs that depend on few samples differ by chance."""

FAIR_DB: Final = 15.0
"""With such a gap, a lower signal-to-noise ratio in dB on the hold-out set is a problem; a higher one gives a note."""

LARGE_GRAPH: Final = "optimizing a graph this large takes long, and users run 'all'"

SATURATED: Final = "there, integer operators saturate on this CPU, and not on the CPU that the file is for"

SLOWER: Final = "slower than float on this machine"

NOTICEABLE: Final = 1.02
"""Latency ratio up to which a file does not count as slower than float, whatever the width of its interval."""

CALL_MS: Final = 0.02
"""Difference in milliseconds up to which it does: about the time that calling a session takes."""

UNLIKE: Final = "calibrate on more samples, or on more different ones"

LARGER: Final = "the file is larger than the float one"
"""Beginning of the note about a file that saves no bytes."""

GROWN_BYTES: Final = 16 << 10
"""Growth of a file up to which it has no note: that of names and scales."""

MOST_WEIGHTS: Final = 0.9
"""Share of the weights in integers above which the others are not named."""


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Comparison of a quantized file with its float model, on the same feeds.

    Attributes:
        outputs: errors by output, in graph order.
        feeds: number of feeds that `outputs` were measured on.
        bytes_float, bytes_quantized: sizes of the files with their external data; 0 if there is no file.
        ms_float, ms_quantized: best latency of one run of the first feed, in milliseconds; both measured
            alternately in this process, with onnxruntime's default number of threads. 0 if not measured.
        median_ms_float, median_ms_quantized: median latency of the same runs.
        latency_runs: number of runs of each model.
        latency_ratio: median of the ratios quantized / float of pairs of runs, below 1 is faster; None if not measured.
        latency_interval: its confidence interval; None if not measured or of too few runs.
        busy: whether other processes used the processors while latencies were measured.
        levels: errors by output and optimization level; empty if not measured.
        levels_left_out: optimization levels that were not opened: the graph is large, or this CPU would compute
            something else there than the CPU that the file is for.
        kernels: integer kernels of the runtime; None if not counted.
        dot_product: whether 8-bit products were added without saturation, as with VNNI or AMX.
        saturating: operators whose sums can saturate on the CPU that the file is for and do not on this one; they were
            computed in numpy.
        unknown_sums: such operators that were computed as on this CPU, because there is no numpy code for them.
        held_out: number of hold-out samples that `feeds` consist of; 0: none were held out.
        calibrated: whether `feeds` are those of the calibration.
        doubts: sentences about data that does not look like that of the model, see `sbonnx.calib.input_check`.
        calibration: errors by output on calibration samples, if `outputs` are from a hold-out set.
        quality: figures of each output, and what they prove, on the same feeds as `outputs`.
        evaluation: a metric of the float and the quantized model on labelled data; None if none was asked for.
        cpu: kind of CPU that the quantized file is for, see `Plan.cpu`; "" if unknown, or the same on all.
        runtime: backend whose runtime gave the outputs of the quantized model, latencies and kernels.
        own: values of the metric of a batch job; None: it is not one.
        llm: evaluation of a decoder (llm quantize).
        broken_in_float: onnxruntime's own rewrites that break the float model; both models ran without them.
    """

    json_keys: ClassVar[tuple[Any, ...]] = (..., "size_ratio", "larger", "own", "llm")
    frame_of: ClassVar = "outputs"
    outputs: tuple[OutputDifference, ...] = ()
    feeds: int = 0
    bytes_float: int = 0
    bytes_quantized: int = 0
    ms_float: float = 0.0
    ms_quantized: float = 0.0
    median_ms_float: float = 0.0
    median_ms_quantized: float = 0.0
    latency_runs: int = 0
    latency_ratio: float | None = None
    latency_interval: tuple[float, float] | None = None
    busy: bool = False
    levels: tuple[LevelDifference, ...] = ()
    levels_left_out: tuple[str, ...] = ()
    kernels: Kernels | None = None
    dot_product: bool = True
    saturating: tuple[str, ...] = ()
    unknown_sums: tuple[str, ...] = ()
    held_out: int = 0
    calibrated: bool = False
    doubts: tuple[Note, ...] = ()
    calibration: tuple[OutputDifference, ...] = ()
    quality: tuple[OutputQuality, ...] = ()
    evaluation: Evaluation | None = None
    cpu: str = ""
    runtime: str = ON_CPU
    broken_in_float: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    own: tuple[OwnMetric, ...] | None = field(default=None, metadata=OPTIONAL)
    llm: DecoderEvaluation | None = field(default=None, metadata=OPTIONAL)

    @property
    def size_ratio(self) -> float | None:
        """Size of the quantized file divided by that of the float one."""
        return self.bytes_quantized / self.bytes_float if self.bytes_float else None

    @property
    def larger(self) -> bool:
        """Whether the quantized file is larger than the float one."""
        return (self.size_ratio or 0.0) > 1.0

    @property
    def asked(self) -> tuple[str, float] | None:
        """Name and value of the metric that was asked for: an own one, or the one on labelled data; None without."""
        if self.own:
            return self.own[0].name, self.own[0].quantized
        if self.evaluation is not None and self.evaluation.rows:
            return self.evaluation.metric, self.evaluation.rows[-1].metric.value
        return None

    @property
    def limit_db(self) -> float | None:
        """Signal-to-noise ratio in dB that outputs must reach for accuracy to be kept, or not to be lost.

        None if other figures decide.
        """
        figures = [figure for row in self.quality for figure in row.figures]
        limits = [figure.line for figure in figures if figure.name == "SQNR" and figure.line is not None]
        limits += [
            -20 * math.log10(figure.kept) for figure in figures if figure.name == "relative error" and figure.kept
        ]
        return max(limits, default=None)

    @property
    def slower(self) -> bool:
        """Whether the quantized model is slower than float, beyond chance, `NOTICEABLE`, `AS_FAST` and `CALL_MS`."""
        if self.latency_interval is None:
            return False
        (low, high), longer = self.latency_interval, self.median_ms_quantized - self.median_ms_float
        sure = high > AS_FAST[1] and not (self.busy and high > WIDE * low)
        return low > NOTICEABLE and longer > CALL_MS and sure

    @property
    def for_other_cpu(self) -> bool:
        """Whether the file is for another kind of CPU than this one, whose times say nothing."""
        return self.cpu not in ("", target_cpu().name)

    def latency_figure(self) -> str:
        """Return the latency ratio with its interval, as text."""
        if self.latency_ratio is None or self.latency_interval is None:
            return "unknown"
        low, high = self.latency_interval
        return f"{self.latency_ratio:.2f}{interval_text(low, high, '.2f')}"

    def problems(self) -> tuple[Problem, ...]:
        """List the reasons why the quantized model is unusable, one sentence per output."""
        lost = {error.name: self._collapsed(error) for error in self.outputs}
        unlike = [
            Problem(note.code, note)
            for error, note in self._unlike()
            if error.sqnr_db < FAIR_DB and not lost[error.name]
        ]
        return (*(Problem("output-unusable", text) for text in lost.values() if text), *unlike)

    def unknown(self) -> tuple[Problem, ...]:
        """Say which sums are not those of the CPU that the file is for, in one sentence or none."""
        if not self.unknown_sums:
            return ()
        more = f" and {len(self.unknown_sums) - 1} more" if len(self.unknown_sums) > 1 else ""
        return (
            Problem(
                "sums-unknown",
                f"sums of '{self.unknown_sums[0]}'{more} can saturate on {self.cpu} and not on this CPU, whose numbers "
                "are others: leave REDUCE_RANGE unset, or verify the file there",
            ),
        )

    def _collapsed(self, error: OutputDifference) -> str:
        return _collapsed(error, next((row.nature for row in self.quality if row.name == error.name), None))

    def notes(self) -> tuple[Note, ...]:
        """Warnings about outputs that pass the threshold, one sentence for each output, and levels left out."""
        notes = [text for error, text in self._unlike() if error.sqnr_db >= FAIR_DB]
        if self.slower:
            notes.insert(
                0,
                Note(
                    "slower",
                    f"{SLOWER}: a run takes {self.latency_figure()} of its time, {self.latency_runs} runs each",
                ),
            )
        grown = self.bytes_quantized - self.bytes_float
        if self.larger and grown > GROWN_BYTES:
            notes.append(
                Note(
                    "larger",
                    f"{LARGER}: {self.size_ratio:.2f} times its size, {grown:,} bytes more{self._weights_left()}",
                )
            )
        if self.saturating:
            notes.append(
                Note(
                    "sums-of-other-cpu",
                    f"{len(self.saturating)} integer operators saturate on {self.cpu} and not on this CPU: their sums "
                    f"were computed as {self.cpu} CPUs compute them",
                )
            )
        if self.broken_in_float:
            notes.append(without_rewrites(self.broken_in_float))
        if self.levels_left_out:
            names = " and ".join(f"'{level}'" for level in self.levels_left_out)
            why = SATURATED if "off" in self.levels_left_out else LARGE_GRAPH
            notes.append(Note("levels-left-out", f"onnxruntime's levels {names} were not opened: {why}"))
        return tuple(notes)

    def _weights_left(self) -> str:
        """Return which weights float operators read, as the end of a sentence; "" if not counted, or few are."""
        kernels = self.kernels
        if kernels is None or kernels.skipped or kernels.weights_in_integers > MOST_WEIGHTS:
            return ""
        ops = ", ".join(list(kernels.float_weights)[:3])
        return f"; {1 - kernels.weights_in_integers:.0%} of the weights are read by float operators ({ops})"

    def _unlike(self) -> Iterator[tuple[OutputDifference, Note]]:
        """Yield the outputs that are much worse on the hold-out set than on calibration samples."""
        calibrated = {error.name: error for error in self.calibration}
        natures = {output.name: output.nature for output in self.quality}
        for error in self.outputs:
            if natures.get(error.name) in WITHOUT_ERROR:
                continue
            other = calibrated.get(error.name, error)
            chance = SURE * math.hypot(error.spread_db, other.spread_db)
            if other.sqnr_db - error.sqnr_db > max(GAP_DB, chance):
                figures = f"{error.sqnr_db:.1f} dB on samples held out, {other.sqnr_db:.1f} dB on those calibrated on"
                yield error, Note("worse-held-out", f"output '{error.name}' has {figures}: {UNLIKE}")

    def collapsed(self) -> frozenset[str]:
        """Return the names of unusable outputs: of another shape, not finite, constant, frozen or lost in error."""
        return frozenset(error.name for error in self.outputs if self._collapsed(error))


@dataclass(frozen=True, repr=False)
class DecoderFigures(Comparison):
    """Figures of a decoder without a comparison of outputs.

    Attributes:
        llm: its evaluation.
    """

    json_keys: ClassVar = ("llm",)


@dataclass(frozen=True)
class CommandAdvice:
    """A command to run next.

    Attributes:
        text: what it does.
        command: the command line.
    """

    text: str
    command: str


RuntimeState = Literal["same", "rounding", "differs", "built", "refused", "absent"]
"""State of a file in a runtime: outputs equal to those of the reference; differences that rounding explains; an
operator that computes something else; built, not run; refused; not installed."""


@dataclass(frozen=True)
class OperatorDifference:
    """First operator that computes something else in a runtime, from equal inputs.

    Attributes:
        node, op: name and type of the node.
        output: tensor whose values differ.
        nodes: nodes that were compared as one, as the runtime may fuse them; in the order of the file.
        why: how the values differ.
        cause: what the difference vanishes without; "" if it was not found.
    """

    node: str
    op: str
    output: str
    nodes: tuple[str, ...]
    why: str
    cause: str = ""

    def __str__(self) -> str:
        others = f" (compared with {len(self.nodes) - 1} other nodes as one)" if len(self.nodes) > 1 else ""
        cause = f"; {self.cause}" if self.cause else ""
        return f"{self.op} '{self.node}'{others}: {self.why}{cause}"


@dataclass(frozen=True)
class RuntimeRow:
    """Outputs of the file in one runtime.

    Attributes:
        runtime, title: name in lists of runtimes, and for people.
        state: see `RuntimeState`.
        sqnr_db: lowest signal-to-noise ratio of an output against the float model, in dB; None if it was not run.
        reference_db: the same against the file in the reference; inf if the outputs are equal.
        fallback: nodes that the runtime leaves to another processor.
        differs: the first operator that differs.
        why: why the file was refused or not run, and how to install the runtime.
    """

    runtime: str
    title: str
    state: RuntimeState
    sqnr_db: float | None = None
    reference_db: float | None = None
    fallback: tuple[str, ...] = ()
    differs: OperatorDifference | None = None
    why: str = ""


@dataclass(frozen=True, repr=False)
class Portability(Result):
    """Outputs of a file in several runtimes, on the same feeds.

    Attributes:
        reference: name of the runtime that others are compared with.
        feeds: number of feeds that were run.
        rows: one for each runtime, in order.
        evaluation: a metric of the float model in onnxruntime, and of the file in each runtime that runs it.
    """

    json_keys: ClassVar = ("portable", ..., "text")
    frame_of: ClassVar = "rows"

    reference: str
    feeds: int
    rows: tuple[RuntimeRow, ...]
    evaluation: Evaluation | None = None

    @property
    def portable(self) -> bool:
        """Whether at least one runtime ran the file, and none differs or refuses it."""
        states = {row.state for row in self.rows}
        return bool(states & {"same", "rounding"}) and not states & {"differs", "refused"}

    @property
    def text(self) -> str:
        """Verdict in one sentence."""
        ran = [row for row in self.rows if row.state in ("same", "rounding", "differs")]
        differing = [row for row in self.rows if row.state == "differs"]
        refusing = [row.runtime for row in self.rows if row.state == "refused"]
        parts = [f"{row.runtime} differs at {row.differs or 'its outputs'}" for row in differing]
        parts += [f"{', '.join(refusing)} refuses the file"] if refusing else []
        if parts:
            return f"not portable: {'; '.join(parts)}"
        if not ran:
            return "unknown: no runtime ran the file"
        return f"portable: same answer up to rounding in {', '.join(row.runtime for row in ran)}"

    def problems(self) -> tuple[Problem, ...]:
        """Return a problem for each runtime that differs or refuses the file."""
        return tuple(
            Problem("runtime-differs", f"{row.runtime} differs at {row.differs or 'its outputs'}")
            if row.state == "differs"
            else Problem("runtime-refuses", f"{row.runtime} refuses the file: {row.why}")
            for row in self.rows
            if row.state in ("differs", "refused")
        )


@dataclass(frozen=True, repr=False)
class FileComparison(WithProblems, Result):
    """Comparison of two files, with the limits that were set.

    Attributes:
        problems: reasons why the result is unusable or misses a limit.
        verdict: accuracy, speed and size in one sentence.
        float, quantized: the files.
        comparison: figures of both.
        advice: a command to run next; empty without one.
        notes: messages about the data, one sentence each.
        portability: outputs of the quantized file in several runtimes, if they were asked for.
    """

    json_keys: ClassVar = ("ok", ..., "problem_codes")
    frame_of: ClassVar = "comparison.outputs"

    problems: tuple[Problem, ...] = field(metadata=PROBLEMS)
    verdict: Verdict
    float: str
    quantized: str
    comparison: Comparison = field(metadata=INLINE)
    advice: CommandAdvice | None = field(metadata=OBJECT)
    notes: tuple[Note, ...] = ()
    portability: Portability | None = field(default=None, metadata=OPTIONAL)


def _collapsed(error: OutputDifference, nature: Nature | None) -> str:
    if not error.compared and nature != "detections":
        return f"output '{error.name}' has another shape than in float on all {error.mismatched} feeds"
    if error.not_finite:
        return f"output '{error.name}' has {error.not_finite} NaN or infinite values where float has none"
    if nature in WITHOUT_ERROR:
        return ""
    if error.constant:
        return f"output '{error.name}' is the constant {error.low:.6g} for every input"
    if error.frozen:
        return f"output '{error.name}' is the same for every sample, in float it is not"
    if error.sqnr_db < COLLAPSED_DB:
        return f"output '{error.name}' is lost in error: {collapsed_text(error.sqnr_db)}"
    return ""


def without_rewrites(names: Sequence[str]) -> Note:
    """Return the note about rewrites of onnxruntime that break a float model."""
    quoted = " and ".join(f"'{name}'" for name in names)
    return Note(
        "rewrites-left-out",
        f"onnxruntime's own rewrites {quoted} break the float model: they were left out, and sessions of the float and "
        f"of the quantized model need disabled_optimizers={list(names)}",
    )
