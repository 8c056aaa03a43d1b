"""Sentences about results, and kinds of notes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx.report.verdict import CLOSE, LOWER_IS_BETTER, group_notes, verdict_of
from sbonnx.verify.quality import LINES


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
        (0.8, 0.7, 0.9, "uncertain"),
        (0.96, 0.9, 0.99, "kept"),
        (0.7, -math.inf, math.inf, "lost"),
    ],
)
def test_the_interval_decides(value: float, low: float, high: float, accuracy: str) -> None:
    """A figure whose interval contains the line proves nothing; without an interval, the value decides.

    Between the line and what is close to float, only labelled data can say.
    """
    found = verdict_of(metrics(("y", [SQNR, figure("agreement", value, low, high, 0.75)])))
    assert found.accuracy == accuracy
    assert ("the line is 75 %" in found.text) is (value < 0.75)
    assert ("close to float is 95 %: measure it on labelled data" in found.text) is (value == 0.8)
    assert found.ok is (accuracy != "lost")


def test_the_worst_of_several_outputs_is_named() -> None:
    good = figure("relative error", 0.05, 0.04, 0.06, 0.2)
    near = figure("relative error", 0.09, 0.08, 0.095, 0.2)
    far = figure("relative error", 0.15, 0.14, 0.16, 0.2)
    values = metrics(("a", [SQNR, good]), ("b", [SQNR, near]))
    for row in values["quality"]:
        row["nature"] = "regression"
    assert verdict_of(values).text.startswith("Accuracy kept: 'b' has relative error 0.09")
    values["quality"][1]["figures"][1] = far
    assert verdict_of(values).text.startswith("Accuracy uncertain: 'b' has relative error 0.15")
    low = figure("SQNR", 12.0, 11.0, 13.0)
    found = verdict_of(metrics(("a", [SQNR]), ("b", [low])))
    assert found.text == (
        "Accuracy uncertain: 'b' has SQNR 12.0 dB (11.0 to 13.0) on 64 held-out samples, close to float is 20 dB: "
        "measure it on labelled data (--eval)."
    )


def test_limits_of_closeness_are_stricter_than_the_quality_lines() -> None:
    lines = {str(key): {str(name): line for name, line in value.items()} for key, value in LINES.items()}
    for nature, limits in CLOSE.items():
        for name, limit in limits.items():
            line = lines[nature][name]
            assert line is not None
            assert limit < line if name in LOWER_IS_BETTER else limit > line


def test_one_sample_proves_nothing() -> None:
    good = figure("agreement", 1.0, -math.inf, math.inf, 0.75)
    values = metrics(("y", [figure("SQNR", 40.0, -math.inf, math.inf), good]))
    values["quality"][0]["samples"] = 1
    found = verdict_of(values)
    assert found.accuracy == "uncertain" and "compare on more samples" in found.text
    equal = metrics(("y", [figure("SQNR", math.inf, -math.inf, math.inf), good]))
    assert verdict_of(equal).accuracy == "kept"


def test_rows_of_detections_cannot_be_matched() -> None:
    values = metrics(("y", [SQNR, figure("same shape", 1.0, 0.9, 1.0)]))
    values["quality"][0]["nature"] = "detections"
    found = verdict_of(values)
    assert found.accuracy == "uncertain" and "whose rows cannot be matched" in found.text


@pytest.mark.parametrize(
    ("after", "accuracy"), [(36.5, "kept"), (37.9, "uncertain"), (45.0, "lost"), (math.nan, "lost")]
)
def test_decoders_by_their_perplexity(after: float, accuracy: str) -> None:
    speed = [
        {"tokens_per_second": 100.0, "float_tokens_per_second": 40.0},
        {"tokens_per_second": 120.0, "float_tokens_per_second": 60.0},
    ]
    decoder = {"perplexity": after, "float_perplexity": 36.41, "agreement": 0.97, "tokens": 1022, "speed": speed}
    found = verdict_of({"llm": {**decoder, "bytes": (400, 100)}})
    assert found.accuracy == accuracy
    assert "on 1,022 tokens, the same top token at 97.0 % of positions" in found.text
    assert found.text.endswith("; 2 times the tokens/s of float on this CPU; 4 times smaller.")


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


@pytest.mark.parametrize(
    ("difference", "accuracy", "max_loss"),
    [
        ((-0.012, -0.02, -0.004), "lost", None),
        ((-0.012, -0.02, -0.004), "kept", 0.02),
        ((-0.012, -0.03, 0.006), "uncertain", None),
        ((-0.008, -0.015, -0.001), "kept", None),
        ((0.004, -0.01, 0.02), "kept", None),
    ],
)
def test_labels_come_first(difference: tuple[float, float, float], accuracy: str, max_loss: float | None) -> None:
    """Outputs below their line are no loss of accuracy if labels say so."""
    change, low, high = difference
    rows = [
        {"model": "float", "metric": {"value": 0.912, "low": 0.9, "high": 0.93}, "difference": None, "loss": 0.0},
        {
            "model": "q",
            "metric": {"value": 0.912 + change, "low": 0.88, "high": 0.92},
            "difference": {"value": change, "low": low, "high": high},
            "loss": -change,
        },
    ]
    evaluation = {"metric": "top1", "unit": "", "share": True, "samples": 500, "rows": rows}
    poor = figure("agreement", 0.6, 0.5, 0.7, 0.75)
    found = verdict_of(metrics(("y", [SQNR, poor]), evaluation=evaluation), max_loss=max_loss)
    assert found.accuracy == accuracy
    assert found.text == (
        f"Accuracy {accuracy}: top1 0.9120 -> {0.912 + change:.4f}, difference {change:+.4f} "
        f"({low:+.4f} to {high:+.4f}) on 500 labelled samples{': evaluate more samples' * (accuracy == 'uncertain')}."
    )


@pytest.mark.slow
def test_a_detector_of_the_pack(pack: Path) -> None:
    """At 8 bits, 12 % of its detections change: nothing below the quality line, and no proof that accuracy is kept."""
    feeds = load_pack(pack).load_calib("fastestdet", limit=2)
    settings = {"VERIFY": {"LATENCY": False}}
    model = pack / "models" / "fastestdet.onnx"
    report = sbonnx.quantize(model, feeds, recipe=settings, backend="virtual", effort="fast")
    assert report.ok, report.problems
    (row,) = report.metrics["quality"]
    assert 10 < row["figures"][0]["value"] < 20, "dB"
    assert report.verdict.accuracy == "uncertain"
    assert "relative error" in report.verdict.text
    assert "close to float is 0.1: measure it on labelled data (--eval)" in report.verdict.text


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
