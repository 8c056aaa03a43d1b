"""What was done, what was not and why: the rows that end in front of the user."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx


@dataclass(frozen=True)
class Refusal:
    """Something that was not done. Nothing is skipped in silence.

    Attributes:
        what: the step, pattern or site ("fuse_conv_bn", "quantize weight").
        where: the original name of the node or tensor.
        why: the reason, one clause.
    """

    what: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: not at {self.where}: {self.why}"


@dataclass(frozen=True)
class Fired:
    """A pattern that was applied: its name and the original name of the node it was anchored at."""

    pattern: str
    node: str


@dataclass(frozen=True)
class Report:
    """The outcome of one quantization: rows for people, plain values for JSON.

    Attributes:
        model, output, backend: what was quantized, where it lies, for which runtime.
        counts: nodes before and after, sites by role, refusals.
        metrics: end-to-end figures (per output error, sizes, latency), see `sbonnx.verify`.
        layers: one row a quantized activation, worst first.
        sites: all that is quantized, in the order of the network: its tensor, role, type, bits and first reader.
        applied, refusals: what patterns and planning did and did not do.
        settings: the resolved recipe.
        notes: what loading changed in the model (lifted opset, inlined functions, ...).
        quantized: the model itself where no output was asked for (left out of `to_dict`).
        search: what AUTO and MIXED tried, see `sbonnx.search.Found`; empty where nothing was to be found out.
        problems: what makes the result worse than asked (empty when all is well).
    """

    model: str
    output: str | None
    backend: str
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    layers: tuple[dict[str, Any], ...] = ()
    sites: tuple[dict[str, Any], ...] = ()
    applied: tuple[Fired, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    search: dict[str, Any] = field(default_factory=dict)
    quantized: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong with the result."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``; what is wrong comes first."""
        return {"ok": self.ok, "problems": self.problems, **asdict(replace(self, quantized=None))}
