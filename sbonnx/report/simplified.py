"""Report of a simplification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import onnx

from sbonnx.report.codes import PROBLEMS, Note, Problem, Refusal, WithProblems
from sbonnx.report.figures import OutputDifference, OutputQuality
from sbonnx.report.notebook import Result
from sbonnx.report.outcome import Fired
from sbonnx.values import INTERNAL


@dataclass(frozen=True, repr=False)
class SimplifyReport(WithProblems, Result):
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

    json_keys: ClassVar = (..., "ok", "problem_codes")
    frame_of: ClassVar = "applied"
    model: str
    output: str | None
    nodes_before: int
    nodes_after: int
    applied: tuple[Fired, ...]
    refusals: tuple[Refusal, ...]
    outputs: tuple[OutputDifference, ...]
    quality: tuple[OutputQuality, ...]
    problems: tuple[Problem, ...] = field(default=(), metadata=PROBLEMS)
    notes: tuple[Note, ...] = field(default=(), metadata=INTERNAL)
    simplified: onnx.ModelProto | None = field(default=None, repr=False, compare=False, metadata=INTERNAL)
