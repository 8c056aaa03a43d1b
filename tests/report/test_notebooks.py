"""Summaries, tables and charts of values in notebooks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from sbonnx.html_report import Card, render_card
from sbonnx.profile import LayerLoss, Profile
from sbonnx.quant_model import QuantModel
from sbonnx.report import Refusal, Report
from tests.support.models import residual

ROWS = tuple(
    {"node": f"n{at}", "tensor": f"t{at}", "label": "int8", "alone_db": 30.0 + at, "sqnr_db": 20.0 + at, "scale": 0.1}
    for at in range(12)
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
    refused = replace(plan, refusals=(Refusal("quantize", "a", "too small"), Refusal("quantize", "b", "too small")))
    assert (
        "2 refusals" in texts(refused._repr_html_()) and '<td style="text-align: left">2</td>' in refused._repr_html_()
    )


def test_a_profile() -> None:
    rows = tuple(LayerLoss(f"n{at}", "Conv", "t", "", "int8", alone=40.0 - at, gathered=None) for at in range(3))
    shown = texts(Profile("sqnr", rows, {"y": 31.5}, 4)._repr_html_())
    assert "3 layers on 4 feeds" in shown and "output y: 31.5 dB" in shown
    assert shown.index("n2") < shown.index("n1") < shown.index("n0"), "worst first"


def test_charts() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="an extra: sbonnx[plot]")
    matplotlib.use("Agg")
    ax = report().plot(top=3)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["n0", "n1", "n2"]
    assert [bar.get_width() for bar in ax.patches] == [30.0, 31.0, 32.0, 20.0, 21.0, 22.0]
    losses = (
        LayerLoss("a", "Conv", "t", "", "int8", alone=12.0, weights=float("inf")),
        LayerLoss("b" * 60, "Conv", "t", "", "int8", alone=11.0, weights=None),
    )
    ax = Profile("sqnr", losses, {}, 4).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["alone", "weights"]
    assert [bar.get_width() for bar in ax.patches] == [11.0, 12.0, 0.0, 0.0]
    assert [text.get_text().strip() for text in ax.texts] == ["∞"]


def test_a_table() -> None:
    pandas = pytest.importorskip("pandas", reason="an extra: sbonnx[plot]")
    frame = report().layers_frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame["sqnr_db"]) == [row["sqnr_db"] for row in ROWS]


@pytest.mark.parametrize(("module", "call"), [("pandas", "layers_frame"), ("matplotlib.pyplot", "plot")])
def test_without_the_extra(module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{call}\(\) needs .*: pip install 'sbonnx\[plot\]'"):
        getattr(report(), call)()
