"""Contents and markup of the pages, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from typing import Any, get_args

import pytest

from sbonnx.batch.jobs.job import BatchReport, Job, JobResult, Outcome, Status
from sbonnx.present import html
from sbonnx.present.html import charts, formatting
from sbonnx.present.html.overview import STATUSES
from sbonnx.report.details import TensorHistogram
from sbonnx.system.terminal import to_json
from tests.present.markup import Page
from tests.present.reports import (
    EVIL,
    batch,
    batch_page,
    details,
    job,
    layer,
    network,
    node,
    one_of_each,
    overview_of,
    profiled,
    single_page,
    sites_of,
)
from tests.support.values import built


def pages() -> dict[str, str]:
    """Pages of all reports of these tests, and of an empty one."""
    evil = network(
        [layer(name) for name in EVIL], notes=EVIL, refusals=[{"what": n, "where": n, "why": n} for n in EVIL]
    )
    wide = [layer(f"n{index}", 30.0, 50.0 - index) for index in range(60)]
    nodes = [node(name, *EVIL[:1], refusals=[f"quantize: {name}"]) for name in EVIL]
    explained = network([], details=details(nodes, [profiled(name, 20.0, 30.0) for name in EVIL]))
    return {
        "one": single_page(network([layer("conv1"), layer("conv2")])),
        "bare": single_page({"model": "m", "output": None, "backend": "onnxruntime"}),
        "unmeasured": single_page(network([], metrics={})),
        "many layers": single_page(network(wide, sites=sites_of(wide))),
        "evil": single_page(evil),
        "evil details": single_page(explained),
        "batch": batch_page(one_of_each()),
        "evil batch": batch_page(
            batch([job(name, "failed", reason=name, report=evil) for name in EVIL], title=EVIL[0])
        ),
        "no jobs": batch_page(batch([])),
    }


PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_valid_markup(name: str) -> None:
    """Well nested, unique ids, targets of all references, and nothing that a strict policy blocks."""
    text = PAGES[name]
    page = Page(text)
    assert page.wrong == []
    assert text.startswith("<!doctype html>") and text.encode("utf-8")
    ids = list(page.attributes("id"))
    assert len(ids) == len(set(ids))
    assert not [ref for refs in page.attributes("aria-labelledby") for ref in refs.split() if ref not in ids]
    assert not [ref for ref in page.attributes("href") if ref != "data:," and ref.removeprefix("#") not in ids]
    assert not list(page.attributes("src")) and "url(" not in text and "@import" not in text
    assert not [key for _, attrs in page.elements for key in attrs if key == "style" or key.startswith("on")]
    assert sum(tag == "style" for tag, _ in page.elements) == 1
    assert sum(tag == "script" for tag, _ in page.elements) == (4 if 'class="graph"' in text else 1)


@pytest.mark.parametrize("name", ["one", "batch", "evil details"])
def test_policy_allows_inline_content_only(name: str) -> None:
    (policy,) = (attrs["content"] for _, attrs in Page(PAGES[name]).elements if "http-equiv" in attrs)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == "'none'"
    for tag in ("script", "style"):
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", PAGES[name], re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in contents]
        assert rules[f"{tag}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)


def test_names_do_not_become_markup() -> None:
    for name in ("evil", "evil details", "evil batch"):
        page = Page(PAGES[name])
        assert not {"img", "i"} & {tag for tag, _ in page.elements}
        words = page.words.replace("\n", "")
        for given in EVIL:
            assert formatting.text(given) in words


def test_charts_have_texts_and_a_table() -> None:
    """Drawings have names, bars are lists with names and values, and the table has all figures."""
    page = Page(PAGES["many layers"])
    (drawing,) = [attrs for tag, attrs in page.elements if tag == "svg" and attrs.get("role") == "img"]
    assert drawing["aria-label"] == "SQNR of every layer, in the order of the network"
    first, more = [attrs["aria-label"] for tag, attrs in page.elements if tag == "ol"]
    assert (first, more) == ("isolated SQNR, worst layers first", "further layers")
    for index in range(60):
        assert f"{50.0 - index:.1f}".replace("-", formatting.MINUS) in page.words and f"n{index}" in page.words


def test_the_worst_eight_layers_come_first() -> None:
    layers = [layer(f"n{index:02}", 40.0, 30.0 + index) for index in range(12)]
    page = single_page(network(layers[::-1]))
    drawn = re.findall(r'class="name mono">(\w+)<', page)
    assert drawn == [f"n{index:02}" for index in range(12)] and "4 more layers" in page
    assert page.index("n07<") < page.index("4 more layers") < page.index("n08<")


def test_layers_of_decoders_are_grouped_by_block() -> None:
    names = [f"/model/layers.{index // 3}/mlp/part{index % 3}/MatMul" for index in range(9)]
    rows = [profiled(name, 30.0 - index, None, 30.0 - index) for index, name in enumerate([*names, "/lm_head/MatMul"])]
    page = single_page(network([], details=details([node(name) for name in names], rows)))
    drawn = [name.replace("<wbr>", "") for name in re.findall(r'class="name mono">(.*?)</span>', page)]
    blocks = [name for name in drawn if name.startswith("/model/layers.")]
    assert blocks == [f"/model/layers.{index}" for index in range(3)]
    assert drawn[:4] == [blocks[0], *(f"mlp/part{index}/MatMul" for index in (2, 1, 0))]
    assert "3 layers, the worst is mlp/part2/MatMul" in page


def test_bits_of_layers() -> None:
    layers = [layer("conv1"), layer("conv2")]
    sites = [*sites_of(layers), {"tensor": "w3", "role": "weight", "label": "int3", "bits": 3, "node": "shared"}]
    words = Page(single_page(network(layers, sites=sites))).words.split("\n")
    assert words.count("int4 axis 0") == 3, "once in the table of types, once for each of two layers"
    assert "shared" in words and "int3" in words
    assert any("w3-4a8" in one for one in words), "weights of several widths"
    assert "of activations" in Page(single_page(network(layers))).words


def test_outputs_by_nature_and_advice() -> None:
    """Figures with interval and line, and the command to try next; names are text."""
    report = network([])
    figure = {"name": "KL", "value": 0.25, "low": 0.125, "high": 0.5, "unit": "nats", "kept": 0.02, "line": 0.1}
    lonely = {"name": "SQNR", "value": 31.25, "low": "-inf", "high": "inf", "unit": "dB", "line": None}
    report["metrics"]["quality"] = [
        {"name": "y", "nature": "classes", "state": "lost", "samples": 16, "figures": [lonely, figure]}
    ]
    measured = {"tested": True, "repaired": True, "figure": "KL", "before": "0.25", "after": "0.01"}
    report["advice"] = {"what": "use 8-bit weights", **measured, "command": "sbonnx quantize '<m>'"}
    page = single_page(report)
    assert "KL 0.25 nats (0.125 to 0.5), kept up to 0.02, lost from 0.1 on" in page and "31.2 dB" in page
    assert "lost" in page
    tried = "Use 8-bit weights (measured: KL 0.01, before 0.25): <code>sbonnx quantize &#39;&lt;m&gt;&#39;</code>"
    assert tried in page and page.index(tried) < page.index('class="tiles"') and "-&gt;" not in page


def test_agreement_has_its_interval_and_a_metric_on_labels_its_own_tile() -> None:
    """16 samples tell little: the tile says so."""
    report = network([])
    figure = {"name": "agreement", "value": 0.875, "low": 0.64, "high": 0.965, "unit": "", "line": 0.75}
    report["metrics"]["outputs"] = [{"name": "y", "sqnr_db": 20.0, "agreement": 0.875}]
    report["metrics"]["quality"] = [{"name": "y", "nature": "classes", "samples": 16, "figures": [figure]}]
    before, after = ({"value": value, "low": 0.8, "high": 0.95} for value in (0.91, 0.9))
    change = {"value": -0.01, "low": -0.02, "high": 0.005}
    second = {"model": "quantized", "metric": after, "difference": change, "loss": 0.01}
    evaluation = {"metric": "top1", "samples": 500, "share": True, "higher_is_better": True}
    report["metrics"]["evaluation"] = {**evaluation, "rows": [{"model": "float", "metric": before}, second]}
    page = single_page(report)
    assert "same class as float, (64 to 96.5), lost up to 75 %, 16 samples" in page
    assert "float 0.91, a loss of 1 point (-0.5 to 2), 500 samples" in page


def test_same_page_from_json() -> None:
    """A report read back has texts where numbers are not finite, and lists for tuples."""
    report = network([layer("n", 12.5, math.inf), layer("m", math.nan, -math.inf)])
    assert single_page(json.loads(to_json(report))) == single_page(report)
    whole = batch([job("a", report=report)])
    assert batch_page(json.loads(to_json(whole))) == batch_page(whole)


def test_every_status_has_a_class() -> None:
    assert tuple(STATUSES) == get_args(Status)


def test_page_of_batch_dataclasses() -> None:
    """A batch that was not read from JSON."""
    asked = Job("one", "m.onnx", None, "onnxruntime", "q.onnx", overrides=(("bits", "w8a8"),))
    outcome = Outcome("k", "unaccepted", "too far off", 1.5, 10, accepted=(("max_size_ratio", 0.5, 0.3, False),))
    report = BatchReport("b", "9.9", "2026-01-01T00:00:00Z", "2026-01-01T01:02:03Z", (JobResult(asked, outcome),))
    page = Page(html.batch_page(report))
    assert "too far off" in page.words and "1 h 02 min" in page.words and "Made by sbonnx 9.9" in page.words
    assert "≤ 0.30" in page.words and "w8a8" in page.words


def test_acceptance_in_the_overview() -> None:
    (row,) = [one for one in overview_of(one_of_each()).jobs if one.status == "unaccepted"]
    sqnr, agreement, metric, size, latency, took, peak = row.cells
    assert (sqnr.text, sqnr.threshold, sqnr.met) == ("31.2", "≥ 20.0 dB", True)
    assert (agreement.text, agreement.threshold, agreement.met) == ("97.50 %", "≥ 98.00 %", False)
    assert (metric.text, metric.threshold, metric.met) == ("0.71", "size of faces ≥ 0.7", True)
    assert (size.text, size.met, latency.text) == ("0.26", None, "0.60")
    assert (took.text, peak.text) == ("2.50 s", "300 MB")


def test_unmeasured_values_have_no_figure() -> None:
    reason = "accept.max_latency_ratio cannot be judged: the latency was not measured"
    row = job("a", "unaccepted", reason=reason, accepted=(("max_latency_ratio", math.nan, 0.9, False),))
    (found,) = overview_of(batch([row])).jobs
    assert (found.cells[4].text, found.cells[4].value, found.cells[4].met) == ("–", None, False)
    assert (found.acceptance[0].measured, found.acceptance[0].threshold) == ("not measured", "≤ 0.90")


def test_metrics_of_a_job_and_of_float() -> None:
    report = network([])
    report["metrics"]["own"] = [{"name": "top1", "float": 0.8, "quantized": 0.78}]
    words = Page(single_page(report)).words.split("\n")
    start = words.index("top1")
    assert words[start : start + 3] == ["top1", "0.78", "float 0.8"]
    (found,) = overview_of(batch([job("a", report=report)])).jobs
    assert (found.cells[2].text, found.cells[2].threshold, found.cells[2].met) == ("0.78", "", None)


def test_shared_settings_are_listed_once() -> None:
    rows = [job(name, report=network([], settings={"SAME": 1, "OTHER": name})) for name in ("x", "y")]
    page = batch_page(batch(rows))
    assert page.count("SAME=1") == 1 and page.count("OTHER=x") == page.count("OTHER=y") == 1


def test_logins_and_keys_of_urls_are_not_shown() -> None:
    row = job("a", "failed", reason="https://me:hunter2@host/m.onnx?X-Amz-Signature=abc123&v=2 is not there")
    row["job"]["model"] = "s3://AKIA:hunter2@bucket/m.onnx"
    row["job"]["data"] = "https://host/d.npz?sv=1&sig=abc123"
    page = batch_page(batch([row]))
    assert "hunter2" not in page and "abc123" not in page and "AKIA" not in page
    assert "s3://***@bucket/m.onnx" in page and "v=2" in page


def test_jobs_of_one_name_have_different_sections() -> None:
    found = overview_of(batch([job("a b"), job("a/b"), job("名前"), job("a-b-2"), job("")]))
    anchors = [row.anchor for row in found.jobs]
    assert len(set(anchors)) == 5 and all(re.fullmatch(r"[A-Za-z0-9._-]+", anchor) for anchor in anchors)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("jobs", "layers", "most"), [(18, 1000, 4_000_000), (140, 60, 8_000_000)])
def test_many_jobs_stay_small(jobs: int, layers: int, most: int) -> None:
    """Each job lists only its worst layers, with a note that there are more."""
    rows = [layer(f"/model/blocks.{index // 10}/attention/projection_{index}/MatMul") for index in range(layers)]
    report = network(rows, sites=sites_of(rows))
    page = batch_page(batch([job(f"job-{index}", report=report) for index in range(jobs)]))
    assert len(page.encode()) < most
    assert "are in the JSON report" in page


def test_number_formats() -> None:
    texts = {
        formatting.plain(0.000161): "0.000161",
        formatting.plain(12): "12",
        formatting.plain(-2.5): "−2.5",
        formatting.plain("inf"): "∞",
        formatting.plain(-math.inf): "−∞",
        formatting.plain("nan"): "not a number",
        formatting.plain(None): "–",
        formatting.plain(True): "–",
        formatting.percent(1.0): "100 %",
        formatting.percent(0.99999): "99.99 %",
        formatting.percent(0.5): "50.00 %",
        formatting.size(0): "0 B",
        formatting.size(84_818): "84.8 kB",
        formatting.size(999_499): "999 kB",
        formatting.size(999_600): "1 MB",
        formatting.size(-999_600): "−1 MB",
        formatting.size(2.5e12): "2.5 TB",
        formatting.size(1.2345e16): "12\u202f300 TB",
        formatting.seconds(0.5): "0.50 s",
        formatting.seconds(59.6): "1 min 00 s",
        formatting.seconds(3725): "1 h 02 min",
        formatting.count(1234567): "1\u202f234\u202f567",
    }
    assert list(texts) == list(texts.values())


def test_lines_break_after_separators_only() -> None:
    name = "/layer1/layer1.0/conv_dw:0 ← x-y"
    pieces = formatting.pieces(name)
    assert "".join(pieces) == name
    assert pieces == ["/", "layer1/", "layer1.", "0/", "conv_", "dw:", "0 ", "← ", "x-", "y"]
    assert formatting.pieces("") == []
    assert "/<wbr>layer1/<wbr>layer1.<wbr>0" in single_page(network([layer("/layer1/layer1.0")]))


def test_axis_with_any_values() -> None:
    """All lengths are within the drawing; a larger loss is longer."""
    odd: list[Any] = [None, math.nan, math.inf, -math.inf, 1e9, -1e9, 0.0, 70.0]
    names = [f"n{index}" for index in range(len(odd))]
    drawn = charts.bar_chart([charts.Loss(name, value, {}) for name, value in zip(names, odd, strict=True)], 20.0)
    lengths = [sum(part.length for part in row.segments) for row in drawn.rows]
    assert lengths == pytest.approx([0, 0, 0, 100, 0, 100, 72.73, 9.09])
    assert drawn.limit is not None and drawn.limit.at == pytest.approx(54.55), "drawn on the same axis"
    parts = charts.bar_chart([charts.Loss("n", 17.0, {"weights": 20.0, "inputs": 20.0})]).rows[0]
    assert [part.kind for part in parts.segments] == ["weights", "inputs"]
    assert parts.segments[0].length == parts.segments[1].length == parts.segments[1].begin > 0
    strip = charts.strip_chart(names, odd, odd, hovered=10)
    heights = [float(value) for value in re.findall(r"V(-?[\d.]+)", strip.columns)]
    assert len(heights) == 6 and all(0 <= value <= strip.height for value in heights)
    assert heights[0] > heights[1], "no loss is at the bottom"
    assert charts.bar_chart([]).rows == ()
    assert charts.strip_chart([], [], [], hovered=1).columns == ""


def test_what_to_do_comes_before_causes_and_figures() -> None:
    """The change for the worst layer, and why it loses; of a file that is good, no change is proposed."""
    why = {"why": "shares its scale with 'b', which is 6 times wider", "code": "shared-scale"}
    cause = {"node": "conv", "op": "Conv", "sqnr_db": 12.0, "tensor": "a", "role": "activation", **why}
    report = network([], causes=[{**cause, "remedy": "give it a scale of its own", "overrides": ['OWN_SCALES=["a"]']}])
    row = {"name": "y", "nature": "values", "state": "lost", "decided_by": "SQNR", "samples": 16}
    figure = {"name": "SQNR", "value": 2.0, "low": 1.0, "high": 3.0, "unit": "dB", "line": 6.0}
    report["metrics"]["quality"] = [{**row, "figures": [figure]}]
    page = single_page(report)
    call = "sbonnx.quantize(..., OWN_SCALES=[&#39;a&#39;])"
    parts = ("What to do", call, "Where the error is largest", "which is 6 times wider", 'class="tiles"')
    places = [page.index(part) for part in parts]
    assert places == sorted(places) and "Loss of each layer" not in page
    (given,) = report["causes"]
    command = "sbonnx quantize m.onnx --set OWN_SCALES=[a]"
    report["causes"] = [{**given, "command": command}]
    page = single_page(report)
    assert (
        f"Try, not measured: give it a scale of its own (&#39;a&#39;, input of &#39;conv&#39;): <code>{command}<"
        in page
    )
    assert f"to try: give it a scale of its own (not measured): <code>{command}</code>" in page
    report["causes"] = [{**given, "command": command, "gain_db": 0.04}]
    page = single_page(report)
    assert f"tried: give it a scale of its own (measured, nothing gained): <code>{command}</code>" in page
    assert "What to do" not in page, "a change that gains nothing is not proposed"
    figure |= {"value": 50.0, "low": 49.0, "high": 51.0}
    report["metrics"]["quality"] = [{**row, "state": "kept", "figures": [figure]}]
    good = single_page(report)
    assert "Where the error is largest" in good and "OWN_SCALES" not in good and "What to do" not in good


def test_layers_without_quantized_inputs_have_no_columns_of_them() -> None:
    """As those of decoders."""
    layers = [profiled("a", 20.0, None)]
    weights = ({"node": "a", "tensor": "w", "role": "weight", "label": "int4"},)
    layers[0]["label"] = "int4"
    page = single_page(network([], details=details([node("a")], layers), sites=weights))
    assert "by weights, dB" in page and "by inputs, dB" not in page
    both = (*weights, {"node": "a", "tensor": "x", "role": "activation", "label": "uint8"})
    assert "by inputs, dB" in single_page(network([], details=details([node("a")], layers), sites=both))


def test_histograms_show_what_is_clipped() -> None:
    (row,) = details([], [profiled("a", 1.0, 2.0)])["histograms"]
    chart = charts.histogram_chart(built(TensorHistogram, row))
    assert chart is not None
    assert chart.covered == (25.0, 75.0)
    assert [mark.label for mark in chart.marks] == ["−1", "0", "2", "3"]
    assert chart.sentence == "values −1 to 3, range 0 to 2: 25.00 % of the values are clipped"
    bars = [float(x) for x in re.findall(r"M([\d.]+) 90", chart.bars)]
    assert bars == [0.0, 25.0, 50.0], "no bar for an empty bin"
    assert chart.levels.count("M") == 5
    wide = charts.histogram_chart(
        built(TensorHistogram, {**row, "covered": (-8.0, 8.0), "clipped": 0.0, "unit": "step"})
    )
    assert wide is not None and wide.levels == ""
    assert wide.sentence.endswith("of the channel's scale: no value is clipped; the values use 25.00 % of the range")
    assert charts.histogram_chart(built(TensorHistogram, {"tensor": "x", "covered": (0.0, 1.0)})) is None
