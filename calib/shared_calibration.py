"""Calibrate several plans of one model in one pass over the data, which fills the cache of each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sbonnx.calib.cache.sketch_cache import CalibrationCache
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import settings
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.equal_tensors import EqualTensors, equal_tensors, tensor_scopes
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.digests import outputs_digest
from sbonnx.options import RunOptions
from sbonnx.plan.types import Plan, Site

Walk = Callable[["CalibrationTask", Mapping[Key, Site], Dataset, RunOptions], Mapping[Key, Sketch]]
"""Returns the sketches of sites: (task, sites, data, options)."""


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
    """Collects plans by the function of their graphs: graphs that compute the same share a course."""

    def __init__(self) -> None:
        self.found: dict[str, CalibrationTask] = {}

    def add(self, graph: Graph, plan: Plan) -> str:
        """Add the activation sites of `plan`; return the name of the folder of their statistics.

        The first of equal graphs is kept. Tensors are identified by name: equal graphs that were prepared from one file
        in the same way have the same names.
        """
        name = outputs_digest(graph)
        course = self.found.setdefault(name, CalibrationTask(name, graph, {}))
        there = tensor_scopes(course.graph)
        for site in plan.of_role("activation"):
            if site.fixed is None and there.get(site.tensor) == site.scope:
                course.sites.setdefault((site.tensor, site.spec.axis), site)
        return name


def observe_courses(
    courses: Iterable[CalibrationTask],
    data: Callable[[Graph], Dataset],
    root: Path,
    options: RunOptions | None = None,
    walk: Walk | None = None,
) -> tuple[str, ...]:
    """Fill the caches `root / course.name` with the statistics of all courses, in as few passes as possible.

    Statistics that are already cached are not measured again. Different graphs, for example of different opsets, share
    a pass for the tensors that are equal in both, see `equal_tensors`. The rest is measured separately.

    Args:
        data: the data set of a graph.
        root: existing folder; each course has its own cache in it, for `calibrate(cache=...)`.
        options: see `RunOptions`.
        walk: runs the data through a graph instead of a `Calibrator`, for example some of the samples only. Plans,
            graphs and caches are then the same as without it.

    Returns:
        Notes of the caches.

    Raises: see `calibrate`.
    """
    options = options or RunOptions()
    waiting = [_open_cache(course, data, root, options.device) for course in sorted(courses, key=lambda one: one.name)]
    while any(one.sites for one in waiting):
        lead = max(waiting, key=lambda one: len(one.sites))
        others = [one for one in waiting if one is not lead and one.sites]
        shared = [
            _compare(lead.course, one, data, device=options.device, budget=options.memory_bytes // 4) for one in others
        ]
        union = dict(lead.sites)
        for one, found in zip(others, shared, strict=True):
            union.update({key: site for key, site in one.sites.items() if key[0] in found.same | found.unseen})
        seen = _run_walk(lead, union, data(lead.course.graph), root, options, walk)
        lead.sites.clear()
        for one, found in zip(others, shared, strict=True):
            given = _shared_sites(one.sites, found, seen)
            one.cache.save({key: seen[key] for key in given})
            for key in given:
                del one.sites[key]
    return tuple(note for one in waiting for note in one.cache.notes)


@dataclass
class _PendingTask:
    """A course whose statistics are not complete yet.

    Attributes:
        cache: its calibration cache.
        sites: sites still to be measured.
    """

    course: CalibrationTask
    cache: CalibrationCache
    sites: dict[Key, Site]


def _open_cache(course: CalibrationTask, data: Callable[[Graph], Dataset], root: Path, device: str) -> _PendingTask:
    """Open the cache of a course and find the sites that are not in it."""
    cache = CalibrationCache(root / course.name, course.graph, data(course.graph), settings(device))
    known = cache.load(course.sites)
    return _PendingTask(course, cache, {key: site for key, site in course.sites.items() if key not in known})


def _compare(
    lead: CalibrationTask, other: _PendingTask, data: Callable[[Graph], Dataset], *, device: str, budget: int
) -> EqualTensors:
    """Compare the missing tensors of `other` with those of the graph of `lead`."""
    names = list(dict.fromkeys(name for name, _ in other.sites))
    return equal_tensors(lead.graph, other.course.graph, names, data(lead.graph), device=device, budget=budget)


def _run_walk(
    lead: _PendingTask, sites: Mapping[Key, Site], data: Dataset, root: Path, options: RunOptions, walk: Walk | None
) -> Mapping[Key, Sketch]:
    """Run the data through one graph once; return the sketches of `sites`, which are now in its cache."""
    course = lead.course
    if walk is not None:
        found = walk(course, sites, data, options)
        lead.cache.save(found)
        return found
    plan = Plan(tuple(replace(site, key=f"{key[0]} {key[1]}") for key, site in sites.items()))
    with Calibrator(course.graph, plan, replace(options, cache=root / course.name)) as calibrator:
        calibrator.observe_all(data)
        return calibrator.sketches()


def _shared_sites(sites: Iterable[Key], shared: EqualTensors, found: Mapping[Key, Sketch]) -> set[Key]:
    """Return the sites whose sketches also apply to the other graph.

    They are those of equal tensors, and of branches that ran in neither graph.
    """
    return {key for key in sites if key[0] in shared.same or (key[0] in shared.unseen and not found[key].samples)}


__all__ = ["CalibrationTask", "CalibrationTasks", "Walk", "observe_courses"]
