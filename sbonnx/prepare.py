"""Preparation without data: load, simplify, fuse, plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx import export, patterns, precision, qdq
from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx.backends import Backend, backend_for
from sbonnx.backends.tensorrt.profiles import VERSIONS
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.observers import OBSERVERS
from sbonnx.calib.qparams.solve import weights_alone
from sbonnx.calib.quantized.stream import Asym
from sbonnx.correct import give_biases, own_statistics, record_normals
from sbonnx.correct.analytic import correct_analytically
from sbonnx.equalize import Equalization, equalize, equalize_measured, wanted_ranges
from sbonnx.equalize import channel_ranges as peaks
from sbonnx.equalize.awq_calibrate import scale_by_activations
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, edit, query
from sbonnx.ops import EMBEDDING
from sbonnx.plan import Plan, Site, Solution, make
from sbonnx.progress import Progress
from sbonnx.recipe import Recipe
from sbonnx.recipe.node_patterns.torch_modules import Modules, NodeInfo
from sbonnx.recipe.schemes import is_per_channel
from sbonnx.reconstruct.layer_inputs import looks_at_inputs
from sbonnx.reconstruct.layerwise import Reconstruction
from sbonnx.report import Fired, Refusal
from sbonnx.rounding import make_rounder
from sbonnx.spec import Array, QParams

Source = str | os.PathLike[str] | onnx.ModelProto

DEFAULT_BACKEND = "onnxruntime"
"""Backend if neither the call nor the recipe names one."""

BASE_OPSET = 13
"""First opset whose Q/DQ support per-channel scales."""

BATCH_NORM = "fuse_bn"
"""Name prefix of the patterns that apply only if the recipe folds batch norms."""


UNSEEN = "no data was given: weights go to the nearest codes, and their rounding did not see what layers meet"
"""Note if input-aware rounding has no data: weights are rounded to nearest."""


@dataclass(frozen=True)
class Prepared:
    """A graph ready for calibration.

    Attributes:
        graph: simplified and fused float graph.
        plan: what will be quantized.
        recipe, backend: the settings and the runtime's rules that the plan follows.
        nodes_before: number of nodes in the file, branches included.
        applied: patterns that fired.
        refusals: what patterns and planning declined.
        layers: torch modules and functions that the nodes of the file belong to.
        corrects: biases are corrected by measured mean errors.
        measured: whether the graph has been through `equalized`.
    """

    graph: Graph
    plan: Plan
    recipe: Recipe
    backend: Backend
    nodes_before: int
    applied: tuple[Fired, ...]
    refusals: tuple[Refusal, ...]
    layers: Modules = field(default_factory=lambda: Modules(()))
    corrects: bool = False
    measured: bool = False

    @property
    def needs_data(self) -> bool:
        """Whether calibration data is needed: static mode, activation sites, or a float type other than fp32."""
        return self.recipe.mode == "static" or bool(self.plan.of_role("activation")) or self.plan.float_type != "fp32"

    @property
    def reconstruction(self) -> Reconstruction | None:
        """Settings of input-aware weight rounding (second moments of the input activations); None if unused."""
        wishes = self.recipe.calibration.moments
        correct = self.corrects
        if not correct and not any(looks_at_inputs(site) for site in self.plan.of_role("weight")):
            return None
        return Reconstruction(
            wishes.inputs == "quantized", wishes.share, wishes.rows, correct, self.recipe.calibration.seed
        )

    @property
    def asym(self) -> Asym | None:
        """Settings for measuring activations downstream of quantized layers; None: in the float network.

        If weights are rounded on quantized inputs, the data pass the quantized layers anyway. Ranges are then measured
        there too, unless the recipe disables it.
        """
        wishes, rounding = self.recipe.calibration.asym, self.reconstruction
        on = wishes.enable if wishes.enable is not None else rounding is not None and rounding.quantized
        return Asym(ranges=wishes.ranges, rounding=wishes.rounding) if on else None

    def round(self, site: Site, weight: Array, qparams: QParams) -> Array:
        """Round a weight to integer codes by the method that its site names."""
        choice = site.rounding
        return make_rounder(choice.name, choice.arguments).round(weight, qparams).codes

    def without_data(self) -> Solution:
        """Solve the weights alone, without measurements; add a note if their rounding would use input activations."""
        found = weights_alone(self.graph, self.plan, self.round)
        return found if self.reconstruction is None else replace(found, notes=(*found.notes, UNSEEN))

    def corrected(self, solution: Solution) -> Solution:
        """Correct the biases of `solution` by batch-norm statistics if the recipe asks for it."""
        if self.recipe.bias_correction != "analytic":
            return solution
        return correct_analytically(self.graph, self.plan, solution)

    def equalized(self, samples: Dataset | None, progress: Progress | None = None) -> Prepared:
        """In place. Apply the equalization steps that need data, and return the value with a new plan.

        If any such step is requested, do not use the old value any more: its plan is that of the unchanged graph.

        Raises: as `channel_ranges`.
        """
        settings = equalization_of(self.recipe)
        if self.measured:
            return self
        if not settings.needs_ranges:
            return self._scaled(samples, progress)
        wanted = wanted_ranges(self.graph, settings)
        if samples is None:
            refusal = Refusal("equalize", "EQUALIZE", "there are no data to measure the ranges of channels on")
            return replace(self, refusals=(*self.refusals, refusal))
        wishes = self.recipe.calibration
        ranges = peaks.channel_ranges(
            self.graph,
            wanted,
            samples,
            device=self.recipe.device,
            memory=wishes.memory,
            threads=wishes.threads,
            progress=progress,
        )
        done = equalize_measured(self.graph, settings, ranges)
        plan = make(self.graph, self.recipe, self.backend, observers=frozenset(OBSERVERS))
        known = [refusal for refusal in self.refusals if refusal not in self.plan.refusals]
        return replace(
            self,
            measured=True,
            plan=plan,
            applied=(*self.applied, *done.fired),
            refusals=(*known, *done.refusals, *plan.refusals),
        )._scaled(samples, progress)

    def _scaled(self, samples: Dataset | None, progress: Progress | None) -> Prepared:
        """Apply the step of `equalized` that scales weights before rounding, EQUALIZE.AWQ. The plan stays valid."""
        if not self.recipe.equalize.awq:
            return self
        if samples is None:
            refusal = Refusal("scale by activations", "EQUALIZE.AWQ", "there are no data to see what products meet")
            return replace(self, refusals=(*self.refusals, refusal))
        wishes = self.recipe.calibration
        done, refusals = scale_by_activations(
            self.graph,
            self.plan,
            samples,
            device=self.recipe.device,
            threads=wishes.threads,
            memory=wishes.memory,
            progress=progress,
        )
        fired = [Fired("awq_mul" if one.multiplied else "awq", one.tensor) for one in done]
        if done:
            least, most = min(one.share for one in done), max(one.share for one in done)
            text = f"inputs of products scaled by what they meet: output errors {least:.0%} to {most:.0%} of before"
            self.graph.info.notes.append(text)
        told = (*self.refusals, *refusals)
        return replace(self, measured=True, applied=(*self.applied, *fired), refusals=told)

    def quantized(self, solution: Solution) -> Graph:
        """Return the quantized graph: a copy of `graph` with the Q/DQ pairs of `solution`, made legal for the backend.

        The recipe's MODE or FORMAT may replace the pairs by other operators; see `written`.
        """
        return self.written(solution)[0]

    def written(self, solution: Solution) -> tuple[Graph, tuple[Refusal, ...]]:
        """Return `quantized` and refusals: what could not be written in the format of the recipe."""
        graph = graphs.copy(self.graph)
        qdq.insert(graph, self.plan, solution)
        refusals = self._converted(graph, solution)
        changes = self.backend.legalise(graph)
        if changes:
            more = f", and {len(changes) - 1} more such changes" if len(changes) > 1 else ""
            graph.info.notes.append(
                f"written as {self.backend.name} wants it, with the same numbers: {changes[0]}{more}"
            )
        converted = export.finish(graph, self.recipe)
        if converted is None:
            return graph, refusals
        graph.info.notes.append(f"written in place of Q/DQ: {converted.text()}")
        return graph, (*refusals, *converted.refusals)

    def _converted(self, graph: Graph, solution: Solution) -> tuple[Refusal, ...]:
        """In place. Convert the float part to the type of HIGH_PRECISION; return what was not converted, and why."""
        if self.plan.float_type == "fp32":
            return ()
        done = precision.convert(graph, solution.magnitudes, self.plan.float_type, keep_io=self.recipe.keep_io)
        graph.info.notes.extend(done.notes)
        return done.refusals


def read_recipe(
    recipe: Any, backend: str | None, overrides: Mapping[str, Any] | Sequence[str]
) -> tuple[Recipe, Backend]:
    """Load and validate the recipe, and return it with its backend.

    Args:
        overrides: values by key, or texts "KEY=VALUE".

    Raises:
        RecipeError: as `sbonnx.recipe.load`.
    """
    if recipe in (None, recipes.AUTO) and backend is None and "backend" not in {key.lower() for key in overrides}:
        backend = DEFAULT_BACKEND
    wishes = recipes.load(recipe, backend=backend, overrides=overrides)
    return wishes, backend_for(wishes.backend, wishes.version)


def prepare(model: Source, recipe: Recipe, backend: Backend, *, fusions: Sequence[str] | None = None) -> Prepared:
    """Load `model`, simplify and fuse it, and plan. The file is not modified.

    If the plan needs a newer opset than the file has (4-bit and 16-bit integers: 21; float16 scales: 19), the graph is
    converted to it and planned again.

    Args:
        fusions: names of the patterns of `sbonnx.patterns.FUSE` to apply, or prefixes of them; None: all.

    Raises:
        ModelError: the file cannot be used, is quantized already, or is newer than the runtime reads.
        RecipeError: a pattern of the recipe matches nothing, or asks for something that does not exist.
    """
    prepared = _prepare(model, recipe, backend, BASE_OPSET, fusions)
    needed = _opset_needed(prepared)
    _check_readable(prepared.graph, needed, backend)
    if prepared.graph.opset < needed:
        prepared = _prepare(model, recipe, backend, needed, fusions)
    return prepared


def _prepare(model: Source, recipe: Recipe, backend: Backend, opset: int, chosen: Sequence[str] | None) -> Prepared:
    graph = graphs.load(model, opset=opset)
    nodes_before = sum(len(body.nodes) for _, body in query.scopes(graph))
    refusals: list[Refusal] = list(qdq.make_float(graph, requantize=recipe.requantize))
    infos = _infos(graph)
    recipe, skipped = recipe.for_model(infos, list(query.tensors_by_name(graph)))
    why = "no node in the file belongs to it, so that nothing needs to be skipped. "
    refusals += [Refusal("skip", f"SKIP_TRACE_MODULES '{name}'", why + hint) for name, hint in skipped.items()]
    applied: list[Fired] = []
    fusions = _fusions(recipe, chosen)
    for step in (patterns.SIMPLIFY if recipe.simplify else (), fusions):
        if step is fusions:
            record_normals(graph)
        done = patterns.apply(graph, step)
        applied.extend(done.fired)
        refusals.extend(done.refusals)
    depthwise = any(query.is_depthwise(node) for _, body in query.scopes(graph) for node in body.nodes)
    corrects = recipe.corrects_biases(depthwise=depthwise)
    if corrects or recipe.bias_correction == "analytic" or recipe.schedule.bn_tuning:
        give_biases(graph)
    if recipe.schedule.bn_tuning:
        own_statistics(graph)
    equalized = equalize(graph, equalization_of(recipe))
    applied.extend(equalized.fired)
    refusals.extend(equalized.refusals)
    edit.sort(graph)
    plan = make(graph, recipe, backend, observers=frozenset(OBSERVERS))
    _note_half_precision(graph, plan)
    if recipe.auto.enable or recipe.mixed.wanted:
        why = "only sbonnx.quantize and the verb quantize try recipes: this is the one that they begin with"
        refusals.append(Refusal("search", "AUTO" if recipe.auto.enable else "MIXED", why))
    return Prepared(
        graph=graph,
        plan=plan,
        recipe=recipe,
        backend=backend,
        nodes_before=nodes_before,
        applied=tuple(applied),
        refusals=(*refusals, *plan.refusals),
        layers=Modules(infos),
        corrects=corrects,
    )


SMOOTH: Final = (0.3, 0.5)
"""Strengths for EQUALIZE.SMOOTH_QUANT: true, of convolutions and matrix products. Measured: MobileNetV2, MiniLM."""


def equalization_of(recipe: Recipe) -> Equalization:
    """Return the equalization settings of the recipe."""
    wishes = recipe.equalize
    strength = wishes.smooth_quant
    smooth = SMOOTH if strength is True else None if strength is False else (float(strength), float(strength))
    return Equalization(
        cross_layer=wishes.cross_layer,
        clips=wishes.clip,
        absorb_bias=wishes.absorb_bias,
        smooth=smooth,
        split=wishes.split_channels,
        per_channel=is_per_channel(recipe.w.qscheme),
        bits=recipe.w.quantizer.bit,
    )


def _infos(graph: Graph) -> list[NodeInfo]:
    """Collect, for every node, the metadata from which the names of torch modules are derived."""
    found = []
    for _, body in query.scopes(graph):
        for node in body.nodes:
            held = node.inputs[0 if node.op in EMBEDDING else 1 :][:1]
            weight = held[0].name if held and isinstance(held[0], Constant) else ""
            kind = query.dtype(node.outputs[0]) if node.outputs else None
            found.append(
                NodeInfo(
                    node.name,
                    node.op,
                    graphs.node_metadata(graph, node.name),
                    weight if weight.endswith(".weight") else "",
                    integer=kind is not None and kind.kind in "iub",
                )
            )
    return found


def _fusions(recipe: Recipe, chosen: Sequence[str] | None) -> tuple[Any, ...]:
    folds = recipe.schedule.fuse_bn or recipe.schedule.bn_tuning
    found = [pattern for pattern in patterns.FUSE if folds or not pattern.name.startswith(BATCH_NORM)]
    return tuple(pattern for pattern in found if chosen is None or pattern.name.startswith(tuple(chosen)))


def _note_half_precision(graph: Graph, plan: Plan) -> None:
    """Add a note that float16 has no integer kernels on onnxruntime's CPU, so that Q/DQ gain nothing there."""
    if plan.backend != "virtual":
        return  # onnxruntime's backend leaves float16 alone, and TensorRT computes it
    tensors = query.tensors_by_name(graph)
    half = plan.float_type == "fp16" and bool(plan.sites)
    if half or any(query.dtype(tensors[site.tensor]) == np.dtype(np.float16) for site in plan.sites):
        graph.info.notes.append(
            "float16 behind Q/DQ: onnxruntime's CPU has no integer kernels for it and computes the codes of "
            "biases in half precision, which can lose them; quantize the float32 model"
        )


def _opset_needed(prepared: Prepared) -> int:
    tensors = query.tensors_by_name(prepared.graph)
    sites = [site for site in prepared.plan.sites if site.role != "bias"]
    half = any(query.dtype(tensors[site.tensor]) == np.dtype(np.float16) for site in sites)
    half = half or (prepared.plan.float_type != "fp32" and bool(sites))
    pairs = qdq.opset_needed([(site.role, site.spec) for site in sites], half=half)
    return max(BASE_OPSET, precision.OPSET[prepared.plan.float_type], pairs)


def _check_readable(graph: Graph, needed: int, backend: Backend) -> None:
    """Check that the runtime's parser supports the opset of the result.

    Raises:
        ModelError: it is newer than the opset that the version is documented for.
    """
    profile, own = backend.profile, graph.info.original_opset
    if profile is None or max(own, needed) <= profile.newest_opset:
        return
    what = f"has opset {own}" if own > profile.newest_opset else f"needs opset {needed} for the types of its Q/DQ"
    raise ModelError(
        f"{graph.info.path or 'the model'} {what}; the parser of {profile.name} reads up to {profile.newest_opset}: "
        f"export it with that opset or an older one, or quantize for a newer version (such as tensorrt@{VERSIONS[0]})"
    )


def source_of(model: Source) -> Path | bytes:
    """Return the input of a session: the path, or the bytes of a model in memory."""
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else Path(model)
