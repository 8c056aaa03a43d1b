"""Calibrate several plans of one model in one pass over the data, which fills the cache of each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from sbonnx.calib.cache.resume import EVERYTHING, Recall
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import settings
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.equal_tensors import Alike, alike, places
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.digests import outputs_digest
from sbonnx.options import RunOptions
from sbonnx.plan.types import Plan, Site

Walk = Callable[["Course", Mapping[Key, Site], Dataset, RunOptions], Mapping[Key, Sketch]]
"""Returns sketches of some sites: (course, sites, data, options)."""

_WALK: ContextVar[Walk | None] = ContextVar("sbonnx_walk", default=None)


@contextmanager
def walked_by(walk: Walk) -> Iterator[None]:
    """Replace the walk over the data in `observe_courses` of this thread, for example by one over some of the samples.

    Plans, graphs and caches are then the same as without it.
    """
    token = _WALK.set(walk)
    try:
        yield
    finally:
        _WALK.reset(token)


@dataclass
class Course:
    """A graph and the sites that any plan on it observes.

    Attributes:
        name: digest of the graph, which is the name of its folder.
        graph: simplified and fused; not changed.
        sites: one per tensor and axis.
    """

    name: str
    graph: Graph
    sites: dict[Key, Site]


class Courses:
    """Collects plans by the function of their graphs: graphs that compute the same share a course."""

    def __init__(self) -> None:
        self.found: dict[str, Course] = {}

    def add(self, graph: Graph, plan: Plan) -> str:
        """Add the activation sites of `plan`; return the name of the folder of their statistics.

        The first of equal graphs is kept. Tensors are identified by name: equal graphs that were prepared from one file
        in the same way have the same names.
        """
        name = outputs_digest(graph)
        course = self.found.setdefault(name, Course(name, graph, {}))
        there = places(course.graph)
        for site in plan.of_role("activation"):
            if site.fixed is None and there.get(site.tensor) == site.scope:
                course.sites.setdefault((site.tensor, site.spec.axis), site)
        return name


def observe_courses(
    courses: Iterable[Course],
    data: Callable[[Graph], Dataset],
    root: Path,
    options: RunOptions | None = None,
) -> tuple[str, ...]:
    """Fill the caches `root / course.name` with the statistics of all courses, in as few passes as possible.

    Statistics that are already cached are not measured again. Different graphs, for example of different opsets, share
    a pass for the tensors that are equal in both, see `alike`. The rest is measured separately.

    Args:
        data: the data set of a graph.
        root: existing folder; each course has its own cache in it, for `calibrate(cache=...)`.
        options: see `RunOptions`.

    Returns:
        Notes of the caches.

    Raises: see `calibrate`.
    """
    options = options or RunOptions()
    waiting = [_look(course, data, root, options.device) for course in sorted(courses, key=lambda one: one.name)]
    while any(one.sites for one in waiting):
        lead = max(waiting, key=lambda one: len(one.sites))
        others = [one for one in waiting if one is not lead and one.sites]
        shared = [
            _compare(lead.course, one, data, device=options.device, budget=options.memory_bytes // 4) for one in others
        ]
        union = dict(lead.sites)
        for one, found in zip(others, shared, strict=True):
            union.update({key: site for key, site in one.sites.items() if key[0] in found.same | found.unseen})
        seen = _walked(lead, union, data(lead.course.graph), root, options)
        lead.sites.clear()
        for one, found in zip(others, shared, strict=True):
            given = _given(one.sites, found, seen)
            one.recall.keep({key: seen[key] for key in given})
            for key in given:
                del one.sites[key]
    return tuple(note for one in waiting for note in one.recall.notes)


@dataclass
class _Waiting:
    """A course whose statistics are not complete yet.

    Attributes:
        recall: its cache.
        sites: sites still to be measured.
    """

    course: Course
    recall: Recall
    sites: dict[Key, Site]


def _look(course: Course, data: Callable[[Graph], Dataset], root: Path, device: str) -> _Waiting:
    """Open the cache of a course and find the sites that are not in it."""
    recall = Recall(root / course.name, course.graph, data(course.graph), settings(device))
    known = recall.known(dict.fromkeys(course.sites, EVERYTHING))
    return _Waiting(course, recall, {key: site for key, site in course.sites.items() if key not in known})


def _compare(lead: Course, other: _Waiting, data: Callable[[Graph], Dataset], *, device: str, budget: int) -> Alike:
    """Compare the missing tensors of `other` with those of the graph of `lead`."""
    names = list(dict.fromkeys(name for name, _ in other.sites))
    return alike(lead.graph, other.course.graph, names, data(lead.graph), device=device, budget=budget)


def _walked(
    lead: _Waiting, sites: Mapping[Key, Site], data: Dataset, root: Path, options: RunOptions
) -> Mapping[Key, Sketch]:
    """Run the data through one graph once; return the sketches of `sites`, which are now in its cache."""
    course, walk = lead.course, _WALK.get()
    if walk is not None:
        found = walk(course, sites, data, options)
        lead.recall.keep(found)
        return found
    plan = Plan(tuple(replace(site, key=f"{key[0]} {key[1]}") for key, site in sites.items()))
    with Calibrator(course.graph, plan, replace(options, cache=root / course.name)) as calibrator:
        calibrator.observe_all(data)
        return calibrator.sketches()


def _given(sites: Iterable[Key], shared: Alike, found: Mapping[Key, Sketch]) -> set[Key]:
    """Return the sites whose sketches also apply to the other graph.

    They are those of equal tensors, and of branches that ran in neither graph.
    """
    return {key for key in sites if key[0] in shared.same or (key[0] in shared.unseen and not found[key].samples)}


__all__ = ["Course", "Courses", "Walk", "observe_courses", "walked_by"]
