"""Pages against the rules of axe-core: nothing serious, on screens and phones, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sbonnx.present import html
from sbonnx.present.html import graph_page
from sbonnx.report.codes import Note
from sbonnx.report.details import Details
from sbonnx.report.pruned import PrunedDimension, PruningReport, SparseLayer
from tests.present.browser import Browser
from tests.present.reports import batch_page, details, job, network, node, one_of_each, profiled, single_page, sites_of
from tests.present.test_batch_charts import row
from tests.present.test_browser import WIDTHS
from tests.support.values import built

VIOLATIONS = """axe.run({resultTypes: ["violations"]}).then(found => found.violations.map(
  one => [one.id, one.impact, one.nodes.length, one.nodes[0].html.slice(0, 200)]))"""

SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core."""
    spec = find_spec("axe_core_python")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("axe-core-python is not installed")
    return Path(spec.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


def explained() -> dict[str, Any]:
    """A report with every section of its page."""
    names = [f"/block{index // 4}/conv{index}" for index in range(30)]
    nodes = [node(name, *names[max(index - 1, 0) : index]) for index, name in enumerate(names)]
    nodes[3]["refusals"] = ("quantize: it is shared",)
    layers = [profiled(name, 10.0 + index, 30.0 - index) for index, name in enumerate(names)]
    sites = sites_of([{"node": name, "tensor": f"{name}_in", "label": "uint8"} for name in names])
    return network([], details=details(nodes, layers), sites=sites, problems=("too far off",), ok=False)


def batch_report() -> dict[str, Any]:
    whole = one_of_each()
    rows = [
        *whole["rows"],
        row("a", "onnxruntime", 41.0),
        row("b", "onnxruntime", 12.0, 1.5),
        row("b", "virtual", None),
    ]
    runs = [{"sqnr_db": value} for value in (30.0, 31.0, 32.0)]
    return {**whole, "rows": [*rows, job("one", report=explained())], "history": {"a-onnxruntime": runs}}


def pruned() -> PruningReport:
    dimensions = (PrunedDimension(("conv",), ("fc",), 32, 20, 0.01), PrunedDimension(("a",), ("b",), 8, 8, 0.0))
    sparse = (SparseLayer("fc", "2:4", 640, 320, "accepted"),)
    return PruningReport("m.onnx", "p.onnx", 0.5, 0.4, dimensions=dimensions, sparse=sparse)


PAGES: dict[str, Callable[[], str]] = {
    "single": lambda: single_page(explained()),
    "batch": lambda: batch_page(batch_report()),
    "pruning": lambda: html.single_page(pruned()),
    "graph": lambda: graph_page(
        built(Details, explained()["details"]), title="m.onnx", more="float", notes=[Note("opset-converted", "one")]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_no_serious_violation(name: str, axe: str, chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    chromium.open(path)
    chromium.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    chromium.run(f"{axe};0")
    for width, dark in zip(WIDTHS, (True, False, True), strict=True):  # colours: `test_browser`
        chromium.show(dark=dark, width=width)
        answer = chromium.call("Runtime.evaluate", expression=VIOLATIONS, awaitPromise=True, returnByValue=True)
        violations = answer["result"]["value"]
        assert [row for row in violations if row[1] in SERIOUS] == [], (width, dark)
        assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.wrong == []


def test_a_violation_is_found(axe: str, chromium: Browser, tmp_path: Path) -> None:
    """A check of the check itself."""
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><title>x</title><p><img src='data:,'><input>", encoding="utf-8")
    chromium.open(path)
    chromium.run(f"{axe};0")
    answer = chromium.call("Runtime.evaluate", expression=VIOLATIONS, awaitPromise=True, returnByValue=True)
    assert {"image-alt", "label"} <= {one[0] for one in answer["result"]["value"]}
