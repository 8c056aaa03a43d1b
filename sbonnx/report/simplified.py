"""Report of a simplification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx

from sbonnx.report.codes import Note, Refusal
from sbonnx.report.outcome import Fired


@dataclass(frozen=True, repr=False)
class SimplifyReport:
    """Outcome of `sbonnx.simplify`.

    Attributes:
        model, output: the model and the path of the result; None: it stays in memory.
        nodes_before, nodes_after: numbers of nodes, branches included.
        applied: applied patterns.
        refusals: what was not done, with reasons.
        outputs: errors by output against the original; empty if it was not run.
        quality: figures of each output, and what they prove.
        problems: reasons why the result is unusable.
        notes: what loading changed in the model, and why it was not run.
        simplified: the model itself if no output path was given (left out of `to_dict`).
    """

    model: str
    output: str | None
    nodes_before: int
    nodes_after: int
    applied: tuple[Fired, ...]
    refusals: tuple[Refusal, ...]
    outputs: tuple[Mapping[str, Any], ...]
    quality: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    simplified: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __repr__(self) -> str:
        state = "equal outputs" if self.ok else self.problems[0]
        return f"SimplifyReport({self.model}: {self.nodes_before} to {self.nodes_after} nodes, {state})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        plain = asdict(replace(self, simplified=None))
        del plain["simplified"], plain["notes"]
        return {**plain, "ok": self.ok}
