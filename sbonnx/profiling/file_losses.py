"""Losses of a quantized file of any tool: its layers by simulation, its outputs by running both files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource, path_or_bytes
from sbonnx.planning.types import Plan, Solution
from sbonnx.profiling.checkers import Checker, Measure, Profile, Sqnr, make_measure
from sbonnx.profiling.layer_losses import compare, losses
from sbonnx.profiling.walk import DEFAULTS, Values, WalkOptions
from sbonnx.report.codes import Note
from sbonnx.spec import Array
from sbonnx.verify.runtimes import chosen_runtime, open_in
from sbonnx.verify.sessions import output_names, run, session

AGREES_DB: Final = 1.0
"""Maximum difference in dB between the loss of the files and the loss that the layers explain, without a note."""

EXACT_DB: Final = 100.0
"""Signal-to-noise ratio in dB above which outputs are considered equal."""


def file_losses(
    float_model: ModelSource,
    quantized: ModelSource,
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    *,
    checker: Checker = "sqnr",
    options: WalkOptions = DEFAULTS,
) -> Profile:
    """Measure the losses of the layers of an imported file, and its outputs as `sbonnx compare` does.

    The outputs are those of the float file in onnxruntime, and of the quantized one in its runtime. If the layers
    explain another loss than the files have, by more than `AGREES_DB`, the first notes say so and why.

    Args:
        float_model, quantized: the files.
        graph, plan, solution: the quantized file as imported by `subject_of`.
        data: feeds; iterated more than once.
        checker, options: see `losses`.

    Raises:
        RecipeError, DataError: see `losses`.
        ModelError: onnxruntime rejects one of the files.
    """
    file = path_or_bytes(quantized)
    runtime = chosen_runtime(None, [file] if isinstance(file, Path) else [], device=options.device)
    floats = session(path_or_bytes(float_model), device=options.device)
    whole = open_in(runtime, file, device=options.device)
    feeds = enumerate(data)
    outputs = _Outputs(checker, runtime)

    def add(imported: Values, simulated: Values) -> None:
        number, feed = next(feeds)
        reference, values = (
            dict(zip(output_names(model), run(model, feed, number), strict=True)) for model in (floats, whole)
        )
        outputs.add(reference, values, imported, simulated)

    profile = losses(graph, plan, solution, data, checker=checker, options=options, end=add)
    return replace(profile, outputs=outputs.values(), notes=(*outputs.notes(), *profile.notes))


class _Outputs:
    """Measures of the outputs: of the files, and of the imported file against the float model and against itself."""

    def __init__(self, checker: Checker, runtime: str) -> None:
        self._checker, self._runtime = checker, runtime
        self._files: dict[str, Measure] = {}
        self._decibels: dict[str, tuple[Sqnr, Sqnr, Sqnr, Sqnr]] = {}
        self._apart = 0

    def add(self, floats: Values, quantized: Values, imported: Values, simulated: Values) -> None:
        """Add one feed: outputs of both files, and of the imported file without and with its pairs."""
        for name, reference in floats.items():
            measured = self._files.setdefault(name, make_measure(self._checker))
            self._apart += compare(measured, quantized, {name: reference})
            if name not in simulated or name not in imported:
                continue
            pairs = ((quantized, floats), (simulated, floats), (simulated, imported), (imported, floats))
            sums = self._decibels.setdefault(name, (Sqnr(), Sqnr(), Sqnr(), Sqnr()))
            for measure, (values, against) in zip(sums, pairs, strict=True):
                compare(measure, values, {name: against[name]})

    def values(self) -> dict[str, float]:
        """Return the loss of the quantized file by output, without outputs that are not numeric."""
        results = {name: measure.result() for name, measure in self._files.items()}
        return {name: value for name, value in results.items() if not math.isnan(value)}

    def notes(self) -> list[Note]:
        """Return a message for each output whose loss the layers do not explain, and about outputs not compared."""
        notes = []
        for name, sums in self._decibels.items():
            whole, simulated, own, imported = (min(measure.result(), EXACT_DB) for measure in sums)
            if math.isnan(whole) or max(abs(whole - simulated), abs(simulated - own)) <= AGREES_DB:
                continue
            if abs(simulated - own) > AGREES_DB:
                why = (
                    f"without its pairs the file is {imported:.1f} dB from the float model, so the layers are compared "
                    "with other weights or another graph than the float model's"
                )
            else:
                why = f"the kernels of {self._runtime} round in other places than the pairs of the file, one by one"
            notes.append(
                Note(
                    "loss-not-explained",
                    f"'{name}': the file has {whole:.1f} dB and the layers explain {own:.1f} dB: {why}",
                )
            )
        if self._apart:
            notes.append(
                Note(
                    "outputs-not-compared",
                    f"{self._apart} outputs have another shape than in float, or are missing, and were not compared",
                )
            )
        return notes
