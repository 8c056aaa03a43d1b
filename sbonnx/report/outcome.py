"""Report of a quantization: what was applied, what was refused and why."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import onnx

from sbonnx.report.codes import PROBLEMS, Note, Problem, Refusal, WithProblems
from sbonnx.report.comparison import Comparison, DecoderFigures, Portability
from sbonnx.report.details import Details
from sbonnx.report.notebook import Result, page
from sbonnx.report.plots import TOP, bar_chart, layer_names
from sbonnx.report.pruned import PruningReport
from sbonnx.report.searched import Advice, Cause, LatencyTuning, SearchFigures
from sbonnx.report.verdict import Verdict, verdict_of
from sbonnx.values import INTERNAL, OBJECT, OPTIONAL


@dataclass(frozen=True)
class Fired:
    """Pattern that was applied: its name and the original name of the node it was anchored at."""

    pattern: str
    node: str


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor.

    Attributes:
        tensor: its name.
        role: activation, weight or bias.
        label: quantized type, such as "int8 axis 0".
        bits: bit width.
        node: its first reader, or "".
    """

    tensor: str
    role: Literal["activation", "weight", "bias"]
    label: str
    bits: int
    node: str


@dataclass(frozen=True)
class LayerError:
    """Errors of one quantized activation.

    Attributes:
        node: name of its first reader.
        tensor: the quantized tensor.
        label: its quantized type.
        alone_db: isolated error: signal-to-noise ratio in dB if only this tensor is quantized.
        sqnr_db: accumulated error: signal-to-noise ratio in dB of the tensor in the fully quantized network, without
            its own rounding.
        scale: scale of the first channel.
    """

    node: str
    tensor: str
    label: str
    alone_db: float
    sqnr_db: float
    scale: float


@dataclass(frozen=True)
class NodeCounts:
    """Counts.

    Attributes:
        nodes_before: nodes in the file.
        nodes_float: nodes after simplification and fusion.
        nodes_quantized: nodes with Q/DQ.
        activations, weights, biases: quantized tensors.
        samples: samples of calibration.
    """

    nodes_before: int = 0
    nodes_float: int = 0
    nodes_quantized: int = 0
    activations: int = 0
    weights: int = 0
    biases: int = 0
    samples: int = 0


COLUMNS: Final = {"alone_db": "isolated", "sqnr_db": "accumulated"}
"""Names of the figures of `Report.layers` in tables and charts."""


@dataclass(frozen=True, repr=False)
class Report(WithProblems, Result):
    """Outcome of one quantization: rows for people, plain values for JSON.

    Attributes:
        model, output, backend: the float model, the path of the result, the runtime.
        counts: nodes before and after, sites by role, refusals.
        metrics: comparison with float (error of each output, sizes, latency); None if the file was not verified.
        layers: one row for each quantized activation, worst first.
        sites: all quantized tensors in network order.
        applied, refusals: what patterns and planning did and did not do.
        settings: the resolved recipe.
        notes: what loading changed in the model (converted opset, inlined functions, ...).
        cpu: kind of CPU that the file is for, a key of `sbonnx.system.cpu.CPUS`; "" if it is the same for all.
        kernel_costs: see `Plan.kernel_costs`.
        quantized: the model itself if no output path was given (left out of `to_dict`).
        search: what AUTO and MIXED tried; None if there was no search.
        tuning: what TUNE measured; None without.
        advice: the next change to try if outputs are below their quality lines; None if there is none, or it was not
            asked for.
        causes: why the worst layers lose what they lose, and what reduces it, worst first; measured with `details`, and
            with `advise` if accuracy is not kept.
        pruning: the report of `sbonnx.prune` if the recipe has SPARSE, else None.
        portability: outputs of the file in the runtimes of VERIFY.RUNTIMES, if there are any.
        problems: reasons why the result is unusable or misses a limit (empty if there are none).
        details: for pages, if asked for: nodes of the graph, losses by weights and inputs, histograms of the worst
            tensors; else None.
        engine_command: command line of ``trtexec`` that builds and measures an engine; "" for other runtimes, or
            without an output path.
    """

    json_keys: ClassVar = ("ok", "problems", "verdict", ..., "note_codes", "problem_codes")
    frame_of: ClassVar = "layers"
    model: str
    output: str | None
    backend: str
    counts: NodeCounts = NodeCounts()
    metrics: Comparison | DecoderFigures | None = field(default=None, metadata=OBJECT)
    layers: tuple[LayerError, ...] = ()
    sites: tuple[QuantizedTensor, ...] = ()
    applied: tuple[Fired, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = field(default=(), metadata={"codes": "note_codes"})
    problems: tuple[Problem, ...] = field(default=(), metadata=PROBLEMS)
    search: SearchFigures | None = field(default=None, metadata=OBJECT)
    tuning: LatencyTuning | None = field(default=None, metadata=OBJECT)
    advice: Advice | None = field(default=None, metadata=OBJECT)
    causes: tuple[Cause, ...] = ()
    pruning: PruningReport | None = field(default=None, metadata=OBJECT)
    details: Details | None = field(default=None, metadata=OBJECT)
    engine_command: str = ""
    cpu: str = ""
    kernel_costs: str = ""
    portability: Portability | None = field(default=None, metadata=OPTIONAL)
    quantized: onnx.ModelProto | None = field(default=None, repr=False, compare=False, metadata=INTERNAL)

    @property
    def note_codes(self) -> tuple[str, ...]:
        """Codes of the notes (sbonnx explain CODE)."""
        return tuple(note.code for note in self.notes)

    @property
    def verdict(self) -> Verdict:
        """Accuracy, speed and size against float in one sentence."""
        return verdict_of(self.metrics, problems=self.problems, backend=self.backend)

    def placed_at(self, output: str) -> Report:
        """Return the report of the file at another path, with that path in the engine command."""
        if self.output is None:
            return replace(self, output=output)
        beside = os.path.splitext(self.output)[0], os.path.splitext(output)[0]
        words = (word.replace(self.output, output).replace(*beside) for word in shlex.split(self.engine_command))
        return replace(self, output=output, engine_command=shlex.join(words))  # quoted again: the path may need it

    def joined(self, other: Report) -> Report:
        """Return the report with what was done to another model of the folder: counts, tensors, refusals, notes."""
        counts = {
            field.name: getattr(self.counts, field.name) + getattr(other.counts, field.name)
            for field in fields(NodeCounts)
        }
        counts["samples"] = self.counts.samples
        return replace(
            self,
            counts=NodeCounts(**counts),
            sites=self.sites + other.sites,
            applied=self.applied + other.applied,
            refusals=self.refusals + other.refusals,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            problems=tuple(dict.fromkeys(self.problems + other.problems)),
        )

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-noise ratio of the output with the largest error, in dB; None if outputs were not compared."""
        outputs = () if self.metrics is None else self.metrics.outputs
        return min((output.sqnr_db for output in outputs), default=None)

    @property
    def accuracy(self) -> float | None:
        """Value of the task metric for the quantized model (``evaluation=``); None without an evaluation."""
        evaluation = None if self.metrics is None else self.metrics.evaluation
        return None if evaluation is None else evaluation.rows[-1].metric.value

    @property
    def speedup(self) -> float | None:
        """Time of the float model divided by that of the file (2: twice as fast), measured here; None if it was not."""
        ratio = None if self.metrics is None else self.metrics.latency_ratio
        return 1 / ratio if ratio else None

    @property
    def size_ratio(self) -> float | None:
        """Size of the file divided by that of the float model (0.25: 4 times smaller); None if not compared."""
        return None if self.metrics is None else self.metrics.size_ratio

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the whole report as the text of an HTML page, with charts of all layers.

        With ``quantize(..., details=True)`` it has the graph, causes of the losses and histograms too.

        Args:
            path: file to write the text to as well; it is overwritten. None: none.
        """
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def layers_frame(self) -> Any:
        """Return the losses by layer as a pandas DataFrame, worst first.

        Columns are node, tensor, label (type), scale, and the isolated and accumulated signal-to-noise ratio in dB:
        the rows of `layers`, where these are alone_db and sqnr_db.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.frame().rename(columns=COLUMNS)

    def plot(self, top: int = TOP, ax: Any = None) -> Any:
        """Draw the isolated and accumulated SQNR of the layers with the largest loss, and the limit of the outputs.

        Args:
            top: number of layers.
            ax: matplotlib axes to draw into; None: new ones.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        rows = self.layers[:top]
        series = {
            "isolated": [row.alone_db for row in rows],
            "accumulated": [row.sqnr_db for row in rows],
        }
        title = f"worst {len(rows)} of {len(self.layers)} layers"
        names = layer_names([(row.node, row.tensor) for row in rows])
        limit = None if self.metrics is None else self.metrics.limit_db
        return bar_chart(names, series, title=title, unit="SQNR, dB", higher_is_better=True, limit=limit, ax=ax)


@dataclass(frozen=True)
class FolderRow:
    """Figures of a model in a folder.

    Attributes:
        file: its name without suffix.
        ok: whether it has no problems.
        output: path of the quantized file.
        sqnr_db, accuracy, speedup, size_ratio: as of `Report`.
        verdict: its verdict as a sentence.
    """

    file: str
    ok: bool
    output: str | None
    sqnr_db: float | None
    accuracy: float | None
    speedup: float | None
    size_ratio: float | None
    verdict: str


@dataclass(frozen=True)
class FolderFile:
    """One file of a model folder that has several of each model.

    Attributes:
        module: name of the float model, such as "encoder_model".
        dtype: name of the variant in transformers.js, such as "q4f16".
        bytes: size of the file.
        sqnr_db: error of the worst output, in dB; None: the float model, or not measured.
        metric: value of the metric that was asked for, or None.
        chosen: the folder's configuration selects it.
    """

    module: str
    dtype: str
    bytes: int
    sqnr_db: float | None
    metric: float | None
    chosen: bool


@dataclass(frozen=True, repr=False)
class QuantizedFolder(Result):
    """Reports of a folder with several models.

    Attributes:
        files: reports by file name without suffix.
        variants: files of each model by dtype, of folders that have several.
        notes: files that were left out, with the reason.
    """

    frame_of: ClassVar = "rows"
    json_keys: ClassVar = ("ok", ...)

    files: Mapping[str, Report]
    variants: tuple[FolderFile, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no report has problems."""
        return all(report.ok for report in self.files.values())

    @property
    def rows(self) -> tuple[FolderRow, ...]:
        """The figures of each model."""
        return tuple(
            FolderRow(
                *(name, report.ok, report.output, report.sqnr_db, report.accuracy, report.speedup, report.size_ratio),
                report.verdict.text,
            )
            for name, report in self.files.items()
        )
