"""Heat map, sparklines and scatter chart of a batch page."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from sbonnx.batch.jobs.job import BatchReport, HistoryRow
from sbonnx.present.html import render_card
from sbonnx.present.html.batch_charts import SPARK_HEIGHT, sparkline
from sbonnx.present.html.cards import batch_card
from tests.present.reports import batch, batch_page, job, junit_of, layer, network, overview_of
from tests.support.values import built


def row(model: str, target: str, db: float | None, ratio: float = 0.5, **more: Any) -> dict[str, Any]:
    metrics = {"outputs": [{"name": "y", "sqnr_db": db}], "latency_ratio": ratio}
    made = None if db is None else network([layer("n")], backend=target.partition("@")[0], metrics=metrics)
    status = "failed" if db is None else "done"
    found = job(f"{model}-{target}{more.pop('name', '')}", status, report=made, reason="" if made else "broken", **more)
    found["job"] |= {"model": f"models/{model}.onnx", "backend": target}
    return found


def test_models_and_targets() -> None:
    rows = [row("a", "onnxruntime", 41.0), row("b", "onnxruntime", 12.0), row("b", "tensorrt@10", None)]
    heat = overview_of(batch(rows)).heat
    assert heat is not None and heat.columns == ("onnxruntime", "tensorrt@10")
    (a, (best, none)), (b, (low, failed)) = heat.rows
    assert (a, b, none) == ("a", "b", ())
    assert [(cell.text, cell.shade) for cell in (*best, *low, *failed)] == [("41.0", 6), ("12.0", 1), ("failed", None)]
    page = batch_page(batch(rows))
    assert 'class="cell warn shade6"' in page and f'href="#{failed[0].anchor}"' in page


def test_the_metric_that_was_asked_for_with_the_value_before() -> None:
    """In the heat map and in the table, whose column has its name."""
    rows = [row("a", "onnxruntime", 41.0), row("b", "onnxruntime", 12.0)]
    for job_row, value in zip(rows, (0.91, 0.85), strict=True):
        metrics = job_row["outcome"]["report"]["metrics"]
        metrics["own"] = [{"name": "top1", "float": 0.92, "quantized": value}]
    runs = [HistoryRow("", "done", 41.0, None, None, "top1", value) for value in (0.9, 0.91)]
    report = {**batch(rows), "history": {"a-onnxruntime": runs}}
    view = overview_of(report)
    assert view.heat is not None and view.metric == "top1" and view.columns[2] == "top1"
    cells = [cell for _, (group,) in view.heat.rows for cell in group]
    assert [cell.text for cell in cells] == ["0.91", "0.85"]
    assert cells[0].label == "a-onnxruntime: done, top1 0.91, before 0.9, SQNR 41.0 dB"
    assert [job.cells[2].threshold for job in view.jobs] == ["before 0.9", ""]
    shown = ElementTree.fromstring(f"<div>{render_card(batch_card(built(BatchReport, report)))}</div>")
    card = " ".join(" ".join(shown.itertext()).split())
    assert "job status top1 SQNR, dB reason" in card and "0.91 (before 0.9) 41.0" in card and "0.85 12.0" in card
    properties = {
        row.get("name"): row.get("value") for row in ElementTree.fromstring(junit_of(report)).iter("property")
    }
    assert properties["a-onnxruntime: top1"] == "0.91" and properties["a-onnxruntime: top1, before"] == "0.9"
    assert properties["b-onnxruntime: top1"] == "0.85" and "b-onnxruntime: top1, before" not in properties


def test_a_limit_of_the_metric_gives_the_colours() -> None:
    """An accepted job is not red for its SQNR."""
    rows = [row("a", "onnxruntime", 12.0), row("b", "onnxruntime", 41.0)]
    for job_row, loss in zip(rows, (0.002, 0.05), strict=True):
        metric = {"value": 0.9 - loss, "low": 0.8, "high": 0.95}
        models = [
            {"model": "float", "metric": {**metric, "value": 0.9}},
            {"model": "q", "metric": metric, "loss": loss},
        ]
        evaluation = {"metric": "top1", "unit": "", "share": True, "higher_is_better": True, "samples": 9}
        evaluation |= {"interval": "wilson", "rows": models}
        job_row["outcome"]["report"]["metrics"]["evaluation"] = evaluation
        job_row["outcome"]["accepted"] = [("max_loss", loss, 0.01, loss < 0.01)]
    heat = overview_of(batch(rows)).heat
    assert heat is not None and heat.limited
    assert [cell.shade for _, (group,) in heat.rows for cell in group] == [6, 0]
    page = batch_page(batch(rows))
    assert "top1; colour: its loss" in page and "0.2 points lost, limit 1" in page


def test_a_single_pair_has_no_heat_map() -> None:
    page = overview_of(batch([row("a", "onnxruntime", 41.0), row("a", "onnxruntime", 12.0, name="-w4")]))
    assert page.heat is None and page.scatter is not None


def test_failures_come_first() -> None:
    view = overview_of(batch([row("a", "onnxruntime", 41.0), row("b", "onnxruntime", None), row("c", "virtual", 9.0)]))
    assert [one.model for one in view.jobs] == ["b", "a", "c"]


def test_loss_against_time_is_that_of_this_machine() -> None:
    """The latency of files for TensorRT was measured in onnxruntime."""
    rows = [row("a", "onnxruntime", 40.0, 0.5), row("b", "onnxruntime", 20.0, 2.0), row("b", "tensorrt@10", 30.0, 9.0)]
    chart = overview_of(batch(rows)).scatter
    assert chart is not None
    first, second = chart.points
    assert first.x < chart.one < second.x and first.y < second.y
    assert first.label == "a-onnxruntime: 40.0 dB, 0.50 of the time" and first.name == "a-onnxruntime"
    assert overview_of(batch(rows[:1])).scatter is None


def test_a_sparkline_of_the_last_runs() -> None:
    runs = [HistoryRow("", "done", value, None, None) for value in (30.0, None, 32.0, math.inf, 20.0, 40.0)]
    line = sparkline(runs)
    assert line is not None and line.change == 20.0
    assert line.label == "SQNR of the last 6 runs, dB: 30.0, –, 32.0, ∞, 20.0, 40.0"
    assert re.sub(r"[-\d. ]", "", line.path) == "MMML", "gaps where there is no figure"
    assert line.y == pytest.approx(4.0) and f"{SPARK_HEIGHT - 4.0:.1f}" in line.path
    assert sparkline(runs[:2]) is None
    rows = [row("a", "onnxruntime", 40.0), row("b", "onnxruntime", 20.0)]
    page = batch_page({**batch(rows), "history": {"a-onnxruntime": runs}})
    assert page.count('<svg class="spark"') == 1 and "<th>last runs</th>" in page
    assert "last runs" not in batch_page(batch(rows))
