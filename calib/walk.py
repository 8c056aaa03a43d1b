"""`calibrate`: a plan and data in, a solution out. `Calibrator`: the same, fed batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Any

import numpy as np

from sbonnx.calib.branches import BranchPlan, plan_branches
from sbonnx.calib.data import Dataset, read
from sbonnx.calib.forward import Forward, forward
from sbonnx.calib.observe import Observation, Watch, cores
from sbonnx.calib.progress import Progress, Silent
from sbonnx.calib.readers import Feed
from sbonnx.calib.rows import Rows, Unit
from sbonnx.calib.runner import CPU, providers
from sbonnx.calib.segments import Granularity, Segment, bytes_of, cut
from sbonnx.calib.solve import Solve, solution_of
from sbonnx.calib.store import TensorStore, parse_size
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import Graph
from sbonnx.graph.query import shape, tensors_by_name
from sbonnx.plan.types import Plan, Solution
from sbonnx.report import Refusal
from sbonnx.spec import Bounds


def calibrate(
    graph: Graph,
    plan: Plan,
    data: Any,
    *,
    device: str = "cpu",
    solve: Solve | None = None,
    progress: Progress | None = None,
    granularity: Granularity = "auto",
    memory: str | int = "2 GiB",
    workers: int | None = None,
) -> Solution:
    """Scales, zero points and codes for every site of `plan`, from `data`.

    Activations are observed in float onnxruntime sessions over `graph`, samples streaming through; branches of If
    run as models of their own on the samples that picked them. The result is the same bit for bit for any batch
    size (see `Rows`), any number of workers and, for min-max, any order of the data.

    Args:
        graph: simplified and fused; not changed.
        plan: what to solve.
        data: a `Dataset`, or anything `read` takes.
        device: "cpu", "cuda" or "auto".
        solve: rounds a weight given its scales; None: to the nearest code.
        progress: told as feeds are done, and closed at the end.
        granularity: "whole": one session; "budget": sessions whose outputs fit `memory`, each sample going
            through all of them; "layer": one session a layer, all samples through each, activations in a
            `TensorStore` of `memory`; "auto": whole where it fits `memory`, else budget.
        memory: bytes for activations.
        workers: samples run at a time, each on one thread; None: as many as cores (1 on CUDA).

    Raises:
        DataError: no data, or data that does not fit the model.
        NumericError: NaN or Inf in an activation or weight, named with the sample and the first layer.
        ModelError, DeviceError: see `LayerRunner`.
    """
    progress = progress or Silent()
    dataset = data if isinstance(data, Dataset) else read(data, graph)
    try:
        with Calibrator(
            graph, plan, device=device, granularity=granularity, memory=memory, workers=workers
        ) as calibrator:
            calibrator.observe_all(dataset, progress)
            return calibrator.finish(solve)
    finally:
        progress.close()


class Calibrator:
    """Observes whatever it is fed, then solves. Holds sessions from the first feed until `close`.

        with Calibrator(graph, plan) as calibrator:
            for feeds in batches:
                outputs = calibrator.observe(feeds)
            solution = calibrator.finish()

    Args: see `calibrate`.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        device: str = "cpu",
        granularity: Granularity = "auto",
        memory: str | int = "2 GiB",
        workers: int | None = None,
    ) -> None:
        self.graph = graph
        self.plan = plan
        self._device = device
        self._granularity: Granularity = granularity
        self._memory = parse_size(memory)
        self._workers = workers or (cores() if providers(device)[0] == CPU else 1)
        self._rows = Rows(graph, device=device)
        self._watches = {
            site.key: Watch.of(site.tensor, site.observer, site.spec.axis)
            for site in plan.of_role("activation")
            if site.fixed is None
        }
        self._observation: Observation | None = None
        self._unreachable: Mapping[str, str] = {}

    def observe(self, feeds: Feed) -> Feed:
        """Observe one feed, in the model's types, and give the float model's outputs by name.

        Raises: see `calibrate`.
        """
        names = [tensor.name for tensor in self.graph.outputs]
        observation, units = self._begin([("this feed", feeds)], kept=names)
        parts = [known for _, known in observation.stream(units, keep=names)]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def observe_all(self, data: Dataset, progress: Progress) -> None:
        """Observe a whole data set, several samples at a time.

        Raises: see `calibrate`.
        """
        observation, units = self._begin(data.items())
        total = data.count
        if self._granularity == "layer":
            progress.start("calibrate", None if total is None else total * len(observation.segments))
            with TensorStore(self._memory) as store:
                observation.layerwise(units, store, progress)
        else:
            progress.start("calibrate", total)
            for unit, _ in observation.stream(units):
                progress.advance(int(unit.closes))

    def finish(self, solve: Solve | None = None) -> Solution:
        """The solution of everything observed so far.

        Raises:
            DataError: nothing was observed.
        """
        if self._observation is None or not self._observation.samples:
            raise DataError("nothing was observed: calibration needs at least one feed")
        bounds, refusals = self._activation_bounds(self._observation)
        tensors = tensors_by_name(self.graph)
        return solution_of(self.plan, tensors, bounds, refusals, solve, self._observation.samples)

    def close(self) -> None:
        """Free the sessions. Twice is once."""
        if self._observation is not None:
            self._observation.close()

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, items: Iterable[tuple[str, Feed]], kept: Sequence[str] = ()) -> tuple[Observation, Iterator[Unit]]:
        """The observation, made at the first feed (whose sizes decide how the graph is cut), and the units to run."""
        units = self._rows.units(items)
        if self._observation is not None:
            return self._observation, units
        first = next(units, None)
        if first is None:
            raise DataError("the data holds no feeds: calibration needs at least one")
        observed: dict[str, dict[str, None]] = {}
        for site in self.plan.of_role("activation"):
            if site.key in self._watches:
                observed.setdefault(site.scope, {})[site.tensor] = None
        inner = plan_branches(self.graph, {scope: list(names) for scope, names in observed.items() if scope})
        branches, self._unreachable = self._apart(inner)
        outer = list(observed.get("", {}))
        wanted = [*inner.kept, *kept]
        sizes = _sizes(self.graph, first)
        main = _main_segments(self.graph, outer, wanted, sizes, self._granularity, self._memory)
        # how the graph is cut must not depend on the machine's cores; how many samples run at a time may
        peak = max(sum(sizes.get(name, 0) for name in segment.outputs) for segment in main)
        self._observation = Observation(
            self.graph,
            [*main, *branches],
            list(self._watches.values()),
            device=self._device,
            workers=max(1, min(self._workers, self._memory // max(peak, 1))),
        )
        return self._observation, chain([first], units)

    def _apart(self, inner: BranchPlan) -> tuple[list[Segment], Mapping[str, str]]:
        """The branches that can be models of their own, and why the others cannot be observed."""
        unreachable = dict(inner.unreachable)
        kept: list[Segment] = []
        for segment in inner.segments:
            lost = next((why for scope, why in unreachable.items() if segment.scope.startswith(f"{scope}/")), None)
            if lost is None and segment.outputs:
                try:
                    segment.model(self.graph)
                except ModelError as error:
                    lost = f"its branch cannot run apart: {error}"
            if lost is None:
                kept.append(segment)
            else:
                unreachable[segment.scope] = lost
        return kept, unreachable

    def _activation_bounds(self, observation: Observation) -> tuple[dict[str, Bounds], list[Refusal]]:
        """Measured ranges by site key; a refusal for each site that saw nothing and whose group has no range either."""
        found = observation.found
        bounds = {key: found[watch].bounds() for key, watch in self._watches.items() if found[watch].finite}
        reached = {site.group for site in self.plan.sites if site.key in bounds or site.fixed is not None}
        refusals = []
        for site in self.plan.of_role("activation"):
            if site.group in reached:
                continue
            why = self._unreachable.get(site.scope)
            if why is None:
                where = "its branch never ran" if site.scope else "it held no values"
                why = f"{where} on the calibration data"
            refusals.append(Refusal("quantize", site.tensor, why))
        return bounds, refusals


def _sizes(graph: Graph, unit: Unit) -> dict[str, int]:
    """Bytes of the main graph's tensors for one sample; dynamic dimensions are read off its inputs."""
    dims: dict[str, int] = {}
    for tensor in graph.inputs:
        for dim, length in zip(shape(tensor) or (), unit.feed[tensor.name].shape, strict=False):
            if isinstance(dim, str):
                dims[dim] = length
    return bytes_of(graph, dims)


def _main_segments(
    graph: Graph,
    observed: Sequence[str],
    kept: Sequence[str],
    sizes: Mapping[str, int],
    granularity: Granularity,
    memory: int,
) -> list[Segment]:
    """The pieces of the main graph; "auto" asks whether one sample's outputs fit `memory`."""
    if granularity == "whole" or granularity == "layer":
        return cut(graph, observed, granularity, kept=kept)
    if granularity == "auto" and sum(sizes.get(name, 0) for name in {*observed, *kept}) <= memory:
        return cut(graph, observed, "whole", kept=kept)
    return cut(graph, observed, "budget", kept=kept, sizes=sizes, budget=memory)


__all__ = ["Calibrator", "Forward", "calibrate", "forward"]
