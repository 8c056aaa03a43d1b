"""Per-thread buffers and statistics of a run over segments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.session import Bound, Session
from sbonnx.calib.sketches import Detail, Panel, Sketch

Key = tuple[str, int | None]
"""A tensor and the channel axis of its ranges."""


@dataclass(frozen=True)
class StatsRequest:
    """Statistics requested of a tensor: see `Sketch`."""

    detail: Detail = "range"
    track: bool = False

    def __or__(self, other: StatsRequest) -> StatsRequest:
        """Return the request that includes both."""
        detail: Detail = "histogram" if "histogram" in (self.detail, other.detail) else "range"
        return StatsRequest(detail, self.track or other.track)

    def sketch(self, axis: int | None) -> Sketch:
        """Create an empty sketch."""
        return Sketch(axis=axis, detail=self.detail, track=self.track)


Blame = Callable[[int, str, Mapping[str, Any], Sample], Exception]
"""Builds the error for (number of the segment, tensor with NaN or Inf, known tensors of the sample, the sample)."""


class Steps(Protocol):
    """Interface of a `SampleRunner` and its counterparts."""

    def step(self, number: int, segment: Segment, run: Any, known: dict[str, Any], unit: Sample, blame: Blame) -> None:
        """Run one sample through one segment; see `SampleRunner.step`."""


class SampleRunner:
    """Sketches, output buffers and panels of one thread.

    Args:
        tolerant: non-finite values are counted and raise no error.
        masks: tensors of which minus infinity is counted and raises no error.
    """

    def __init__(
        self, requests: Mapping[Key, StatsRequest], *, tolerant: bool = False, masks: Collection[str] = ()
    ) -> None:
        self._masks = masks
        self._requests = requests
        self._tolerant = tolerant
        self.sketches = {key: request.sketch(key[1]) for key, request in requests.items()}
        self._bound: dict[int, Bound] = {}
        self._panels: dict[tuple[int, bool], tuple[tuple[str, ...], Panel]] = {}

    def step(
        self, number: int, segment: Segment, run: Session | None, known: dict[str, Any], unit: Sample, blame: Blame
    ) -> None:
        """Run one sample through one segment: add its outputs to `known` and its observed tensors to the sketches.

        Args:
            run: the session of the segment; None if there is nothing to run.
            known: tensors of the sample by name. Outputs are in buffers that the next run overwrites.

        Raises:
            DataError: the segment cannot run on the sample.
            the exception that `blame` returns, for a non-finite tensor, unless tolerant.
        """
        if not segment.runs_with(known):
            return
        if run is not None:
            if number not in self._bound:
                self._bound[number] = run.bind(segment.outputs)
            values = self._bound[number].run(known, where=unit.where)
            known.update(zip(segment.outputs, values, strict=True))
        for tensors, panel in self._panels_of(number, segment):
            bad = panel.observe([known[name] for name in tensors], unit.index, unit.samples) if tensors else []
            for name in () if self._tolerant else (tensors[at] for at in bad):
                if name not in self._masks or not np.less(known[name], np.inf).all():  # NaN is not less
                    raise blame(number, name, known, unit)

    def settle(self) -> None:
        """Complete the sketches."""
        for _, panel in self._panels.values():
            panel.settle()

    def _panels_of(self, number: int, segment: Segment) -> list[tuple[tuple[str, ...], Panel]]:
        """Return (tensors, panel) of the tensors that segment `number` computes, whose buffers stay, and of others."""
        panels = []
        for passing in (False, True):
            if (number, passing) not in self._panels:
                names = {name for name in segment.observed if (name not in segment.outputs) is passing}
                keys = [key for key in self.sketches if key[0] in names]
                panel = Panel([self.sketches[key] for key in keys])
                self._panels[number, passing] = (tuple(name for name, _ in keys), panel)
            panels.append(self._panels[number, passing])
        return panels


def last_reads(segments: Iterable[Segment]) -> dict[str, int]:
    """Return the number of the last segment that reads each tensor from outside."""
    return {name: number for number, segment in enumerate(segments) for name in segment.reads}


def run_sample(
    runner: Steps,
    segments: Sequence[Segment],
    runs: Sequence[Any],
    last: Mapping[str, int],
    unit: Sample,
    blame: Blame,
    keep: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one sample through all segments; return the values of `keep`.

    Args:
        last: number of the last segment that reads each tensor; the tensor is freed after that segment. The number of
            segments for tensors to keep. Tensors that are not listed are freed after the first segment.

    Raises: see `SampleRunner.step`.
    """
    tensors: dict[str, Any] = dict(unit.feed)
    for number, (segment, run) in enumerate(zip(segments, runs, strict=True)):
        runner.step(number, segment, run, tensors, unit, blame)
        for name in [name for name in tensors if last.get(name, -1) <= number]:
            del tensors[name]
    return {name: own(tensors[name]) for name in keep}


def own(value: Any) -> Any:
    """Copy an array that is in a buffer which the next run overwrites."""
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.owndata else value
