"""Values that the stages pass on: `Request`, `Prepared`, `PipelineState`; and the settings that a recipe implies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import onnx

from sbonnx import recipe as recipes
from sbonnx.backends import Backend, backend_for
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.calib.input_check import FirstLayer
from sbonnx.equalize import Equalization
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource, path_or_bytes
from sbonnx.metrics import Metric
from sbonnx.options import RunOptions
from sbonnx.planning import Plan, Site, Solution
from sbonnx.planning.magnitudes import Magnitudes
from sbonnx.planning.override_file import TensorOverride
from sbonnx.progress import Progress, Silent
from sbonnx.pruning.graph_pruning import Pruned
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import is_per_channel
from sbonnx.recipe.torch_modules import Modules, NodeInfo
from sbonnx.reconstruct.layer_inputs import looks_at_inputs
from sbonnx.reconstruct.solution import QuantizedInputs, Reconstruction, WeightRounding
from sbonnx.report import Fired, Note, Refusal, Report
from sbonnx.report.comparison import Comparison
from sbonnx.report.pruned import PruningReport
from sbonnx.report.simplified import SimplifyReport
from sbonnx.rounding import make_rounder
from sbonnx.spec import Array, QParams
from sbonnx.stages.contract import Value
from sbonnx.verify import EvaluationData

BASE_OPSET: Final = 13
"""First opset whose Q/DQ support per-channel scales."""

SMOOTH: Final = (0.3, 0.5)
"""Strengths for EQUALIZE.SMOOTH_QUANT: true, of convolutions and matrix products. Measured: MobileNetV2, MiniLM."""


@dataclass(frozen=True)
class Original:
    """Names and counts of the model as it was given, by which recipes are resolved and reports count.

    Attributes:
        nodes, tensors: nodes, with the torch modules that they belong to, and names of tensors.
        files: files that the model was read from.
        opset, node_count: opset, and number of nodes, branches included.
    """

    nodes: tuple[NodeInfo, ...]
    tensors: tuple[str, ...]
    files: tuple[Path, ...]
    opset: int
    node_count: int


@dataclass(frozen=True)
class PrunedModel:
    """The pruned float model that takes the place of the original, with the report of its pruning."""

    report: PruningReport
    original: Original

    @property
    def proto(self) -> onnx.ModelProto:
        """The pruned model."""
        assert self.report.pruned is not None
        return self.report.pruned


@dataclass(frozen=True)
class PruneOptions:
    """Options of `sbonnx.prune` beside its recipe.

    Attributes:
        masked: write the masked model: shapes unchanged, weights that read removed channels zero.
        metric: loss of one feed, which MAX_LOSS limits.
        integers: the pruned model will be quantized, so that MULTIPLE: auto is for kernels in integers.
    """

    masked: bool = False
    metric: Metric | None = None
    integers: bool = False


ABSENT: Final[Any] = None
"""A value of the state before its stage has run: the contract of stages keeps others from reading it."""

Source = ModelSource


@dataclass(frozen=True)
class Request:
    """One model to quantize, its settings, data and outputs.

    Attributes:
        model: the float model: path, ModelProto or bytes.
        recipe, backend: settings, and the rules of the runtime.
        data: calibration data; None: none given.
        split: cut arrays with a long leading axis into batches of this many samples.
        fusions: names of the patterns of `sbonnx.patterns.FUSE` to apply, or prefixes of them; None: all.
        output: path of the result; None: the result stays in memory.
        trt_cache: path for TensorRT's calibration cache.
        write_overrides: path for the types and scales of all tensors, as overrides of onnxruntime's quantizer.
        force: overwrite files.
        verify: check the file and compare it with the float model.
        evaluation: labelled data and the metric to compute on it, with the head of the recipe; None: none.
        max_loss: loss in that metric that the result may have; None: no limit.
        details: measure what pages show beyond the figures of the report, see `sbonnx.profiling.details`.
        pruning: the pruned model is the result; None: it is quantized if the recipe has SPARSE.
        pruned: the model that is quantized in place of `model`; None: `model` itself.
    """

    model: Source
    recipe: Recipe
    backend: Backend
    data: Any = None
    split: int | None = None
    fusions: Sequence[str] | None = None
    output: str | os.PathLike[str] | None = None
    trt_cache: str | os.PathLike[str] | None = None
    write_overrides: str | os.PathLike[str] | None = None
    force: bool = False
    verify: bool = True
    evaluation: EvaluationData | None = None
    max_loss: float | None = None
    details: bool = False
    pruning: PruneOptions | None = None
    pruned: PrunedModel | None = None

    def __post_init__(self) -> None:
        if self.evaluation is not None:
            object.__setattr__(self, "evaluation", self.evaluation.with_head(self.recipe.verify.head))

    @property
    def files(self) -> list[Path]:
        """The input files, which no output may replace."""
        return [Path(source) for source in (self.model, self.data) if isinstance(source, (str, os.PathLike))]

    @property
    def float_model(self) -> Source:
        """The model to quantize: the pruned one if there is one."""
        return self.model if self.pruned is None else self.pruned.proto

    @property
    def source(self) -> Path | bytes:
        """The original model in the form that a session opens."""
        return path_or_bytes(self.model)

    @property
    def label(self) -> str:
        """The model in reports."""
        return os.fspath(self.model) if isinstance(self.model, (str, os.PathLike)) else "model in memory"


@dataclass(frozen=True)
class Prepared:
    """A graph and its plan.

    Attributes:
        graph: simplified and fused float graph. Equalization changes it in place.
        plan: what will be quantized.
        recipe, backend: the settings and the runtime's rules that the plan follows.
        nodes_before: number of nodes in the file, branches included.
        applied: patterns that fired.
        refusals: what patterns and planning declined.
        layers: torch modules and functions that the nodes of the file belong to.
        first_layer: what the first layer of the file expects of images; None: nothing is known.
        corrects: biases are corrected by measured mean errors.
        measured: whether the graph was equalized by measured activations.
    """

    graph: Graph
    plan: Plan  # absent until the stage `plan`
    recipe: Recipe
    backend: Backend
    nodes_before: int = 0
    applied: tuple[Fired, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    layers: Modules = field(default_factory=lambda: Modules(()))
    first_layer: FirstLayer | None = None
    corrects: bool = False
    measured: bool = False

    @property
    def needs_data(self) -> bool:
        """Whether calibration data is needed: static mode, activation sites, or a float type other than fp32."""
        return self.recipe.mode == "static" or bool(self.plan.of_role("activation")) or self.plan.float_type != "fp32"


@dataclass(frozen=True)
class PipelineState:
    """Values that the stages have produced so far; absent until the stage that sets them has run, see `Stage`.

    Attributes:
        request: what was asked for.
        prepared: graph and plan.
        opset: minimum opset of the graph.
        overrides: types of single tensors that `widen_activations` chose, by name.
        original: names and counts of the model as it was given.
        data: calibration and hold-out samples; None: none needed or none given.
        doubts: sentences about data that does not look like that of the model.
        removed: the pruned graph; None: nothing was pruned.
        rounding: how weights are rounded, in place of what the recipe says.
        ranges: measured ranges of activations; None: nothing was measured.
        magnitudes: of all float tensors, if they were measured with the ranges.
        solution: scales, zero points and quantized weights.
        quantized: the graph with Q/DQ pairs or integer operators.
        unwritten: what could not be written in the format of the recipe.
        report: the result.
        comparison: the comparison with float; None: not verified.
        simplified: report of a simplification; None: the model was not only simplified.
    """

    request: Request
    prepared: Prepared = ABSENT
    opset: int = BASE_OPSET
    overrides: Mapping[str, TensorOverride] = field(default_factory=dict)
    original: Original | None = None
    data: HeldOutSplit | None = None
    doubts: tuple[Note, ...] = ()
    removed: Pruned | None = None
    rounding: WeightRounding | None = None
    ranges: MeasuredRanges | None = None
    magnitudes: Mapping[str, Magnitudes] | None = None
    solution: Solution = ABSENT
    quantized: Graph = ABSENT
    unwritten: tuple[Refusal, ...] = ()
    report: Report = ABSENT
    comparison: Comparison | None = None
    simplified: SimplifyReport | None = None

    @classmethod
    def of(cls, request: Request) -> PipelineState:
        """Return the state before the first stage."""
        return cls(request)

    @property
    def present(self) -> frozenset[Value]:
        """The values that are set, apart from those that can be None."""
        prepared = self.prepared
        values: dict[Value, object] = {
            "graph": prepared,
            "plan": None if prepared is None else prepared.plan,
            "solution": self.solution,
            "quantized": self.quantized,
            "report": self.report,
            "removed": self.removed,
            "pruned": self.request.pruned,
            "simplified": self.simplified,
        }
        return frozenset(name for name, value in values.items() if value is not None)

    def refused(self, *refusals: Refusal) -> PipelineState:
        """Return the state with further refusals of the preparation, each once."""
        unique = dict.fromkeys((*self.prepared.refusals, *refusals))
        return replace(self, prepared=replace(self.prepared, refusals=tuple(unique)))


def read_recipe(
    recipe: Any, backend: str | None, overrides: Mapping[str, Any] | Sequence[str]
) -> tuple[Recipe, Backend]:
    """Load and validate the recipe, and return it with its backend.

    Args:
        overrides: values by key, or texts "KEY=VALUE".

    Raises:
        RecipeError: as `sbonnx.recipe.load`.
    """
    loaded = recipes.load(recipe, backend=backend, overrides=overrides)
    return loaded, backend_for(loaded.backend, loaded.version)


def run_options(recipe: Recipe, progress: Progress | None = None) -> RunOptions:
    """Return the options of a run that a recipe asks for."""
    calibration = recipe.calibration
    return RunOptions(
        device=recipe.device,
        threads=calibration.threads,
        memory=calibration.memory,
        granularity=calibration.granularity,
        cache=calibration.cache,
        progress=progress or Silent(),
    )


def equalization_of(recipe: Recipe) -> Equalization:
    """Return the equalization settings of a recipe."""
    return Equalization.of(
        recipe.equalize,
        smooth=_smoothing(recipe),
        per_channel=is_per_channel(recipe.w.qscheme),
        bits=recipe.w.quantizer.bit,
    )


def _smoothing(recipe: Recipe) -> tuple[float | None, float] | None:
    """Return the strengths of SmoothQuant for convolutions and for products."""
    strength = recipe.equalize.smooth_quant
    if strength == "auto":
        static = recipe.mode == "static" and recipe.w.quantizer.bit and recipe.a.quantizer.bit
        return (None, SMOOTH[1]) if static else None
    if isinstance(strength, bool):
        return SMOOTH if strength else None
    return (float(strength), float(strength))


def reconstruction_of(prepared: Prepared) -> Reconstruction | None:
    """Return the settings of input-aware weight rounding (second moments of the inputs); None if it is not used."""
    if not prepared.corrects and not any(looks_at_inputs(site) for site in prepared.plan.of_role("weight")):
        return None
    calibration = prepared.recipe.calibration
    samples = prepared.recipe.rounding_samples
    return Reconstruction.of(calibration.moments, correct=prepared.corrects, seed=calibration.seed, samples=samples)


def rounding_of(prepared: Prepared) -> WeightRounding:
    """Return how the weights of a plan are rounded.

    If weights are rounded on quantized inputs, the data pass the quantized layers anyway. Ranges are then measured
    there too, unless the recipe disables it.
    """
    section, reconstruction = prepared.recipe.calibration.asym, reconstruction_of(prepared)
    on = section.enable if section.enable is not None else reconstruction is not None and reconstruction.quantized
    inputs = QuantizedInputs(ranges=section.ranges, rounding=section.rounding) if on else None
    return WeightRounding(round_by_site, inputs, reconstruction)


def round_by_site(site: Site, weight: Array, qparams: QParams) -> Array:
    """Round a weight to integer codes by the method that its site names."""
    return make_rounder(site.rounding.name, site.rounding.arguments).round(weight, qparams).codes
