"""Calibrate several plans of one model in one pass over the data, which fills the cache of each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.cache.sketch_cache import CalibrationCache
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.runner import LayerRunner, settings
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.engine.schedule import branches_of, bytes_for_sample
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.threads import within
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.digests import outputs_digest, tensor_digests
from sbonnx.graph.query import scopes, shape
from sbonnx.planning.types import Plan, Site

TRIED: Final = 2
"""Number of samples on which values are compared."""


@dataclass(frozen=True)
class EqualTensors:
    """Result of a comparison of two graphs.

    Attributes:
        same: tensors with equal digests or bit-identical values.
        unseen: tensors of branches that ran in neither graph.
    """

    same: frozenset[str] = frozenset()
    unseen: frozenset[str] = field(default=frozenset())


def equal_tensors(one: Graph, other: Graph, names: Sequence[str], samples: Samples, *, budget: int) -> EqualTensors:
    """Find those of `names` that have the same values in both graphs.

    Tensors with equal digests have the same values. The others are computed in both graphs on the first `TRIED`
    samples, normally by the same kernels, and compared bit by bit.

    Args:
        names: tensors; those that are not in both graphs, in the same scope, do not count as equal.
        samples: of `one`.
        budget: bytes for the tensors computed at a time.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    here, there = tensor_scopes(one), tensor_scopes(other)
    common = [name for name in names if name in here and here[name] == there.get(name)]
    ours, theirs = tensor_digests(one), tensor_digests(other)
    same = {name for name in common if ours[name] == theirs[name]}
    unsure = [name for name in common if name not in same]
    feeds, other_feeds = ([(tensor.name, shape(tensor)) for tensor in graph.inputs] for graph in (one, other))
    if not unsure or feeds != other_feeds:
        return EqualTensors(frozenset(same))
    units = list(islice(samples.units(), TRIED))
    unseen: set[str] = set()
    sizes = bytes_for_sample(one, units[0]) if units else {}
    for some in within(unsure, lambda name: sizes.get(name, 0), budget):
        digests = [
            _values(graph, [(name, here[name]) for name in some], units, samples.options.device)
            for graph in (one, other)
        ]
        for name in some:
            pairs = [(ours.get(name), theirs.get(name)) for ours, theirs in zip(*digests, strict=True)]
            if all(a is None and b is None for a, b in pairs):
                unseen.add(name)
            elif all(_equal(a, b) for a, b in pairs):
                same.add(name)
    return EqualTensors(frozenset(same), frozenset(unseen) if units else frozenset())


def tensor_scopes(graph: Graph) -> dict[str, str]:
    """Return the scope of each tensor that is an input or computed, by name."""
    by_tensor = {tensor.name: "" for tensor in graph.inputs}
    for scope, body in scopes(graph):
        by_tensor.update({tensor.name: scope for tensor in body.inputs} if scope else {})
        by_tensor.update({tensor.name: scope for node in body.nodes for tensor in node.outputs if tensor.name})
    return by_tensor


def _values(
    graph: Graph, names: Sequence[tuple[str, str]], units: Sequence[Sample], device: str
) -> list[dict[str, Any]]:
    """Compute values by name for each sample. Tensors of branches that do not run are left out."""
    observed: dict[str, list[str]] = {}
    for name, scope in names:
        observed.setdefault(scope, []).append(name)
    segments, _, handed_on = branches_of(graph, observed)
    fed = {tensor.name for tensor in graph.inputs}
    wanted = [name for name in dict.fromkeys([*observed.get("", ()), *handed_on]) if name not in fed]
    tensors: list[dict[str, Any]] = [dict(unit.feed) for unit in units]
    with ExitStack() as stack:
        main = [Segment(tuple(tensor.name for tensor in graph.inputs), tuple(wanted), ())] if wanted else []
        for segment in (*main, *segments):
            run = stack.enter_context(LayerRunner(segment.model(graph), device=device, threads=1))
            for unit, values in zip(units, tensors, strict=True):
                if segment.runs_with(values):
                    values.update(run.run(values, segment.outputs, where=unit.where))
    return tensors


def _equal(one: Any, other: Any) -> bool:
    """Return whether two arrays are bit-identical, NaN and the sign of zero included."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


Walk = Callable[["CalibrationTask", Mapping[Key, Site], Samples], Mapping[Key, Sketch]]
"""Returns the sketches of sites: (task, sites, samples)."""


@dataclass
class CalibrationTask:
    """A graph and the sites that any plan on it observes.

    Attributes:
        name: digest of the graph, which is the name of its folder.
        graph: simplified and fused; not changed.
        sites: one per tensor and axis.
    """

    name: str
    graph: Graph
    sites: dict[Key, Site]


class CalibrationTasks:
    """Collects plans by the function of their graphs: graphs that compute the same share a task."""

    def __init__(self) -> None:
        self.found: dict[str, CalibrationTask] = {}

    def add(self, graph: Graph, plan: Plan) -> str:
        """Add the activation sites of `plan`; return the name of the folder of their statistics.

        The first of equal graphs is kept. Tensors are identified by name: equal graphs that were prepared from one file
        in the same way have the same names.
        """
        name = outputs_digest(graph)
        task = self.found.setdefault(name, CalibrationTask(name, graph, {}))
        there = tensor_scopes(task.graph)
        for site in plan.of_role("activation"):
            if site.fixed is None and there.get(site.tensor) == site.scope:
                task.sites.setdefault((site.tensor, site.spec.axis), site)
        return name


def observe_tasks(
    tasks: Iterable[CalibrationTask],
    samples: Callable[[Graph], Samples],
    root: Path,
    walk: Walk | None = None,
) -> tuple[str, ...]:
    """Fill the caches `root / task.name` with the statistics of all tasks, in as few passes as possible.

    Statistics that are already cached are not measured again. Different graphs, for example of different opsets, share
    a pass for the tensors that are equal in both, see `equal_tensors`. The rest is measured separately.

    Args:
        samples: those of a graph.
        root: existing folder; each task has its own cache in it, for `calibrate(cache=...)`.
        walk: runs the data through a graph instead of a `Calibrator`, for example some of the samples only. Plans,
            graphs and caches are then the same as without it.

    Returns:
        Notes of the caches.

    Raises: see `calibrate`.
    """
    waiting = [
        _open_cache(task, samples(task.graph), root) for task in sorted(tasks, key=lambda task_left: task_left.name)
    ]
    while any(task_left.sites for task_left in waiting):
        lead = max(waiting, key=lambda task_left: len(task_left.sites))
        others = [task_left for task_left in waiting if task_left is not lead and task_left.sites]
        lead_samples = samples(lead.task.graph)
        shared = [
            equal_tensors(
                lead.task.graph,
                task_left.task.graph,
                list(dict.fromkeys(name for name, _ in task_left.sites)),
                lead_samples,
                budget=lead_samples.options.memory_bytes // 4,
            )
            for task_left in others
        ]
        union = dict(lead.sites)
        for task_left, shares in zip(others, shared, strict=True):
            union.update({key: site for key, site in task_left.sites.items() if key[0] in shares.same | shares.unseen})
        seen = _run_walk(lead, union, lead_samples, root, walk)
        lead.sites.clear()
        for task_left, shares in zip(others, shared, strict=True):
            # sketches of equal tensors, and of branches that ran in neither graph, apply to both
            given = {
                key
                for key in task_left.sites
                if key[0] in shares.same or (key[0] in shares.unseen and not seen[key].samples)
            }
            task_left.cache.save({key: seen[key] for key in given})
            for key in given:
                del task_left.sites[key]
    return tuple(note for task_left in waiting for note in task_left.cache.notes)


@dataclass
class _PendingTask:
    """A task whose statistics are not complete yet.

    Attributes:
        cache: its calibration cache.
        sites: sites still to be measured.
    """

    task: CalibrationTask
    cache: CalibrationCache
    sites: dict[Key, Site]


def _open_cache(task: CalibrationTask, samples: Samples, root: Path) -> _PendingTask:
    """Open the cache of a task and find the sites that are not in it."""
    cache = CalibrationCache(root / task.name, task.graph, samples.data, settings(samples.options.device))
    cached = cache.load(task.sites)
    return _PendingTask(task, cache, {key: site for key, site in task.sites.items() if key not in cached})


def _run_walk(
    lead: _PendingTask, sites: Mapping[Key, Site], samples: Samples, root: Path, walk: Walk | None
) -> Mapping[Key, Sketch]:
    """Run the data through one graph once; return the sketches of `sites`, which are now in its cache."""
    task = lead.task
    if walk is not None:
        sketches = walk(task, sites, samples)
        lead.cache.save(sketches)
        return sketches
    plan = Plan(tuple(replace(site, key=f"{key[0]} {key[1]}") for key, site in sites.items()))
    with Calibrator(task.graph, plan, replace(samples.options, cache=root / task.name)) as calibrator:
        calibrator.observe_all(samples)
        return calibrator.sketches()
