"""The graph of a model in a browser: opening, search, filters, details, layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sbonnx.present.html import graph_page
from sbonnx.report.details import Details
from tests.present.browser import Browser
from tests.present.reports import EVIL, details, node, profiled
from tests.present.test_browser import CONTRAST, shown
from tests.support.values import built

BOXES = "[...document.querySelectorAll('.plane > .box, .plane > .head')]"
TEXTS = f"{BOXES}.map(e => e.querySelector('.op').textContent)"
PANEL = "document.querySelector('.panel').innerText"
RECTS = """(() => {
  const found = [...document.querySelectorAll('.plane > :is(.box, .port, .head, .frame)')];
  const rects = found.map(e => [e, e.getBoundingClientRect()]), wrong = [];
  const inside = (x, y) => y.left >= x.left - .5 && y.right <= x.right + .5
    && y.top >= x.top - .5 && y.bottom <= x.bottom + .5;
  rects.forEach(([e, a], i) => rects.slice(i + 1).forEach(([f, b]) => {
    const beside = a.right <= b.left + .5 || b.right <= a.left + .5;
    const apart = beside || a.bottom <= b.top + .5 || b.bottom <= a.top + .5;
    const framed = (e.matches('.frame') && inside(a, b)) || (f.matches('.frame') && inside(b, a));
    if (!apart && !framed) wrong.push([e.outerHTML.slice(0, 90), f.outerHTML.slice(0, 90)]);
  }));
  return [rects.length, wrong];
})()"""
"""Number of boxes and frames, and pairs of them that overlap; a frame contains its boxes."""


def tensor(name: str) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": ("N", 8, 4, 4)}


def network(nodes: int = 30) -> Details:
    """A chain in modules of five nodes, with skip connections over three; the first has a name with markup."""
    names = [f"/layer{index // 5}/layer{index // 5}.{index}/conv/Conv" for index in range(nodes)]
    names[0] = EVIL[0].replace("/", "")
    rows = []
    for index, name in enumerate(names):
        reads = [f"t{index - 1}"] if index else ["image"]
        reads += [f"t{index - 3}"] if index >= 3 and not index % 3 else []
        more = {"op": "Add"} if len(reads) > 1 else {}
        rows.append(
            node(name, module=f"layer{index // 5}", tensors=tuple(reads), outputs=[tensor(f"t{index}")], **more)
        )
    rows[4] |= {"reads": (), "refusals": ("quantize: it would be slower: 24 µs",), "codes": ("slower-in-integers",)}
    layers = [profiled(name, 15.0 + index, 40.0 - index, 14.0 + index) for index, name in enumerate(names)]
    values = details(rows, [*layers[:4], *layers[5:8]])
    values["histograms"][0]["tensor"] = f"{names[0]}_in"
    return built(Details, {**values, "inputs": [tensor("image")], "outputs": (f"t{nodes - 1}",)})


def press(text: str) -> str:
    """Script that clicks the box whose first line begins with a text."""
    return f"{BOXES}.find(e => e.querySelector('.op').textContent.startsWith({text!r})).click()"


def enter(label: str, value: str) -> str:
    """Script that changes a control of the toolbar."""
    return (
        f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('input')); }})"
        f"(document.querySelector('.graph [aria-label=\"{label}\"]'))"
    )


@pytest.mark.parametrize(("width", "dark"), [(420, True), (900, False), (1600, False), (1600, True)])
def test_blocks_open_and_nodes_show_their_details(width: int, dark: bool, chromium: Browser, tmp_path: Path) -> None:
    page = graph_page(network(100), title="m.onnx")
    shown(chromium, page, tmp_path, width=width, dark=dark)
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.run(TEXTS) == [f"+ layer{index}" for index in range(20)]
    chromium.run(press("+ layer0"))
    chromium.run(press("+ layer1"))
    assert chromium.run(TEXTS).count("Conv") + chromium.run(TEXTS).count("Add") == 10
    count, overlapping = chromium.run(RECTS)
    assert count > 30 and overlapping == []
    chromium.run(press("Conv"))
    words = chromium.run(PANEL)
    for figure in (
        EVIL[0].replace("/", ""),
        "float32 N × 8 × 4 × 4",
        "uint8",
        "0 to 6",
        "14.0 dB",
        "image",
        "25.00 % of the values are clipped",
    ):
        assert figure in words, figure
    plot = chromium.run("['.bin', '.limit', '.covered'].map(one => document.querySelectorAll('.panel ' + one).length)")
    assert plot == [1, 2, 1], "the histogram with its range"
    chromium.run("document.querySelector('.panel .link.mono').click()")
    assert "Tensor image" in chromium.run(PANEL)
    chromium.run(f"{BOXES}.find(e => e.querySelector('.reason')).click()")
    assert "it would be slower: 24 µs slower-in-integers" in chromium.run(PANEL)
    lines = "[...document.querySelectorAll('.plane .hit')]"
    chromium.run(f"{lines}[0].dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert "Tensor" in chromium.run(PANEL) and chromium.run("document.querySelectorAll('.edge.near').length") > 0
    chromium.run(press("− layer0"))
    assert "+ layer0" in chromium.run(TEXTS)
    unlike = """[...document.querySelectorAll('.graph button[aria-label]')].filter(
        e => !e.getAttribute('aria-label').includes(e.textContent)).map(e => e.outerHTML)"""
    assert [button for button in chromium.run(unlike) if ">+<" not in button and ">\u2212<" not in button] == []
    contrast = chromium.run(CONTRAST)
    assert contrast["texts"][0] >= 4.5, contrast["texts"]
    assert chromium.wrong == [] and chromium.run("document.title") == "m.onnx – sbonnx graph"


def test_search_and_filters(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, graph_page(network(100), title="m.onnx"), tmp_path)
    found = "[...document.querySelectorAll('.results .mono')].map(e => e.textContent)"
    chromium.run(enter("Search nodes and tensors", "LAYER3.17"))
    assert chromium.run(found) == ["/layer3/layer3.17/conv/Conv"]
    chromium.run("document.querySelector('.results button').click()")
    assert "− layer3" in chromium.run(TEXTS), "the block of the node is opened"
    assert chromium.run("document.activeElement.title") == "/layer3/layer3.17/conv/Conv"
    chromium.run(enter("Search nodes and tensors", "t42"))
    assert chromium.run(found) == ["/layer8/layer8.42/conv/Conv"], "the node that computes a tensor"
    chromium.run(enter("Search nodes and tensors", ""))
    chromium.run(enter("Operator", "Add"))
    assert chromium.run("document.querySelector('.graph output').textContent") == "33 of 100 nodes"
    assert chromium.run("document.querySelectorAll('.box.faint').length") > 0
    chromium.run(enter("Operator", ""))
    chromium.run(enter("State", "float"))
    assert chromium.run(found) == ["/layer0/layer0.4/conv/Conv"]
    chromium.run(enter("State", ""))
    loss = chromium.run("document.querySelectorAll('.box[class*=shade]').length")
    chromium.run(enter("Colour", "bits"))
    assert loss > 0 and chromium.run("document.querySelectorAll('.box[class*=shade]').length") == 0
    assert chromium.run("document.querySelectorAll('.box.bits8').length") == 5


def test_keys_move_between_boxes(chromium: Browser, tmp_path: Path) -> None:
    """One box is in the tab order; arrows go to the nearest one, Enter opens a block."""
    shown(chromium, graph_page(network(100), title="m.onnx"), tmp_path)
    assert chromium.run("document.querySelectorAll('.plane > .box[tabindex=\"0\"]').length") == 1
    chromium.run("document.querySelector('.plane > .box[tabindex=\"0\"]').focus()")
    for key, code in (("ArrowDown", 40), ("ArrowDown", 40), ("Enter", 13)):
        text = {"text": "\r"} if key == "Enter" else {}
        chromium.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        chromium.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
    assert chromium.run("document.activeElement.getAttribute('aria-label')").startswith("\u2212 layer2 opened block")
    assert chromium.run("document.activeElement.getAttribute('aria-expanded')") == "true"


def test_large_models_open_in_seconds(chromium: Browser, tmp_path: Path) -> None:
    """11,000 nodes without names of modules: closed blocks at first, and each level is small."""
    rows = [
        node(f"n{index}", reads=(), tensors=(f"t{index - 1}",), outputs=[tensor(f"t{index}")])
        for index in range(11_000)
    ]
    page = graph_page(built(Details, details(rows)), title="m.onnx")
    assert len(page) < 4_000_000
    shown(chromium, page, tmp_path)
    assert chromium.run("performance.now()") < 10_000
    for _ in range(3):
        chromium.run("document.querySelector('.box.block').click()")
    assert chromium.run(RECTS)[1] == []
    chromium.run(enter("Search nodes and tensors", "n10999"))
    chromium.run("document.querySelector('.results button').click()")
    assert chromium.run("document.activeElement.title") == "n10999"


def test_names_are_only_text(chromium: Browser, tmp_path: Path) -> None:
    rows = [node(name, op=name, module=name, refusals=(name,), codes=(name,)) for name in EVIL]
    shown(chromium, graph_page(built(Details, details(rows)), title=EVIL[0]), tmp_path)
    chromium.run("document.querySelector('[aria-label=\"expand all blocks\"]').click()")
    for index in range(len(EVIL)):
        chromium.run(f"{BOXES}.filter(e => !e.matches('.head'))[{index}].click()")
    chromium.run(enter("Search nodes and tensors", "<"))
    assert chromium.run("document.title") != "taken" and chromium.wrong == []
    assert chromium.run("[document.scripts.length, document.images.length]") == [4, 0]
