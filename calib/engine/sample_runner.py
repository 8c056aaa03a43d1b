"""Per-thread buffers and statistics of a run over segments. Must not import onnx, so that workers start fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.session import Bound, Session
from sbonnx.calib.sketches import Detail, Panel, Sketch

Key = tuple[str, int | None]
"""A tensor and the channel axis of its ranges."""


@dataclass(frozen=True)
class Wish:
    """Statistics requested of a tensor: see `Sketch`."""

    detail: Detail = "range"
    track: bool = False

    def __or__(self, other: Wish) -> Wish:
        """Return the request that includes both."""
        detail: Detail = "histogram" if "histogram" in (self.detail, other.detail) else "range"
        return Wish(detail, self.track or other.track)

    def sketch(self, axis: int | None) -> Sketch:
        """Create an empty sketch."""
        return Sketch(axis=axis, detail=self.detail, track=self.track)


class Piece(Protocol):
    """The part of the interface of `Segment` that a lane uses."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Tensors that it computes."""

    @property
    def observed(self) -> tuple[str, ...]:
        """Tensors to observe, computed or passed through."""

    @property
    def conditions(self) -> tuple[tuple[str, bool], ...]:
        """Booleans and the values under which it runs."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Every tensor that it reads from outside."""


Blame = Callable[[int, str, Mapping[str, Any], Unit], Exception]
"""Builds the error for (number of the piece, tensor with NaN or Inf, known tensors of the sample, the sample)."""


class Steps(Protocol):
    """Interface of a `Lane` and its counterparts."""

    def step(self, number: int, piece: Piece, run: Any, known: dict[str, Any], unit: Unit, blame: Blame) -> None:
        """Run one sample through one piece; see `Lane.step`."""


class Lane:
    """Sketches, output buffers and panels of one thread.

    Args:
        tolerant: non-finite values are counted and raise no error.
    """

    def __init__(self, wishes: Mapping[Key, Wish], *, tolerant: bool = False) -> None:
        self._wishes = wishes
        self._tolerant = tolerant
        self.sketches = {key: wish.sketch(key[1]) for key, wish in wishes.items()}
        self._bound: dict[int, Bound] = {}
        self._panels: dict[tuple[int, bool], tuple[tuple[str, ...], Panel]] = {}

    def step(
        self, number: int, piece: Piece, run: Session | None, known: dict[str, Any], unit: Unit, blame: Blame
    ) -> None:
        """Run one sample through one piece: add its outputs to `known` and its observed tensors to the sketches.

        Args:
            run: the session of the piece; None if there is nothing to run.
            known: tensors of the sample by name. Outputs are in buffers that the next run overwrites.

        Raises:
            DataError: the piece cannot run on the sample.
            the exception that `blame` returns, for a non-finite tensor, unless tolerant.
        """
        for name, value in piece.conditions:
            if name not in known or bool(np.asarray(known[name]).item()) != value:
                return
        if run is not None:
            values = self._buffers(number, run, piece).run(known, where=unit.where)
            known.update(zip(piece.outputs, values, strict=True))
        for tensors, panel in self._panels_of(number, piece):
            bad = panel.observe([known[name] for name in tensors], unit.index, unit.samples) if tensors else []
            if bad and not self._tolerant:
                raise blame(number, tensors[bad[0]], known, unit)

    def settle(self) -> None:
        """Complete the sketches."""
        for _, panel in self._panels.values():
            panel.settle()

    def forget(self) -> None:
        """Start with empty sketches."""
        self.sketches = {key: wish.sketch(key[1]) for key, wish in self._wishes.items()}
        self._panels.clear()

    def _buffers(self, number: int, run: Session, piece: Piece) -> Bound:
        if number not in self._bound:
            self._bound[number] = run.bind(piece.outputs)
        return self._bound[number]

    def _panels_of(self, number: int, piece: Piece) -> list[tuple[tuple[str, ...], Panel]]:
        """Return (tensors, panel) of the computed tensors of piece `number`, whose buffers stay, and of the others."""
        found = []
        for passing in (False, True):
            if (number, passing) not in self._panels:
                names = {name for name in piece.observed if (name not in piece.outputs) is passing}
                keys = [key for key in self.sketches if key[0] in names]
                panel = Panel([self.sketches[key] for key in keys])
                self._panels[number, passing] = (tuple(name for name, _ in keys), panel)
            found.append(self._panels[number, passing])
        return found


def last_reads(pieces: Iterable[Piece]) -> dict[str, int]:
    """Return the number of the last piece that reads each tensor from outside."""
    return {name: number for number, piece in enumerate(pieces) for name in piece.reads}


def through(
    lane: Steps,
    pieces: Sequence[Piece],
    runs: Sequence[Any],
    last: Mapping[str, int],
    unit: Unit,
    blame: Blame,
    keep: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one sample through all pieces; return the values of `keep`.

    Args:
        last: number of the last piece that reads each tensor; the tensor is freed after that piece. The number of
            pieces for tensors to keep. Tensors that are not listed are freed after the first piece.

    Raises: see `Lane.step`.
    """
    known: dict[str, Any] = dict(unit.feed)
    for number, (piece, run) in enumerate(zip(pieces, runs, strict=True)):
        lane.step(number, piece, run, known, unit, blame)
        for name in [name for name in known if last.get(name, -1) <= number]:
            del known[name]
    return {name: own(known[name]) for name in keep}


def own(value: Any) -> Any:
    """Copy an array that is in a buffer which the next run overwrites."""
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.owndata else value
