"""Tables of accuracy at 8 bits: each quantizer's best setting by model, and the values of EFFORT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.kept import Kept, Record
from benchmarks.results import table
from benchmarks.scores import METRICS, Estimate
from benchmarks.w8a8.ways import OURS, TOOLS, Way

HEADER: Final = ("model", "quantizer", "SQNR, dB", "metric", "agreement", "MB", "CPU s", "setting")
DIGITS: Final = {"sqnr": 2, "metric": 4, "agreement": 4}


@dataclass(frozen=True)
class Row:
    """One setting of a quantizer on one model.

    Attributes:
        model, setting: model and setting.
        way: the quantizer and what the file is for.
        record: its cost and scores, or a note.
    """

    model: str
    setting: str
    way: Way
    record: Record

    def figure(self, what: str) -> Estimate:
        """Return "sqnr", "metric" or "agreement"."""
        return Estimate(**self.record[what])

    @property
    def scored(self) -> bool:
        """Whether there is a file that onnxruntime runs and that is quantized: a float file has no error."""
        return not self.record["note"] and math.isfinite(self.record["sqnr"]["value"])


def rows_of(kept: Kept, ways: Mapping[str, Way], models: Sequence[str], target: str) -> list[Row]:
    """Return the measured rows for a target, float rows included."""
    named = {FLOAT: Way(FLOAT, target=target), **{row: way for row, way in ways.items() if way.target == target}}
    found = [(name, row, way, kept.get(name, row)) for name in models for row, way in named.items()]
    return [Row(name, row.removeprefix("TensorRT "), way, record) for name, row, way, record in found if record]


def best(rows: Sequence[Row], what: str = "sqnr") -> Row | None:
    """Return the row with the highest figure, or None."""
    scored = [row for row in rows if row.scored]
    return max(scored, key=lambda row: row.figure(what).value, default=None)


def by_tool(rows: Sequence[Row]) -> list[Row]:
    """Return the best setting of each quantizer by SQNR; one that fails if all do."""
    tools = [[row for row in rows if row.way.quantizer == tool] for tool in TOOLS]
    return [best(held) or held[0] for held in tools if held]


def verdict(rows: Sequence[Row], models: Sequence[str]) -> str:
    """Compare our row with the best of the peers' settings by SQNR and by the metric, model by model.

    Models that no peer quantizes do not count.
    """
    sentences = []
    for what, text in (("sqnr", "SQNR"), ("metric", "Metric")):
        ahead, close, behind = list[str](), list[str](), list[str]()
        for model in models:
            mine = best([row for row in rows if row.model == model and row.way.quantizer == OURS])
            peer = best([row for row in rows if row.model == model and row.way.quantizer != OURS], what)
            if mine is None or peer is None:
                continue
            own, other = mine.figure(what), peer.figure(what)
            apart = (
                f"{model} ({own.value:.{DIGITS[what]}f}, {TOOLS[peer.way.quantizer]} {other.value:.{DIGITS[what]}f})"
            )
            (ahead if own.value >= other.value else close if other.value <= own.high else behind).append(apart)
        count = len(ahead) + len(close) + len(behind)
        if not count:
            return "**No peer was measured.**"
        said = f"{text}: at least that of the best peer on {len(ahead)} of {count} models"
        said += f"; below it within our 95 % interval on {', '.join(close)}" if close else ""
        said += f"; below it by more on {', '.join(behind)}" if behind else ""
        sentences.append(said + ".")
    return f"**{' '.join(sentences)}**"


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table of the best settings, model by model; the float model has no SQNR and no cost."""
    return [_line(row, rows) for model in dict.fromkeys(row.model for row in rows) for row in _shown(rows, model)]


def _shown(rows: Sequence[Row], model: str) -> list[Row]:
    held = [row for row in rows if row.model == model]
    return [*(row for row in held if row.way.quantizer == FLOAT), *by_tool(held)]


FLOAT: Final = "float"


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    tried = sum(other.model == row.model and other.way.quantizer == row.way.quantizer for other in rows)
    setting = f"{row.setting}, best of {tried}" if tried > 1 else row.setting
    name = TOOLS.get(row.way.quantizer, row.way.quantizer)
    if row.record["note"]:
        return [row.model, name, row.record["note"].replace("|", "/"), "", "", "", "", setting]
    if row.way.quantizer == FLOAT:
        return [row.model, name, "", shown(row.figure("metric"), 4), "", f"{row.record['mb']:.2f}", "", ""]
    figures = [shown(row.figure(what), digits) for what, digits in DIGITS.items()]
    if not row.scored:
        figures = ["leaves the model float", "", ""]
    return [row.model, name, *figures, f"{row.record['mb']:.2f}", f"{row.record['cpu']:.1f}", setting]


def shown(figure: Estimate, digits: int) -> str:
    """Format a figure with its interval."""
    return f"{figure.value:.{digits}f} ({figure.low:.{digits}f} to {figure.high:.{digits}f})"


def metrics(models: Sequence[str]) -> str:
    """Describe metric and agreement by model."""
    return "; ".join(f"{name}: {', '.join(dict.fromkeys(METRICS[name]))}" for name in models)


def ladder(records: Mapping[tuple[str, str], Record], models: Sequence[str], rungs: Sequence[str]) -> str:
    """Return the table of our settings by value of EFFORT, with a verdict on CPU seconds and SQNR.

    Args:
        records: records by model and rung.
        models: models of the pack.
        rungs: values of EFFORT, from the fastest to the best.
    """
    found, falls = [], []
    for model in models:
        last = -math.inf
        for rung in rungs:
            record = records.get((model, rung))
            if record is None:
                continue
            row = Row(model, rung, Way(OURS), record)
            found.append([model, rung, *_line(row, [])[2:7]])
            if row.scored:
                if row.figure("sqnr").high < last:
                    falls.append(f"{model} at {rung}")
                last = row.figure("sqnr").value
    text = f"falls beyond its 95 % interval: {', '.join(falls)}" if falls else "falls nowhere beyond its 95 % interval"
    return f"**From rung to rung SQNR {text}.**\n\n" + table(("model", "EFFORT", *HEADER[2:7]), found)
