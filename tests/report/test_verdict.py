"""Sentences about results, and kinds of notes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sbonnx.report.verdict import group_notes, verdict_of


def figure(name: str, value: float, low: float, high: float, line: float | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "low": low,
        "high": high,
        "unit": "dB" if name == "SQNR" else "",
        "line": line,
    }


def metrics(*rows: tuple[str, list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    outputs = [{"name": name, "compared": 9, "sqnr_db": 30.0, "not_finite": 0} for name, _ in rows]
    quality = [{"name": name, "nature": "classes", "samples": 64, "figures": figures} for name, figures in rows]
    return {"outputs": outputs, "quality": quality, "feeds": 4, "held_out": 64, **more}


SQNR = figure("SQNR", 30.0, 29.0, 31.0)


def test_kept_with_speed_and_size() -> None:
    agreement = figure("agreement", 0.98, 0.92, 0.99, 0.75)
    found = verdict_of(
        metrics(("y", [SQNR, agreement]), latency_ratio=0.5, latency_interval=(0.4, 0.625), size_ratio=0.25)
    )
    assert found.accuracy == "kept" and found.ok
    assert found.text == (
        "Accuracy kept: agreement 98 % (92 to 99), SQNR 30.0 dB (29.0 to 31.0) on 64 held-out samples; "
        "2 times faster (1.6 to 2.5) on this CPU; 4 times smaller."
    )


@pytest.mark.parametrize(
    ("value", "low", "high", "accuracy"),
    [
        (0.6, 0.5, 0.7, "lost"),
        (0.7, 0.6, 0.8, "uncertain"),
        (0.8, 0.7, 0.9, "kept"),
        (0.7, -math.inf, math.inf, "lost"),
    ],
)
def test_the_interval_decides(value: float, low: float, high: float, accuracy: str) -> None:
    """A figure whose interval contains the line proves nothing; without an interval, the value decides."""
    found = verdict_of(metrics(("y", [SQNR, figure("agreement", value, low, high, 0.75)])))
    assert found.accuracy == accuracy
    assert ("the line is 75 %" in found.text) is (accuracy != "kept")
    assert found.ok is (accuracy != "lost")


def test_the_worst_of_several_outputs_is_named() -> None:
    good = figure("relative error", 0.05, 0.04, 0.06, 0.2)
    near = figure("relative error", 0.15, 0.14, 0.16, 0.2)
    found = verdict_of(metrics(("a", [SQNR, good]), ("b", [SQNR, near])))
    assert found.text.startswith("Accuracy kept: 'b' has relative error 0.15")
    low = figure("SQNR", 12.0, 11.0, 13.0)
    assert "'b' has SQNR 12.0 dB" in verdict_of(metrics(("a", [SQNR]), ("b", [low]))).text


def test_an_unusable_output_is_lost_whatever_its_figures() -> None:
    values = metrics(("y", [SQNR]))
    values["outputs"][0]["sqnr_db"] = 1.0
    assert "lost in error: 1.0 dB" in verdict_of(values).text
    values["outputs"][0]["not_finite"] = 7
    found = verdict_of(values, problems=["output 'y' has 7 NaN"])
    assert found.accuracy == "lost" and "NaN or infinite" in found.text


def test_a_missed_limit_is_named() -> None:
    found = verdict_of(metrics(("y", [SQNR])), problems=["the size is 0.9", "another"])
    assert found.accuracy == "kept" and not found.ok
    assert "the size is 0.9 (and 1 more)" in found.text


def test_labels_come_first() -> None:
    rows = [
        {"model": "float", "metric": {"value": 0.912, "low": 0.9, "high": 0.93}, "difference": None},
        {
            "model": "q",
            "metric": {"value": 0.9, "low": 0.88, "high": 0.92},
            "difference": {"value": -0.012, "low": -0.02, "high": -0.004},
        },
    ]
    evaluation = {"metric": "top1", "unit": "", "share": True, "samples": 500, "rows": rows}
    found = verdict_of(metrics(("y", [SQNR]), evaluation=evaluation))
    assert found.text == (
        "Accuracy: top1 0.9120 -> 0.9000, difference -0.0120 (-0.0200 to -0.0040) on 500 labelled samples."
    )


def test_speed_is_that_of_onnxruntime_only() -> None:
    values = metrics(("y", [SQNR]), latency_ratio=5.0, latency_interval=(4.0, 6.0), size_ratio=0.5)
    assert "5 times slower (4 to 6)" in verdict_of(values).text
    for backend in ("tensorrt", "virtual"):
        assert "this CPU" not in verdict_of(values, backend=backend).text
    around = metrics(("y", [SQNR]), latency_ratio=0.9, latency_interval=(0.8, 1.1))
    assert "as fast as float" in verdict_of(around).text


def test_nothing_compared() -> None:
    found = verdict_of({})
    assert (found.accuracy, found.ok) == ("unknown", True)
    assert found.text == "Accuracy unknown: nothing was compared with float."


def test_notes_are_grouped_by_kind() -> None:
    notes = [f"'{850 + index}': {index + 2} scales are raised to 6.1e-05" for index in range(15)]
    groups = list(group_notes([notes[0], "the opset was converted", *notes[1:], notes[3]]))
    assert [len(group.notes) for group in groups] == [15, 1]
    assert groups[0].line == f"{notes[0]} (and 14 more of this kind)"
    assert groups[1].line == "the opset was converted"
