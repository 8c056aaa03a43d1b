"""The notebook runs from top to bottom, and shows reports and charts in place of text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "quantize.ipynb"

LONGEST_TEXT = 1500
"""Characters of printed text in the notebook."""


def test_notebooks_import_only_sbonnx() -> None:
    """Of its packages: what a notebook shows needs no internal module."""
    notebooks = [*(NOTEBOOK.parents[1]).rglob("*.ipynb")]
    assert NOTEBOOK in notebooks
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        names = re.findall(r"^\s*(?:from|import)\s+(sbonnx[\w.]*)", source, re.MULTILINE)
        assert set(names) == {"sbonnx"} and "sbonnx." in source, path


@pytest.mark.slow
def test_the_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the notebook is run by nbclient: pip install 'sbonnx[dev]'")
    nbclient = pytest.importorskip("nbclient")
    for package in ("ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(package)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    (report,) = (page for page in pages if "digits.onnx for onnxruntime" in page)
    assert "Accuracy " in report and "times smaller" in report and "worst layers" in report
    assert any("Plan for onnxruntime" in page for page in pages)
    assert any("sqnr" in page and "layers on" in page for page in pages)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2, "two charts"
    bars = [page for page in pages if "<progress" in page]
    assert not bars, "progress bars are removed at the end"
    printed = [output for output in outputs if output["output_type"] == "stream"]
    assert sum(len(output["text"]) for output in printed) < LONGEST_TEXT
    assert not [output for output in outputs if output["output_type"] == "error"]
