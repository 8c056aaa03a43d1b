"""Description of a model for its page and for other viewers: nodes, ranges, losses, reasons."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from sbonnx import pipeline, qdq
from sbonnx.backends import BACKENDS
from sbonnx.errors import ModelError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import open_model
from sbonnx.present.html import graph_page
from sbonnx.profiling import WalkOptions, details, file_losses, subject_of, with_float_reasons
from sbonnx.report import Note, Refusal
from sbonnx.report.details import Details
from sbonnx.spec import Array
from sbonnx.stages.state import read_recipe
from sbonnx.verify.runtimes import RECORDED

Source = str | os.PathLike[str]
Feeds = Callable[[Graph], Iterable[Mapping[str, Array]]]
"""Reads the feeds of a model; called with its graph."""

HISTOGRAMS: Final = 200
"""Maximum number of tensors with a histogram."""


@dataclass(frozen=True)
class ModelView:
    """A model as its page and other viewers show it.

    Attributes:
        file: the file that is described.
        details: nodes with types, ranges, losses and the reasons why they stay float.
        more: what the page is about, behind the name of the file.
        refusals: those reasons, with the ones of tensors.
        notes: messages about the import of the file.
    """

    file: Path
    details: Details
    more: str
    refusals: tuple[Refusal, ...]
    notes: tuple[Note, ...] = ()

    def page(self) -> str:
        """Render the HTML page."""
        return graph_page(self.details, title=self.file.name, more=self.more, refusals=self.refusals, notes=self.notes)


def view_of(
    model: Source,
    quantized: Source | None = None,
    feeds: Feeds | None = None,
    *,
    backend: str | None = None,
    recipe: Any = None,
    device: str = "cpu",
) -> ModelView:
    """Describe a float model with the types that a recipe plans, or a quantized file with its pairs.

    Args:
        model: float, or quantized by any tool.
        quantized: quantized file of the float `model`.
        feeds: those on which losses and histograms are measured; needs both files.
        backend, recipe: of the plan. For a quantized file, the plan says why nodes stay float; default: the backend
            that the file records, or onnxruntime.
        device: on which the models run.

    Raises:
        RecipeError: options that exclude each other.
        ModelError: a file cannot be read.
        DataError: the data do not fit the model.
    """
    file = Path(model if quantized is None else quantized)
    stored = open_model(file).model  # without building the graph, which the plan does again
    if quantized is None and not qdq.has_quantized_ops(stored):
        if feeds is not None:
            raise RecipeError(
                f"{file} is a float model, which has no losses: give its quantized file as well, or use "
                "sbonnx quantize --report FILE.html"
            )
        return _planned(file, backend, recipe)
    if feeds is not None and quantized is None:
        raise RecipeError(f"losses of {file} are against its float model: sbonnx view FLOAT {file} --data DATA")
    recorded = next((entry.value for entry in stored.metadata_props if entry.key == RECORDED), "")
    is_given = backend or recipe or recorded.partition("@")[0] not in BACKENDS
    return _quantized(file, Path(model), feeds, backend if is_given else recorded, recipe, device)


def _planned(file: Path, backend: str | None, recipe: Any) -> ModelView:
    settings, rules = read_recipe(recipe, backend, ())
    prepared = pipeline.prepare(file, settings, rules)
    refusals = tuple(dict.fromkeys((*prepared.refusals, *prepared.plan.refusals)))
    described = details(prepared.graph, prepared.plan, None, None, refusals=refusals)
    described, reasons = with_float_reasons(described, rules)
    more = f"float, with the types that are planned for {rules.name}"
    return ModelView(file, described, more, (*refusals, *reasons))


def _quantized(
    file: Path, model: Path, feeds: Feeds | None, backend: str | None, recipe: Any, device: str
) -> ModelView:
    """Describe a quantized file, with the reasons of a plan of the float model, or of the file without its pairs."""
    subject = subject_of(model, file)
    refusals, planned, notes = _reasons(model, backend, recipe)
    quantized = {reader.node for site in subject.plan.sites for reader in site.readers}
    refusals = tuple(refusal for refusal in refusals if refusal.what != "quantize" or refusal.where not in quantized)
    described = details(
        subject.graph,
        subject.plan,
        subject.solution,
        None if feeds is None else feeds(subject.graph),
        refusals=refusals,
        options=WalkOptions(device=device, histograms=HISTOGRAMS),
        profiled=partial(file_losses, model, file),
    )
    _, rules = read_recipe(recipe, backend, ())
    described, reasons = with_float_reasons(described, rules, planned)
    both = model != file
    more = f"quantized{f', against {model.name}' if both else ''}; reasons of {rules.name}"
    return ModelView(file, described, more, (*refusals, *reasons), (*(subject.notes if both else ()), *notes))


def _reasons(
    model: Path, backend: str | None, recipe: Any
) -> tuple[tuple[Refusal, ...], frozenset[str], tuple[Note, ...]]:
    """Plan a model; return refusals, names of the nodes that are quantized, and why there is no plan, if so."""
    settings, rules = read_recipe(recipe, backend, {"REQUANTIZE": True})
    try:
        prepared = pipeline.prepare(model, settings, rules)
    except ModelError as error:
        why = f"the plan for {rules.name}, which says why nodes stay float, cannot be made: {error}"
        return (), frozenset(), (Note("not-planned", why),)
    refusals = dict.fromkeys((*prepared.refusals, *prepared.plan.refusals))
    nodes = frozenset(reader.node for site in prepared.plan.sites for reader in site.readers)
    return tuple(refusal for refusal in refusals if refusal.code != "pairs-removed"), nodes, ()
