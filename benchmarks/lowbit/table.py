"""Accuracy at low widths as rows: what was reached, what it is to reach, and how the live peers stand beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.accuracy import HEADLINE

HEADER: Final = (
    "model",
    "quantizer",
    "metric 1",
    "metric 2",
    "loss",
    "to reach",
    "MB",
    "CPU s",
    "wall s",
    "peak MB",
    "beside the peers",
)
A_TENTH: Final = 10.0
"""Goal: our CPU time is at most that of the best peer divided by this factor."""

JUDGED: Final = {"cifar_resnet20": 1}
"""Index of the judged metric if it is not the first: that of the larger, harder set of images."""

RAW: Final = frozenset({"minilm_l6"})
"""Models whose loss is shown as the difference of the metric, not in percentage points."""


@dataclass(frozen=True)
class Cost:
    """Cost of a run, without imports and loading of samples.

    Attributes:
        cpu: CPU seconds of all threads.
        wall: wall time in seconds.
        peak_mb: peak memory of the process, including imports and samples, in units of 10**6 bytes.
    """

    cpu: float
    wall: float
    peak_mb: float


@dataclass(frozen=True)
class Line:
    """One quantizer on one model.

    Attributes:
        model, way: model and quantizer setting.
        scores: metrics 1 and 2 of `HEADLINE`; empty if it failed.
        cost: cost of quantization; None for float and for failures.
        size_mb: size of the file.
        note: reason of a failure, shown instead of the metrics.
        by: "ours", "peer" or "float".
        main: the row is compared with the goal.
        rival: the row is compared with the best peer: by accuracy, and also by CPU if that peer trains.
        learns: a peer that trains layer by layer.
    """

    model: str
    way: str
    scores: tuple[float, ...] = ()
    cost: Cost | None = None
    size_mb: float = 0.0
    note: str = ""
    by: str = "ours"
    main: bool = False
    rival: bool = False
    learns: bool = False


def line_of(record: Mapping[str, Any]) -> Line:
    """Return the line of a stored record, which `dataclasses.asdict` made of it."""
    cost = None if record["cost"] is None else Cost(**record["cost"])
    return Line(**{**record, "scores": tuple(record["scores"]), "cost": cost})


def mean_of(lines: Sequence[Line]) -> Line:
    """Combine runs of a row with several seeds: mean scores, and the cost of the median run.

    The note contains the range of the judged metric.

    Args:
        lines: lines with scores and costs; a single one is returned unchanged.
    """
    if len(lines) == 1:
        return lines[0]
    place = JUDGED.get(lines[0].model, 0)
    judged = [line.scores[place] for line in lines]
    scores = tuple(sum(line.scores[at] for line in lines) / len(lines) for at in range(len(lines[0].scores)))
    middle = sorted(lines, key=lambda line: line.cost.cpu if line.cost else 0.0)[len(lines) // 2]
    apart = f"{lines[0].way}, mean of {len(lines)} seeds ({min(judged):.4f} to {max(judged):.4f})"
    return replace(middle, way=apart, scores=scores)


def lost(line: Line, reference: Line) -> float | None:
    """Return the loss of the judged metric against float; None without scores."""
    place = JUDGED.get(line.model, 0)
    if len(line.scores) <= place or len(reference.scores) <= place:
        return None
    return reference.scores[place] - line.scores[place]


def verdict(line: Line, reference: Line, goals: Mapping[str, float]) -> str:
    """Return the verdict on the loss against the goal; "" for rows that are not compared with a goal."""
    allowed, loss = goals.get(line.model), lost(line, reference)
    if allowed is None or not line.main:
        return ""
    if loss is None:
        return f"≤ {shown(line.model, allowed)}: **missed**"
    return f"≤ {shown(line.model, allowed)}: {'met' if loss <= allowed + 1e-9 else '**missed**'}"


def shown(model: str, loss: float) -> str:
    """Format a loss in percentage points, or as a difference of the metric."""
    return f"{loss:.4f}" if model in RAW else f"{100 * loss:.2f}"


def best_peer(lines: Sequence[Line], model: str) -> Line | None:
    """Return the peer's row with the best judged metric; of equal ones that with the least CPU."""
    place = JUDGED.get(model, 0)
    found = [line for line in lines if line.by == "peer" and line.model == model and len(line.scores) > place]
    return max(found, key=lambda line: (line.scores[place], -line.cost.cpu if line.cost else 0.0), default=None)


def beside(line: Line, rival: Line | None) -> str:
    """Compare our row with the best of the peers: difference of the metric, and factor of CPU time."""
    if rival is None or line.by != "ours" or not line.scores:
        return ""
    place = JUDGED.get(line.model, 0)
    gain = line.scores[place] - rival.scores[place]
    text = f"{'+' if gain >= 0 else '-'}{shown(line.model, abs(gain))}"
    accurate = gain >= -1e-9
    if line.cost is None or rival.cost is None:
        text += f" against {rival.way}"
        reached = "accuracy met, CPU not compared" if accurate and rival.learns else "met" if accurate else "**missed**"
    else:
        times = rival.cost.cpu / max(line.cost.cpu, 1e-9)
        text += f", {times:.1f} × less CPU than {rival.way}"
        reached = "met" if accurate and (times >= A_TENTH or not rival.learns) else "**missed**"
    return f"{text}: {reached}" if line.rival else text


def rows(lines: Sequence[Line], goals: Mapping[str, float]) -> list[list[str]]:
    """Return the rows of the table, model by model, float first."""
    floats = {line.model: line for line in lines if line.by == "float"}
    return [_row(line, floats[line.model], best_peer(lines, line.model), goals) for line in lines]


def _row(line: Line, reference: Line, rival: Line | None, goals: Mapping[str, float]) -> list[str]:
    scores = [f"{score:.4f}" for score in line.scores] or [line.note or "–"]
    loss = lost(line, reference)
    cost = line.cost
    return [
        line.model,
        f"**{line.way}**" if line.main or line.rival else line.way,
        *(scores + [""] * (2 - len(scores))),
        "" if loss is None or line.by == "float" else shown(line.model, loss),
        verdict(line, reference, goals),
        f"{line.size_mb:.2f}" if line.size_mb else "",
        *(["", "", ""] if cost is None else [f"{cost.cpu:.1f}", f"{cost.wall:.1f}", f"{cost.peak_mb:.0f}"]),
        beside(line, rival),
    ]


def metrics(names: Sequence[str]) -> str:
    """Describe metrics 1 and 2 by model, with the judged one in bold."""
    parts = []
    for name in names:
        both = [
            f"**{metric}**" if place == JUDGED.get(name, 0) else metric for place, metric in enumerate(HEADLINE[name])
        ]
        parts.append(f"{name}: {', '.join(both)}")
    return "; ".join(parts)


def missed(text: str) -> bool:
    """Return whether a table contains a missed goal."""
    return "**missed**" in text
