"""Advice for a file that is slower than float on this machine: which layers to leave in float, measured.

The estimate that placed the integers (`plan.times`) was too optimistic here. Kernels in integers are made more
expensive by the factor between the measured ratio and the estimated one, and the minimum cut is taken again. The result
is a command with the names of the layers: the bytes of a file never depend on a measured time (docs/decisions/0014).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from sbonnx.backends import Backend
from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.calib.observers import OBSERVERS
from sbonnx.planning import Plan, costs_of, make, plan_times
from sbonnx.recipe.names import FLOAT
from sbonnx.report.comparison import Comparison
from sbonnx.search.actions import RecipeChange, left_in_float
from sbonnx.stages.state import PipelineState
from sbonnx.system.cpu import TargetCpu

STEPS: Final = (1.0, 1.5)
"""Factors by which the correction is enlarged, tried in order."""

ALTERNATIVES: Final = (
    RecipeChange("integers do not pay here: store the weights alone in integers", {"MODE": "weight_only"}),
    RecipeChange("static integers do not pay here: compute scales at run time", {"MODE": "dynamic"}),
    RecipeChange(
        "integers do not pay here: store the model in half precision",
        {"HIGH_PRECISION": "fp16", "W.QUANTIZER.BIT": FLOAT, "A.QUANTIZER.BIT": FLOAT},
    ),
)
"""Changes of a recipe whose file is neither smaller nor faster than float, or slower, tried in order."""


def faster(state: PipelineState, comparison: Comparison) -> Iterator[RecipeChange]:
    """Yield the changes that may make a file faster than float, those with the most layers in integers first.

    Args:
        state: of a finished run.
        comparison: its measured latency.
    """
    prepared = state.prepared
    recipe, backend, graph = prepared.recipe, prepared.backend, prepared.graph
    costs = costs_of(recipe, backend)
    if recipe.heads != "none" and any(note.code == "head-left-float" for note in state.report.notes):
        yield RecipeChange("quantize the detection head as well", {"heads": "none"})
    if costs is None or recipe.mode != "static" or comparison.latency_ratio is None:
        return
    time_of = plan_times(graph, costs)
    floats, estimated = time_of(Plan(())), time_of(prepared.plan)
    if not floats or not estimated:
        return
    slow_layers, _ = _slower(state, backend)
    for step in STEPS:
        factor = step * comparison.latency_ratio * floats / estimated
        slower, integers = _slower(state, slowed(backend, max(factor, 1.0)))
        names = slower - slow_layers
        if names and integers:  # else nothing is left to quantize: the float model is the faster file
            yield left_in_float(recipe, sorted(names), "more")
            slow_layers = slow_layers | names


def slowed(backend: Backend, factor: float) -> Backend:
    """Return a backend whose integer kernels take `factor` times as long as its table says."""
    load = backend.costs
    if load is None:
        return backend

    def costs(path: str | None, cpu: TargetCpu) -> KernelCosts:
        return load(path, cpu).slowed(factor)

    return replace(backend, costs=costs)


def _slower(state: PipelineState, backend: Backend) -> tuple[set[str], bool]:
    """Return the layers that are slower in integers by the costs of a backend, and whether any others are left."""
    plan = make(state.prepared.graph, state.prepared.recipe, backend, observers=frozenset(OBSERVERS))
    slower = {refusal.where for refusal in plan.refusals if refusal.code == "slower-in-integers"}
    return slower, bool(plan.of_role("weight"))
