"""Sentences about results, and kinds of notes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx.report import verdict as verdicts
from sbonnx.report.figures import Nature, QualityFigure
from sbonnx.report.verdict import Verdict, interval_text, value_text
from sbonnx.verify.quality import LIMITS, judge
from tests.support.values import compared, some


def verdict_of(values: dict[str, Any], **more: Any) -> Verdict:
    return verdicts.verdict_of(compared(values), **more)


def figure(name: Any, value: float, low: float, high: float, *, decides: bool = True) -> dict[str, Any]:
    limits = LIMITS[name]
    return {
        "name": name,
        "value": value,
        "low": low,
        "high": high,
        "unit": "dB" if name == "SQNR" else "",
        "kept": limits.kept,
        "line": limits.lost if decides else None,
    }


def metrics(*rows: tuple[str, str, list[dict[str, Any]]], nature: Nature = "values", **more: Any) -> dict[str, Any]:
    """Rows are (name, state, figures) of outputs."""
    outputs = [{"name": name, "compared": 9, "sqnr_db": 30.0, "not_finite": 0} for name, _, _ in rows]
    quality = [
        {
            "name": name,
            "nature": nature,
            "state": state,
            "samples": 64,
            "figures": figures,
            "decided_by": judge(nature, [QualityFigure(**one) for one in figures], 64)[1],
        }
        for name, state, figures in rows
    ]
    return {"outputs": outputs, "quality": quality, "feeds": 4, "held_out": 64, **more}


SQNR = figure("SQNR", 30.0, 29.0, 31.0)
ERROR = figure("relative error", 0.03, 0.02, 0.04)
KEPT = ("y", "kept", [SQNR, ERROR])


def test_kept_with_speed_and_size() -> None:
    classes = ("y", "kept", [SQNR, figure("agreement", 0.98, 0.96, 0.99), figure("KL", 0.01, 0.005, 0.015)])
    found = verdict_of(
        metrics(classes, nature="classes", latency_ratio=0.5, latency_interval=(0.4, 0.625), size_ratio=0.25)
    )
    assert found.accuracy == "kept" and found.ok and found.tone == "good"
    assert found.text == (
        "Accuracy kept: the KL divergence of the probabilities is 0.01 (0.005 to 0.015) on 64 held-out samples, "
        "kept up to 0.02, the same class as float for 98 % (96 to 99); "
        "2 times faster (1.6 to 2.5) on this CPU; 4 times smaller."
    )
    assert [row.mark for row in found.rows] == ["ok", "ok", "ok"]


def test_the_worst_of_several_outputs_is_named() -> None:
    far = figure("relative error", 0.15, 0.14, 0.16)
    lost = figure("relative error", 0.9, 0.8, 1.0)
    kept = ("a", "kept", [SQNR, ERROR])
    found = verdict_of(metrics(kept, ("b", "uncertain", [SQNR, far])))
    assert found.text == (
        "Accuracy uncertain: 'b' differs from float by 15 % (14 to 16) on 64 held-out samples, kept up to 10 %: "
        "measure it on labelled data (--eval)."
    )
    assert found.tone == "warn"
    found = verdict_of(metrics(kept, ("b", "uncertain", [SQNR, far]), ("c", "lost", [SQNR, lost])))
    assert found.accuracy == "lost" and not found.ok and found.tone == "bad"
    assert found.text == (
        "Accuracy lost: 'c' differs from float by 90 % (80 to 100) on 64 held-out samples, lost from 50 % on."
    )


SAME = figure("agreement", 1.0, 0.61, 1.0)


@pytest.mark.parametrize(
    ("figures", "samples", "text"),
    [
        (
            [SQNR, SAME, figure("KL", 0.001, 0.0, 0.002), figure("relative error", 0.03, 0.02, 0.04, decides=False)],
            6,
            "Accuracy kept: outputs within 3 % (2 to 4) of float on 6 samples, kept up to 10 %, the same class as "
            "float for 100 % (61 to 100).",
        ),
        (
            [SQNR, SAME, figure("KL", 0.001, 0.0, 0.002), figure("relative error", 0.2, 0.1, 0.3, decides=False)],
            6,
            "Accuracy uncertain: the same class as float for 100 % (61 to 100) of 6 samples, kept from 95 %: too few "
            "samples to tell, compare on more.",
        ),
        (
            [SQNR, figure("agreement", 0.4, 0.1, 0.76), figure("KL", 0.2, 0.11, 0.4)],
            6,
            "Accuracy lost: the KL divergence of the probabilities is 0.2 (0.11 to 0.4) on 6 samples, lost from 0.1 "
            "on, the same class as float for 40 % (10 to 76).",
        ),
        (
            [figure("SQNR", 4.0, 3.0, 5.0), SAME, figure("KL", 0.001, 0.0, 0.002)],
            6,
            "Accuracy lost: the outputs have 4.0 dB (3.0 to 5.0) SQNR on 6 samples, lost up to 6 dB, the same class as "
            "float for 100 % (61 to 100).",
        ),
        (
            [SQNR, ERROR, figure("same shape", 0.5, 0.2, 0.8)],
            6,
            "Accuracy uncertain: the output has the shape of float for 50 % (20 to 80) of 6 samples, kept from 100 %: "
            "measure it on labelled data (--eval).",
        ),
    ],
)
def test_the_figure_that_decided_is_named(figures: list[dict[str, Any]], samples: int, text: str) -> None:
    nature: Nature = "classes" if any(one["name"] == "KL" for one in figures) else "values"
    state, by = judge(nature, [QualityFigure(**one) for one in figures], samples)
    values = metrics(("y", state, figures), nature=nature, held_out=0)
    values["quality"][0] |= {"samples": samples, "decided_by": by}
    found = verdict_of(values)
    assert found.text == text and found.accuracy == state


def test_the_worst_output_is_that_whose_interval_is_closest_to_the_limit() -> None:
    narrow = figure("relative error", 0.09, 0.089, 0.091)
    wide = figure("relative error", 0.08, 0.05, 0.099)
    found = verdict_of(metrics(("a", "kept", [SQNR, narrow]), ("b", "kept", [SQNR, wide])))
    assert "'b' is within 8 % (5 to 9.9) of float" in found.text


def test_states_do_not_decide() -> None:
    state = ("cache", "unjudged", [SQNR, figure("relative error", 52.0, 40.0, 60.0, decides=False)])
    assert verdict_of(metrics(KEPT, state)).accuracy == "kept"
    values = metrics(KEPT, state)
    values["quality"][1]["nature"] = "state"
    values["outputs"][1] |= {"name": "cache", "sqnr_db": -3.0, "constant": True}
    assert verdict_of(values).accuracy == "kept", "nobody reads a state"
    values["outputs"][1]["not_finite"] = 1
    assert verdict_of(values).accuracy == "lost", "but NaN spreads"


def test_too_few_samples() -> None:
    values = metrics(("y", "uncertain", [figure("SQNR", 40.0, -math.inf, math.inf), ERROR]))
    values["quality"][0]["samples"] = 1
    text = verdict_of(values).text
    assert (
        "within 3 % (2 to 4) of float on 1 held-out sample, kept up to 10 %: too few samples to tell, compare on more"
        in text
    )


def test_rows_of_detections_cannot_be_matched() -> None:
    rows = ("y", "uncertain", [SQNR, figure("same shape", 1.0, 0.9, 1.0)])
    found = verdict_of(metrics(rows, nature="detections"))
    assert found.accuracy == "uncertain" and "which cannot be matched" in found.text
    values = metrics(rows, nature="detections")
    values["outputs"][0] |= {"compared": 0, "sqnr_db": -3.0}
    assert verdict_of(values).accuracy == "uncertain", "another number of detections is no loss"


def test_figures_of_calibration_data_say_so() -> None:
    text = verdict_of(metrics(KEPT, held_out=0, calibrated=True)).text
    assert text.startswith(
        "Accuracy kept on the calibration data: outputs within 3 % (2 to 4) of float on 64 samples, "
    )


DOUBT = "input 'x' holds values from 0 to 255, which looks too large for the model"


def test_data_in_doubt_comes_first() -> None:
    """Figures that compare the same wrong data prove nothing, whatever they are."""
    found = verdict_of(metrics(KEPT, doubts=[DOUBT], size_ratio=0.5))
    assert found.accuracy == "doubtful" and found.ok and found.tone == "warn"
    assert found.text == (
        f"Data in doubt: {DOUBT}; on this data, outputs within 3 % (2 to 4) of float on 64 held-out samples; "
        "2 times smaller."
    )
    far = ("y", "uncertain", [SQNR, figure("relative error", 0.2, 0.1, 0.3)])
    assert "measure it" not in verdict_of(metrics(far, doubts=[DOUBT])).text, "first the data"
    assert verdict_of({"doubts": [DOUBT]}).text == f"Data in doubt: {DOUBT}."


def labelled(
    difference: tuple[float, float, float], samples: int = 500, before: float = 0.912, **more: Any
) -> dict[str, Any]:
    change, low, high = difference
    rows = [
        {
            "model": "float",
            "metric": {"value": before, "low": before - 0.02, "high": before + 0.02},
            "difference": None,
            "loss": 0.0,
        },
        {
            "model": "q",
            "metric": {"value": before + change, "low": 0.88, "high": 0.92},
            "difference": {"value": change, "low": low, "high": high},
            "loss": -change,
        },
    ]
    return {
        "metric": "top1",
        "unit": "",
        "higher_is_better": True,
        "share": True,
        "samples": samples,
        "rows": rows,
        **more,
    }


@pytest.mark.parametrize(
    ("difference", "accuracy", "max_loss"),
    [
        ((-0.015, -0.02, -0.011), "lost", None),
        ((-0.012, -0.018, -0.004), "kept", 0.02),
        ((-0.012, -0.03, 0.006), "uncertain", None),
        ((-0.004, -0.014, 0.008), "uncertain", None),
        ((-0.004, -0.009, 0.001), "kept", None),
        ((0.004, -0.008, 0.02), "kept", None),
        ((-0.2, -math.inf, math.inf), "uncertain", None),
    ],
)
def test_labels_decide_by_the_interval_of_the_loss(
    difference: tuple[float, float, float], accuracy: str, max_loss: float | None
) -> None:
    """The outputs do not count if there are labels."""
    far = ("y", "lost", [SQNR, figure("relative error", 0.9, 0.8, 1.0)])
    found = verdict_of(metrics(far, evaluation=labelled(difference) | {"max_loss": max_loss}))
    assert found.accuracy == accuracy
    change, low, high = difference
    word, first, last = ("gain", low, high) if change > 0 else ("loss", -high, -low)
    ends = f" ({100 * first:.3g} to {100 * last:.3g})" if math.isfinite(low) else ""
    loss = f"a {word} of {abs(100 * change):.3g} points{ends}"
    limit = "2 points" if max_loss else "1 point"
    more = ": evaluate more samples" * (accuracy == "uncertain")
    assert found.text == (
        f"Accuracy {accuracy}: top1 {0.912 + change:.4f}, float 0.9120, {loss} "
        f"on 500 labelled samples, kept up to {limit}{more}."
    )


def test_a_relative_loss_decides_and_is_printed() -> None:
    """Of a metric that is no share, the loss relative to float decides: 0.4 dB of 32 are more than 1 %."""
    value = labelled((-0.4, -0.45, -0.35), before=32.0) | {"metric": "psnr", "unit": "dB", "share": False}
    value["rows"][1]["loss"] = 0.0125
    assert verdict_of(metrics(KEPT, evaluation=value)).text == (
        "Accuracy lost: psnr 31.6 dB, float 32 dB, a loss of 1.25 % (1.09 to 1.41) on 500 labelled samples, "
        "kept up to 1 %."
    )


def test_few_labels_prove_nothing() -> None:
    assert verdict_of(metrics(KEPT, evaluation=labelled((0.0, 0.0, 0.0), samples=4))).accuracy == "uncertain"


@pytest.mark.parametrize(("before", "doubtful"), [(0.092, True), (0.115, True), (0.3, False)])
def test_a_float_model_that_guesses(before: float, doubtful: bool) -> None:
    found = verdict_of(metrics(KEPT, evaluation=labelled((0.0, -0.004, 0.004), before=before, chance=0.1)))
    assert (found.accuracy == "doubtful") is doubtful
    assert ("check the labels" in found.text) is doubtful
    ends = f"top1 {before:.4f} ({before - 0.02:.3g} to {before + 0.02:.3g}), which guessing may have too (0.1)"
    assert (ends in found.text) is doubtful, "the interval decides"


@pytest.mark.parametrize(
    ("ratio", "interval", "busy", "text"),
    [
        (1.0, (0.96, 1.04), False, "as fast as float (0.96 to 1.04) on this CPU"),
        (1.0, (0.96, 1.04), True, "speed unclear (0.96 to 1.04 of float; the machine is busy)"),
        (1.03, (1.01, 1.04), False, "as fast as float (1.01 to 1.04) on this CPU"),
        (1.0, (0.6, 1.8), False, "speed unclear (0.6 to 1.8 of float)"),
        (1.0, (0.6, 1.8), True, "speed unclear (0.6 to 1.8 of float; the machine is busy)"),
        (2.4, (1.1, 8.3), True, "speed unclear (1.1 to 8.3 of float; the machine is busy)"),
        (0.9, (0.8, 1.001), False, "speed unclear (0.8 to 1 of float)"),
        (5.0, (4.0, 6.0), False, "5 times slower (4 to 6) on this CPU"),
        (0.5, (0.4, 0.625), True, "2 times faster (1.6 to 2.5; the machine is busy) on this CPU"),
        (2.0, (2.0001, 2.0004), False, "2 times slower on this CPU"),
        (1.0, None, False, "speed unclear (too few runs)"),
    ],
)
def test_speed(ratio: float, interval: tuple[float, float] | None, busy: bool, text: str) -> None:
    """A tie needs the whole interval, and a quiet machine."""
    found = verdict_of(metrics(KEPT, latency_ratio=ratio, latency_interval=interval, busy=busy))
    assert found.clauses[-1] == text


@pytest.mark.parametrize(
    ("size", "latency", "first"),
    [
        (
            0.999,
            (1.2, (1.1, 1.3)),
            "Nothing gained: about the same size, 1.2 times slower (1.1 to 1.3) on this CPU; acc",
        ),
        (2.98, (1.0, (0.99, 1.01)), "Nothing gained: 2.98 times larger, as fast as float (0.99 to 1.01) on this CPU"),
        (0.96, (1.2, (1.1, 1.3)), "Nothing gained: about the same size, 1.2 times slower"),
        (0.94, (1.2, (1.1, 1.3)), "Accuracy kept"),
        (2.98, (0.5, (0.4, 0.6)), "Accuracy kept"),
        (2.98, None, "Accuracy kept"),
        (0.5, (1.2, (1.1, 1.3)), "Accuracy kept"),
        (1.0, (1.0, (0.6, 1.8)), "Accuracy kept"),
    ],
)
def test_nothing_gained(size: float, latency: tuple[float, tuple[float, float]] | None, first: str) -> None:
    more: dict[str, Any] = {} if latency is None else {"latency_ratio": latency[0], "latency_interval": latency[1]}
    found = verdict_of(metrics(KEPT, size_ratio=size, **more))
    assert found.text.startswith(first)
    assert (found.tone == "warn") is first.startswith("Nothing"), "accuracy alone is no result"
    assert "1 times" not in found.text


def test_no_interval_without_width_or_end() -> None:
    assert interval_text(1.0, 1.0) == interval_text(-math.inf, math.inf) == interval_text(1.0001, 1.0002) == ""
    assert value_text("agreement", 1.0, 1.0, 1.0, "") == "100 %"
    assert value_text("SQNR", 30.0, 29.0, 31.0, "dB") == "30.0 dB (29.0 to 31.0)"


@pytest.mark.parametrize(
    ("after", "accuracy"), [(36.5, "kept"), (37.9, "uncertain"), (45.0, "lost"), (math.nan, "lost")]
)
def test_decoders_by_their_perplexity(after: float, accuracy: str) -> None:
    speed = [token_time(40.0, 0.7), token_time(60.0, 0.5, (0.4, 0.625)), token_time(50.0, 0.1)]
    decoder = {"perplexity": after, "float_perplexity": 36.41, "agreement": 0.97, "tokens": 1022, "speed": speed}
    found = verdict_of({"llm": {**decoder, "bytes": (400, 100)}})
    assert found.accuracy == accuracy
    limit = "lost from +10 % on" if accuracy == "lost" else "kept up to +1 %"
    assert f"on 1,022 tokens, {limit}, the same top token at 97.0 % of positions" in found.text
    assert found.text.endswith("; 2 times faster (1.6 to 2.5) on this CPU; 4 times smaller.")


def token_time(
    float_rate: float, ratio: float, interval: tuple[float, float] | None = None, busy: bool = False
) -> dict[str, Any]:
    return {"float_tokens_per_second": float_rate, "ratio": ratio, "ratio_interval": interval, "busy": busy}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (token_time(40.0, 0.5, None, True), "speed unclear (the machine is busy)"),
        (token_time(40.0, 0.5, None), "speed unclear (too few runs)"),
        (token_time(40.0, 1.0, (0.6, 1.8), True), "speed unclear (0.6 to 1.8 of float; the machine is busy)"),
        (token_time(40.0, 1.0, (0.97, 1.02)), "as fast as float (0.97 to 1.02) on this CPU"),
        (token_time(40.0, 2.0, (1.9, 2.1)), "2 times slower (1.9 to 2.1) on this CPU"),
        ({"tokens_per_second": 9.0, "float_tokens_per_second": 3.0}, None),
    ],
)
def test_speed_of_decoders_in_the_words_of_other_models(row: dict[str, Any], text: str | None) -> None:
    """Tokens per second without an interval, as in older reports, say nothing."""
    decoder = {"perplexity": 36.5, "float_perplexity": 36.41, "tokens": 1022, "speed": [row], "bytes": (400, 100)}
    clauses = verdict_of({"llm": decoder}).clauses
    assert clauses[1:] == ((text,) if text else ()) + ("4 times smaller",)
    assert "faster" not in verdict_of({"llm": decoder}, backend="tensorrt").text, "onnxruntime ran it"


def test_a_decoder_that_gains_nothing() -> None:
    speed = [token_time(40.0, 1.2, (1.1, 1.3))]
    decoder = {"perplexity": 36.5, "float_perplexity": 36.41, "tokens": 1022, "speed": speed, "bytes": (400, 400)}
    assert verdict_of({"llm": decoder}).text.startswith("Nothing gained: about the same size, 1.2 times slower")


def test_an_unusable_output_is_lost_with_any_figures() -> None:
    values = metrics(KEPT)
    values["outputs"][0]["sqnr_db"] = 1.0
    assert "lost in error: SQNR 1.0 dB, lost below 3 dB" in verdict_of(values).text
    values["outputs"][0]["not_finite"] = 7
    found = verdict_of(values, problems=["output 'y' has 7 NaN"])
    assert found.accuracy == "lost" and "NaN or infinite" in found.text


def test_a_missed_limit_is_named() -> None:
    found = verdict_of(metrics(KEPT), problems=["the size is 0.9", "another"])
    assert found.accuracy == "kept" and not found.ok
    assert "the size is 0.9 (and 1 more)" in found.text


@pytest.mark.slow
def test_a_detector_of_the_pack(pack: Path) -> None:
    """At 8 bits, 12 % of its detections change: nothing below the quality line, and no proof that accuracy is kept."""
    feeds = load_pack(pack).load_calib("fastestdet", limit=2)
    settings = {"VERIFY": {"LATENCY": False}}
    model = pack / "models" / "fastestdet.onnx"
    report = sbonnx.quantize(model, feeds, recipe=settings, backend="virtual", effort="fast")
    assert report.ok, report.problems
    (row,) = some(report.metrics).quality
    assert 10 < row.figures[0].value < 20, "dB"
    assert report.verdict.accuracy == "uncertain"
    assert "kept up to 10 %: measure it on labelled data (--eval)" in report.verdict.text


def test_speed_is_that_of_onnxruntime_only() -> None:
    values = metrics(KEPT, latency_ratio=5.0, latency_interval=(4.0, 6.0), size_ratio=1.0)
    assert "5 times slower (4 to 6)" in verdict_of(values).text
    for backend in ("tensorrt", "virtual"):
        assert "this CPU" not in verdict_of(values, backend=backend).text
        assert "nothing gained" not in verdict_of(values, backend=backend).text.lower(), "its speed is not known"


def test_nothing_compared() -> None:
    found = verdicts.verdict_of(None)
    assert (found.accuracy, found.ok) == ("unknown", True)
    assert found.text == "Accuracy unknown: nothing was compared with float."
