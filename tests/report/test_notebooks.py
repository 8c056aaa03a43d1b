"""Summaries, tables and charts of values in notebooks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sbonnx.batch.jobs.job import BatchReport, Job, JobResult, Outcome
from sbonnx.linting.report import LintReport, SeverityCounts
from sbonnx.llm import AdaptedDecoder
from sbonnx.present.html import Card, render_card
from sbonnx.profiling import Profile
from sbonnx.profiling.metric_losses import EvaluatedProfile, MetricLosses
from sbonnx.qdq.difference import ModelDifference, PairDifference
from sbonnx.quant_model import QuantModel
from sbonnx.report import LayerError, Reason, Refusal, Report
from sbonnx.report.comparison import Comparison
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.report.details import LayerLoss
from sbonnx.report.figures import Evaluation, MetricRow, MetricValue, OutputDifference, OutputQuality, QualityFigure
from sbonnx.report.pruned import PrunedDimension, PruningReport
from sbonnx.report.verdict import figure_text
from sbonnx.verify.benchmark import Speed
from tests.support.models import residual

ROWS = tuple(
    LayerError(f"n{at}", f"t{at}", "int8", alone_db=30.0 + at, sqnr_db=20.0 + at, scale=0.1) for at in range(12)
)


def report(**more: Any) -> Report:
    return Report("folder/m.onnx", "q.onnx", "onnxruntime", layers=ROWS, **more)


def texts(page: str) -> str:
    """Text of a page that must be well-formed XML."""
    return " ".join("".join(ElementTree.fromstring(page).itertext()).split())


def test_a_report_shows_its_verdict() -> None:
    shown = texts(report(problems=("the size is 0.9",))._repr_html_())
    assert shown.startswith("m.onnx for onnxruntime Accuracy unknown")
    assert "the size is 0.9" in shown and "n7" in shown and "n8" not in shown and "4 more; all: " in shown


def test_a_report_shows_its_metric_first() -> None:
    value = MetricValue(0.87, 0.85, 0.89)
    rows = (MetricRow("m.onnx", value), MetricRow("q.onnx", value, MetricValue(0.0, -0.01, 0.01)))
    metrics = Comparison((OUTPUT,), 9, evaluation=Evaluation("top1", "", True, True, 500, "wilson", rows))
    shown = texts(report(metrics=metrics)._repr_html_())
    assert 0 < shown.index("top1: 0.87, float 0.87") < shown.index("SQNR: 30.0 dB")


def test_names_are_only_text() -> None:
    page = render_card(Card("<script>a</script>", "<b>", rows=[("<i>",)], columns=("&",)))
    assert "<script>" not in page and texts(page) == "<script>a</script> <b>& <i>"


def test_the_page_of_a_report() -> None:
    page = report().to_html()
    assert page.startswith("<!doctype html>") and "m.onnx for onnxruntime" in page and "Content-Security-Policy" in page


def test_a_plan_and_a_model() -> None:
    model = QuantModel(residual(), bits="w8a8")
    plan = model.prepared.plan
    shown = texts(model._repr_html_())
    assert f"{len(plan.sites)} quantized tensors" in shown and "calibration: not yet" in shown
    assert f"weight sites: {len(plan.of_role('weight'))}" in texts(plan._repr_html_())
    small = Reason("weight-too-small", "too small")
    refused = replace(plan, refusals=(Refusal("quantize", "a", small), Refusal("quantize", "b", small)))
    assert "2 refusals" in texts(refused._repr_html_()) and ">2</td>" in refused._repr_html_()


def test_a_profile() -> None:
    rows = tuple(LayerLoss(f"n{at}", "Conv", "t", "", "int8", alone=40.0 - at, gathered=None) for at in range(3))
    shown = texts(Profile("sqnr", rows, {"y": 31.5}, 4)._repr_html_())
    assert "Losses of 3 layers on 4 feeds: sqnr in dB" in shown and "output y: 31.5 dB" in shown
    assert shown.index("n2") < shown.index("n1") < shown.index("n0"), "worst first"


def test_the_line_of_a_profile_and_of_lint() -> None:
    rows = tuple(LayerLoss(f"n{at}", "Conv", "t", "", "int8", alone=40.0 - at, gathered=None) for at in range(2))
    before, after = (MetricRow("m", MetricValue(value, 0.0, 1.0), None, 0.0) for value in (0.9, 0.8))
    losses = MetricLosses("top1", "", True, True, 10, before, after, ())
    shown = repr(EvaluatedProfile(Profile("sqnr", rows, {}, 1), losses))
    assert "top1 0.8000 (0.0000 to 1.0000), float 0.9000" in shown and "that of n1, sqnr 39.0 dB" in shown
    counts = LintReport("m.onnx", "onnxruntime", 9, SeverityCounts(0, 1, 2), (), (), None, None)
    assert "9 rules, 0 errors, 1 warning, 2 info" in repr(counts)
    figure = QualityFigure("SQNR", float("inf"), float("inf"), float("inf"), "dB")
    assert figure_text(figure) == "SQNR ∞ dB"


QUALITY = OutputQuality(
    "y", "values", "", 9, (QualityFigure("relative error", 0.05, 0.04, 0.06, kept=0.1, line=0.5),), "kept"
)
OUTPUT = OutputDifference("y", 0.1, 0.2, 30.0, 0.995, None, 0, 9, 0, False, False, -1.0, 1.0)
DECODER = DecoderEvaluation("q", "m", 2, 1000, 36.5, 36.4, 0.002, 0.97, bytes=(400, 100))
PAIR = PairDifference("w", ("int8", "int4"), None, None, (1, 1))
JOB = Job("a", str(Path("m.onnx").absolute()), None, "tensorrt", "q.onnx")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            Evaluation(
                "top1", "", True, True, 500, "wilson",
                (
                    MetricRow("m.onnx", MetricValue(0.9, 0.88, 0.92)),
                    MetricRow("q.onnx", MetricValue(0.87, 0.85, 0.89), MetricValue(-0.03, -0.04, -0.02), 0.03),
                ),
            ),
            ["top1 on 500 labelled samples", "Accuracy lost: top1 0.8700, float 0.9000", "q.onnx 0.87 (0.85 to 0.89)"],
        ),
        (
            Evaluation("top1", "", True, True, 5, "wilson", (MetricRow("m.onnx", MetricValue(0.9, 0.88, 0.92)),)),
            ["top1 on 5 labelled samples", "m.onnx 0.9 (0.88 to 0.92)"],
        ),
        (
            Comparison((OUTPUT,), 9, 400, 100, quality=(QUALITY,)),
            ["on 9 feeds", "Accuracy kept: outputs within 5 %", "4 times smaller", "relative error 5 %"],
        ),
        (
            Speed("q.onnx", 2, 8, 50, 1.5, 1.2, 1.9, (1.4, 1.6), 5333.0, 0.5, (0.4, 0.6)),
            ["q.onnx, 2 threads, 8 samples a run", "median: 1.5 ms (1.4 to 1.6)", "samples/s: 5 333"],
        ),
        (
            ModelDifference({"a": "int8"}, {}, (PAIR,), 5, (), 2, (), (), {}),
            ["different", "quantized in the first only: 1", "equally: 5", "w int8 int4"],
        ),
        (
            PruningReport(
                "a/m.onnx", None, 0.6, 0.7, dimensions=(PrunedDimension(("conv",), (), 32, 20, None),)
            ),
            ["m.onnx, pruned Accuracy unknown", "multiplications: 60.00 % remain", "conv 32 20"],
        ),
        (DECODER, ["q Accuracy kept: perplexity 36.5, float 36.4 (+0.3 %)", "Perplexity: 36.5 (float 36.4", "97.00 %"]),
        (
            AdaptedDecoder("q2", 7, (2.0, 1.0), replace(DECODER, perplexity=45.0), DECODER),
            ["q2, before training of 7 weights Accuracy lost", "q2, after training of 7 weights Accuracy kept"],
        ),
        (
            BatchReport(
                "nightly", "1", "2026-01-01T00:00:00+00:00", "2026-01-01T00:01:00+00:00",
                (JobResult(JOB, Outcome("k", "refused", reason=f"'{JOB.model}' is no model")),),
            ),
            ["Batch nightly: 1 job 1 refused; took 1 min 00 s.", "a refused", "'m.onnx' is no model"],
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_results_show_a_summary(value: Any, expected: list[str]) -> None:
    page = ElementTree.fromstring(f"<div>{value._repr_html_()}</div>")
    shown = " ".join(" ".join(page.itertext()).split())
    assert not [text for text in expected if text not in shown], shown


def test_charts() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="an extra: sbonnx[plot]")
    matplotlib.use("Agg")
    ax = report().plot(top=3)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["n0", "n1", "n2"]
    assert [bar.get_width() for bar in ax.patches] == [-10.0, -9.0, -8.0, -20.0, -19.0, -18.0]
    assert {bar.get_x() + bar.get_width() for bar in ax.patches} == {20.0, 21.0, 22.0, 30.0, 31.0, 32.0}
    assert ax.xaxis_inverted() and ax.get_xlabel() == "SQNR, dB: a longer bar is a larger loss"
    assert not ax.lines, "no limit is known"
    limited = replace(QUALITY, figures=(QualityFigure("SQNR", 30.0, 29.0, 31.0, line=35.5),))
    ax = report(metrics=Comparison((OUTPUT,), 9, quality=(limited,))).plot(top=3)
    assert list(ax.lines[0].get_xdata()) == [35.5, 35.5]
    assert {bar.get_x() + bar.get_width() for bar in ax.patches} == {20.0, 21.0, 22.0, 30.0, 31.0, 32.0}
    assert "limit of the outputs, 35.5" in [text.get_text() for text in ax.get_legend().get_texts()]
    losses = (
        LayerLoss("a", "Conv", "t", "", "int8", alone=12.0, weights=float("inf")),
        LayerLoss("b" * 60, "Conv", "t", "", "int8", alone=11.0, weights=None),
    )
    ax = Profile("sqnr", losses, {}, 4).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["isolated", "weights"]
    assert [bar.get_width() for bar in ax.patches] == [-9.0, -8.0, 0.0, 0.0]
    assert [text.get_text().strip() for text in ax.texts] == ["∞"]


def test_names_in_charts_are_unique() -> None:
    """Those that differ in the middle, and those of a node with several quantized inputs."""
    matplotlib = pytest.importorskip("matplotlib", reason="an extra: sbonnx[plot]")
    matplotlib.use("Agg")
    rows = [replace(ROWS[0], node=f"{'a' * 25}{name}{'b' * 25}") for name in ("x", "y")]
    rows += [replace(ROWS[0], node="add", tensor=tensor) for tensor in ("t", "u")]
    ax = replace(report(), layers=(*rows, replace(ROWS[0], node="c" * 60))).plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(set(labels)) == len(labels) and labels[2:4] == ["add ← t", "add ← u"]
    assert ["x" in label for label in labels] == [True, False, False, False, False]
    assert labels[4] == f"{'c' * 21}…{'c' * 22}", "not longer than it must be"


def test_a_table() -> None:
    pandas = pytest.importorskip("pandas", reason="an extra: sbonnx[plot]")
    frame = report().layers_frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame["accumulated"]) == [row.sqnr_db for row in ROWS]
    assert list(frame["isolated"]) == [row.alone_db for row in ROWS]


@pytest.mark.parametrize(("module", "call"), [("pandas", "frame"), ("matplotlib.pyplot", "plot")])
def test_without_the_extra(module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{call}\(\) needs .*: pip install 'sbonnx\[plot\]'"):
        getattr(report(), call)()
