"""Pages in a browser: contents and layout, light and dark, with and without scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.present.browser import Browser
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
    profiled,
    single_page,
    sites_of,
)

NAMES = (
    "[...document.querySelectorAll('table[aria-label=jobs] tbody tr')].filter(r => !r.hidden)"
    ".map(r => r.cells[1].querySelector('a').textContent)"
)
PRESS = "document.querySelector('table[aria-label=jobs]').tHead.rows[0].cells[{}].querySelector('button').click()"
CHIP = "[...document.querySelectorAll('.tools button')].find(b => b.textContent === {!r}).click()"
TYPE = (
    "(() => {{ const box = document.querySelector('.tools input'); box.value = {!r};"
    " box.dispatchEvent(new Event('input')); }})()"
)

# The lowest contrast (WCAG 2) of texts against their background, and of bars against the page.
CONTRAST = """(() => {
  function parts(colour) { return (colour.match(/[\\d.]+/g) || []).map(Number); }
  function light(c) {
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = c.slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  function behind(e) {
    for (; e; e = e.parentElement) {
      const c = parts(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  }
  function ratio(a, b) { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); }
  document.querySelectorAll('details').forEach(d => { d.open = true; });
  let texts = [99, ''], bars = [99, ''], seen = 0;
  for (const e of document.querySelectorAll('body *')) {
    const inside = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (inside && !['SCRIPT', 'STYLE', 'title', 'desc'].includes(e.tagName)) {
      seen += 1;
      const style = getComputedStyle(e);
      const r = ratio(parts(e instanceof SVGElement ? style.fill : style.color), behind(e));
      if (r < texts[0]) texts = [r, e.outerHTML.slice(0, 120)];
    }
    if (e.matches('rect.weights, rect.inputs, rect.gathered, path.gathered, path.bin')) {
      const r = ratio(parts(getComputedStyle(e).fill), behind(e));
      if (r < bars[0]) bars = [r, e.outerHTML.slice(0, 120)];
    }
  }
  return {texts, bars, seen, page: behind(document.body)};
})()"""


def shown(chromium: Browser, page: str, where: Path, **how: Any) -> Browser:
    """Open the page from a file; check that there are no errors and no requests."""
    path = where / "page.html"
    path.write_text(page, encoding="utf-8")
    chromium.open(path, **how)
    chromium.run("0")
    assert chromium.wrong == []
    assert [url for url in chromium.fetched if not url.startswith(("about:", "data:"))] == [path.resolve().as_uri()]
    return chromium


def test_errors_are_detected(chromium: Browser, tmp_path: Path) -> None:
    """A check of the harness itself."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><link rel=stylesheet href='none.css'><script>console.error('no'); nowhere()</script>"
    )
    chromium.open(path)
    chromium.run("0")
    assert any("nowhere" in one for one in chromium.wrong) and any('"no"' in one for one in chromium.wrong)
    assert any(url.endswith("none.css") for url in chromium.fetched)


def test_the_page_of_a_real_model(chromium: Browser, tmp_path: Path, digits_report: dict[str, Any]) -> None:
    shown(chromium, single_page(digits_report), tmp_path)
    assert chromium.run("document.title") == "digits.onnx for onnxruntime – sbonnx"
    rows = chromium.run(
        "[...document.querySelectorAll('table[aria-label=layers] tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    assert len(rows) >= len(digits_report["layers"]) > 10
    names = {(row["node"], row["tensor"]) for row in digits_report["layers"]}
    heads = chromium.run("[...document.querySelectorAll('table[aria-label=layers] th')].map(c => c.textContent)")
    node, tensor = heads.index("layer"), heads.index("quantized input")
    places = [(cells[node], cells[tensor]) for cells in rows if cells[tensor]]
    assert names == set(places)
    tiles = chromium.run("[...document.querySelectorAll('.tile b')].map(e => e.textContent)")
    assert f"{digits_report['metrics']['outputs'][0]['sqnr_db']:.1f} dB" in tiles
    assert chromium.run("document.querySelectorAll('.bars .name').length") == len(digits_report["layers"])


def test_lengths_of_bars(chromium: Browser, tmp_path: Path) -> None:
    """A larger loss is a longer bar, on one scale for all layers."""
    losses = (20.0, 35.0, 40.0, 50.0, float("inf"))
    layers = [layer(f"n{index}", loss, index) for index, loss in enumerate(losses)]
    shown(chromium, single_page(network(layers, sites=sites_of(layers))), tmp_path)
    drawn = chromium.run(
        "[...document.querySelectorAll('.bars li:not(.axis)')].map(e => "
        "(r => r ? r.getBoundingClientRect().width : 0)(e.querySelector('rect')))"
    )
    whole = chromium.run("document.querySelector('.bars li:not(.axis) svg').getBoundingClientRect().width")
    assert drawn == pytest.approx([max(50 - loss, 0) / 30 * whole for loss in losses], abs=0.5)
    labels = chromium.run("[...document.querySelectorAll('.bars .value')].map(e => e.textContent.trim())")
    assert labels == ["20.0", "35.0", "40.0", "50.0", "∞"]


SCROLLING = (
    "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    ".map(e => e.textContent.slice(0, 80))"
)
"""Tables that must be scrolled sideways."""

CUT = (
    "[...document.querySelectorAll('.tile, .tile b, .bars .name, .verdict, .causes li')]"
    ".filter(e => getComputedStyle(e).display !== 'inline' && e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
)
"""Texts that do not fit where they are."""


@pytest.mark.parametrize("width", [1280, 400])
def test_the_overview_fits(width: int, chromium: Browser, tmp_path: Path) -> None:
    """Nothing is wider than the window; on a small one rows are cards with labelled figures."""
    shown(chromium, batch_page(one_of_each()), tmp_path, width=width)
    chromium.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.run(SCROLLING) == []
    labels = chromium.run(
        "[...document.querySelector('table[aria-label=jobs] tbody tr').cells]"
        ".map(c => getComputedStyle(c, '::before').content)"
    )
    assert ('"model"' in labels) is (width == 400)


def explained(nodes: int = 30) -> dict[str, Any]:
    """A report with details: a chain with a skip connection every three nodes."""
    names = [f"/layer{index // 5}/layer{index // 5}.{index}/conv/Conv" for index in range(nodes)]
    rows = [
        node(
            name,
            *([names[index - 1]] if index else ()),
            *([names[index - 3]] if index >= 3 and not index % 3 else ()),
        )
        for index, name in enumerate(names)
    ]
    rows[4]["refusals"] = ("quantize: it would be slower in integers: about 24 µs a sample, in float 29",)
    layers = [profiled(name, 15.0 + index, 40.0 - index, 14.0 + index) for index, name in enumerate(names)]
    return network([], details=details(rows, layers[:8]))


@pytest.mark.parametrize("width", [1280, 420])
def test_details_fit(width: int, chromium: Browser, tmp_path: Path) -> None:
    """Charts, histograms and graph are as wide as the page."""
    shown(chromium, single_page(explained()), tmp_path, width=width)
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.run(SCROLLING) == []


def test_the_overview(chromium: Browser, tmp_path: Path) -> None:
    report = one_of_each()
    shown(chromium, batch_page(report), tmp_path)
    order = {"done": 3, "skipped": 2, "unaccepted": 1}
    rows = sorted(report["rows"], key=lambda row: order.get(row["outcome"]["status"], 0))
    assert chromium.run(NAMES) == [row["job"]["name"] for row in rows], "failures first"
    words = chromium.run("document.querySelector('table[aria-label=jobs]').textContent")
    for row in report["rows"]:
        assert row["outcome"]["status"] in words and row["outcome"]["reason"] in words
    tiles = chromium.run("[...document.querySelectorAll('.tile')].slice(0, 9).map(e => e.innerText.split('\\n'))")
    assert tiles[0][:2] == ["Jobs", "9"] and tiles[1][:2] == ["Done", "2"]


def test_sorting_and_filtering(chromium: Browser, tmp_path: Path) -> None:
    rows = [job(f"job-{index}", seconds=took) for index, took in enumerate((5.0, 100.0, 0.5, 20.0, 3.0, 7.0, 8.0))]
    rows += [job("worse", report=network([], metrics={"outputs": [{"name": "y", "sqnr_db": 9.5}]}), seconds=1.0)]
    rows += [job("better", report=network([], metrics={"outputs": [{"name": "y", "sqnr_db": 10.5}]}), seconds=2.0)]
    rows += [job("broken", "crashed", reason="SIGSEGV", seconds=0.0)]
    shown(chromium, batch_page(batch(rows)), tmp_path)
    heads = chromium.run("[...document.querySelectorAll('table[aria-label=jobs] th')].map(e => e.textContent)")
    chromium.run(PRESS.format(heads.index("took")))
    by_time = sorted(rows, key=lambda row: row["outcome"]["seconds"])
    assert chromium.run(NAMES) == [row["job"]["name"] for row in by_time]
    chromium.run(PRESS.format(heads.index("took")))
    assert chromium.run(NAMES) == [row["job"]["name"] for row in reversed(by_time)]
    chromium.run(PRESS.format(heads.index("SQNR, dB")))
    assert chromium.run(NAMES)[:2] == ["worse", "better"]
    chromium.run(PRESS.format(heads.index("SQNR, dB")))
    assert chromium.run(NAMES)[:2] == ["better", "worse"], "rows without a figure sort last in both directions"
    assert chromium.run("[...document.querySelectorAll('th[aria-sort]')].map(e => e.getAttribute('aria-sort'))") == [
        "descending"
    ]
    chromium.run(CHIP.format("crashed"))
    assert chromium.run(NAMES) == ["broken"]
    chromium.run(CHIP.format("all"))
    chromium.run(TYPE.format("NET.v2 worse"))
    assert chromium.run(NAMES) == ["worse"], "all words, in any order and case"
    chromium.run(TYPE.format("sigsegv"))
    assert chromium.run(NAMES) == ["broken"]
    assert chromium.wrong == []


def test_a_link_opens_its_section(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, batch_page(one_of_each()), tmp_path)
    assert chromium.run("document.querySelectorAll('details[open]').length") == 0
    chromium.run("document.querySelectorAll('table[aria-label=jobs] a')[2].click()")
    chromium.run("new Promise(done => setTimeout(done, 50))")
    assert chromium.run("location.hash") == "#job-f-crashed"
    assert "f-crashed" in chromium.run("document.querySelector('details[open] > summary').textContent")


def test_without_scripts(chromium: Browser, tmp_path: Path) -> None:
    """If a policy of a CI server blocks scripts, everything can still be read and unfolded."""
    report = one_of_each()
    path = tmp_path / "page.html"
    path.write_text(batch_page(report), encoding="utf-8")
    chromium.open(path, scripts=False)
    tree = json.dumps(chromium.call("DOM.getDocument", depth=-1), ensure_ascii=False)
    assert all(f'"nodeValue": "{row["job"]["name"]}"' in tree for row in report["rows"])
    assert '"nodeName": "BUTTON"' not in tree, "controls that need scripts are absent"


WIDTHS = (420, 900, 1600)


@pytest.mark.parametrize("page", ["single", "details", "decoder", "batch"])
def test_readable_at_every_width_in_light_and_dark(page: str, chromium: Browser, tmp_path: Path) -> None:
    layers = [layer(f"n{index}", 40.0, index - 3.0) for index in range(40)]
    blocks = [profiled(f"/model/layers.{index // 7}/attn/MatMul_{index}", 20.0 + index, None) for index in range(28)]
    content = {
        "single": lambda: single_page(network(layers, ok=False, problems=("bad",))),
        "details": lambda: single_page(explained()),
        "decoder": lambda: single_page(network([], details=details([], blocks))),
        "batch": lambda: batch_page(one_of_each()),
    }[page]()
    shown(chromium, content, tmp_path)
    for width in WIDTHS:
        for dark in (False, True):
            chromium.show(dark=dark, width=width)
            contrast = chromium.run(CONTRAST)
            assert contrast["seen"] > 100
            assert contrast["texts"][0] >= 4.5, contrast["texts"]
            assert contrast["bars"][0] >= 3, contrast["bars"]
            assert (sum(contrast["page"][:3]) < 384) is dark
        assert chromium.run("document.documentElement.scrollWidth") <= width
        assert chromium.run(SCROLLING) == []
        assert chromium.run(CUT) == [], "a text is wider than its box"


def test_names_are_only_text(chromium: Browser, tmp_path: Path) -> None:
    """Any name in a model appears as text, in tables, charts and their titles."""
    layers = [layer(name) for name in EVIL]
    refusals = [{"what": name, "where": name, "why": name} for name in EVIL]
    report = network(layers, refusals=refusals, notes=EVIL, problems=EVIL, model=EVIL[0], settings={EVIL[0]: EVIL[1]})
    report["sites"] = sites_of(layers, EVIL[0])
    rows = [job(name, "failed", reason=name, report=report) for name in EVIL]
    whole = batch(rows, title=EVIL[0], started=EVIL[1], finished=EVIL[2])
    for page in (single_page(report), batch_page(whole)):
        shown(chromium, page, tmp_path)
        assert chromium.run("document.title") != "taken"
        assert chromium.run(
            "[document.scripts.length, document.images.length,"
            " document.querySelectorAll('b:not(.tile b, summary b, figcaption b, .causes b, .inside b)').length]"
        ) == [1, 0, 0]
        cells = chromium.run(
            "[...document.querySelectorAll('table[aria-label=layers] td.mono')].map(e => e.textContent)"
        )
        for name in EVIL:
            assert name in cells or "\x00" in name
        assert any("\ufffd" in cell for cell in cells)


def test_a_thousand_layers(chromium: Browser, tmp_path: Path) -> None:
    layers = [
        layer(f"/model/blocks.{index // 10}/attention/projection_{index}/MatMul", 45 - index % 17, 60 - index / 20)
        for index in range(1000)
    ]
    refusals = [
        {"what": "quantize", "where": row["node"], "why": f"reason {index % 40}"} for index, row in enumerate(layers)
    ]
    page = single_page(network(layers, sites=sites_of(layers), refusals=refusals))
    assert len(page.encode()) < 2_000_000
    shown(chromium, page, tmp_path)
    assert chromium.run("document.querySelectorAll('table[aria-label=layers] tbody tr').length") == 1000
    took = chromium.run(
        "(() => { const start = performance.now();"
        " document.querySelector('table[aria-label=layers] th button').click();"
        " return performance.now() - start; })()"
    )
    assert took < 2000
    assert chromium.run("document.querySelectorAll('.framed .plot').length") == 1
