"""Report of a quantization: what was applied, what was refused and why."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import onnx

from sbonnx.report.codes import Note, Refusal
from sbonnx.report.notebook import NotebookView, page
from sbonnx.report.plots import TOP, bar_chart, optional
from sbonnx.report.verdict import Verdict, allowed_loss, verdict_of


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


COLUMNS: Final = {"alone_db": "isolated", "sqnr_db": "accumulated"}
"""Names of the figures of `Report.layers` in tables and charts."""


@dataclass(frozen=True, repr=False)
class Report(NotebookView):
    """Outcome of one quantization: rows for people, plain values for JSON.

    Attributes:
        model, output, backend: the float model, the path of the result, the runtime.
        counts: nodes before and after, sites by role, refusals.
        metrics: end-to-end figures (error of each output, sizes, latency), see `sbonnx.verify`.
        layers: one row for each quantized activation, worst first.
        sites: all quantized tensors in network order.
        applied, refusals: what patterns and planning did and did not do.
        settings: the resolved recipe.
        notes: what loading changed in the model (converted opset, inlined functions, ...).
        cpu: kind of CPU that the file is for, a key of `sbonnx.system.cpu.CPUS`; "" if it is the same for all.
        quantized: the model itself if no output path was given (left out of `to_dict`).
        search: what AUTO and MIXED tried, see `sbonnx.search.SearchResult`; empty if there was no search.
        advice: the next change to try if outputs are below their quality lines, see `sbonnx.search.advice.Advice`;
            empty if there is none, or it was not asked for.
        pruning: the report of `sbonnx.prune` if the recipe has SPARSE, else empty.
        problems: reasons why the result is unusable or misses a limit (empty if there are none).
        details: for pages, if asked for: nodes of the graph, losses by weights and inputs, histograms of the worst
            tensors, see `sbonnx.profile.Details`; else empty.
        engine_command: command line of ``trtexec`` that builds and measures an engine; "" for other runtimes, or
            without an output path.
    """

    model: str
    output: str | None
    backend: str
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    layers: tuple[LayerError, ...] = ()
    sites: tuple[QuantizedTensor, ...] = ()
    applied: tuple[Fired, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()
    search: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    pruning: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    engine_command: str = ""
    cpu: str = ""
    quantized: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def verdict(self) -> Verdict:
        """Accuracy, speed and size against float in one sentence."""
        return verdict_of(
            self.metrics, problems=self.problems, backend=self.backend, max_loss=allowed_loss(self.settings)
        )

    def placed_at(self, output: str) -> Report:
        """Return the report of the file at another path, with that path in the engine command."""
        if self.output is None:
            return replace(self, output=output)
        beside = os.path.splitext(self.output)[0], os.path.splitext(output)[0]
        words = (word.replace(self.output, output).replace(*beside) for word in shlex.split(self.engine_command))
        return replace(self, output=output, engine_command=shlex.join(words))  # quoted again: the path may need it

    def __repr__(self) -> str:
        where = "in memory" if self.output is None else self.output
        return f"Report({self.model} -> {where}, {self.backend}: {self.verdict.text})"

    def to_html(self) -> str:
        """Return the whole report as the text of an HTML page, with charts of all layers.

        With ``quantize(..., details=True)`` it has the graph, causes of the losses and histograms too.
        """
        return page(self.to_dict())

    def layers_frame(self) -> Any:
        """Return the losses by layer as a pandas DataFrame, worst first.

        Columns are node, tensor, label (type), scale, and the isolated and accumulated signal-to-noise ratio in dB:
        the rows of `layers`, where these are alone_db and sqnr_db.

        Raises:
            ImportError: pandas is not installed.
        """
        return optional("pandas", "layers_frame()").DataFrame(
            [{COLUMNS.get(key, key): value for key, value in asdict(row).items()} for row in self.layers]
        )

    def plot(self, top: int = TOP, ax: Any = None) -> Any:
        """Draw the isolated and accumulated SQNR of the layers with the largest loss.

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
        return bar_chart([row.node for row in rows], series, title=title, unit="SQNR, dB", higher_is_better=True, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``; problems and the verdict come first."""
        verdict = {"accuracy": self.verdict.accuracy, "text": self.verdict.text}
        plain = asdict(replace(self, quantized=None))
        del plain["quantized"]
        codes = [note.code for note in self.notes]
        return {"ok": self.ok, "problems": self.problems, "verdict": verdict, **plain, "note_codes": codes}
