"""The documentation site: it builds without a warning, its blocks run, and it documents every public name."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import sbonnx
from sbonnx import cli
from sbonnx.assets import digits
from sbonnx.linting import RULES
from tests.e2e.test_readme import Block, blocks
from tests.present.browser import Browser, browser
from tests.present.browser import found as browser_program
from tests.support import doc_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name not in ("decisions", "reference"))
TOLD = {
    DOCS / "index.md",
    DOCS / "tutorial.md",
    DOCS / "tour.md",
    *(DOCS / "howto").glob("*.md"),
    *(DOCS / "migration").glob("*.md"),
}
"""Pages that tell the reader to copy the bundled files; the names of the others are those of the reader's files."""

SAMPLES = 96
"""Calibration images of these pages; all 256 take up to twice the time of a command."""

RUN = {"sh", "python"}
WITH_BLOCKS = [path for path in PAGES if any(block.language in RUN for block in blocks(path))]


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.strip().startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_blocks_run_in_order(
    page: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and programs of a page share a folder, as for a reader; `bash` and `py` blocks need the reader's own."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    if page in TOLD:
        for path in (digits().model, digits().eval):
            shutil.copy(path, tmp_path)
        np.savez(digits().calib.name, image=np.load(digits().calib)["image"][:SAMPLES])
    else:
        doc_pages.write_files(tmp_path, page.stem)
        names.update(doc_pages.names())
    for block in blocks(page):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
        elif block.language == "sh":
            for name, *arguments in commands(block):
                if name != "sbonnx":
                    assert [name, *arguments[:1]] == ["pip", "install"], f"not run by anything: {name}"
                    continue
                done = cli.main(arguments)
                assert done <= (arguments[0] == "lint"), f"sbonnx {shlex.join(arguments)}\n{capfd.readouterr()}"


def test_indented_blocks_are_run_too() -> None:
    """Blocks in lists are indented, which the pattern of blocks does not see: none may hide there."""
    for path in PAGES:
        hidden = [match for match in re.findall(r"^ +```(\w+)", path.read_text(), re.MULTILINE) if match in RUN]
        assert not hidden, f"{path.name}: move the block out of the list"


def test_every_public_name_is_documented() -> None:
    text = (DOCS / "reference" / "python.md").read_text()
    documented = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith(":::")}
    assert documented == set(sbonnx.__all__) - {"__version__"}


def test_figures_are_those_of_their_script() -> None:
    spelled: dict[str, object] = {"__name__": "figures", "__file__": str(DOCS / "_site" / "figures.py")}
    exec((DOCS / "_site" / "figures.py").read_text(), spelled)
    figures = spelled["FIGURES"]
    assert isinstance(figures, dict)
    for name, make in figures.items():
        assert (DOCS / "concepts" / name).read_text() == make()


def assert_search_works(page: Browser, path: Path) -> None:
    """Search in a page that was opened from disk; nothing comes from elsewhere."""
    page.open(path)
    page.run("document.querySelector('#__search').click()")
    typed = (
        "(i => { i.focus(); i.value = 'smoothquant'; i.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})) })"
    )
    deadline = time.monotonic() + 60
    while not page.run("document.querySelectorAll('.md-search-result__item').length"):
        assert time.monotonic() < deadline, page.wrong
        page.run(f"{typed}(document.querySelector('.md-search__input'))")
        time.sleep(0.2)
    assert not [url for url in page.fetched if not url.startswith(("file:", "data:", "about:"))]


def assert_boxes_scroll_by_keyboard(page: Browser, path: Path) -> None:
    """On phones, code and tables that are too wide scroll and have the focus in turn; the page does not scroll."""
    page.open(path, width=420)
    boxes = """[...document.querySelectorAll('.md-content pre > code, .md-typeset__scrollwrap')]
        .filter(box => box.scrollWidth > box.clientWidth).map(box => box.tabIndex)"""
    deadline = time.monotonic() + 60
    while set(page.run(boxes)) != {0}:
        assert time.monotonic() < deadline, path.name
        time.sleep(0.1)
    assert page.run("document.documentElement.scrollWidth") <= 420


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs_gen_files")
    pytest.importorskip("material")
    silent = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(command, env={**os.environ, **silent}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if (program := browser_program()) is not None:
        with browser(program) as opened:
            assert_search_works(opened, tmp_path / "index.html")
            for name in ("recipe", "reference/lint/O01", "reference/python", "results/accuracy"):
                assert_boxes_scroll_by_keyboard(opened, tmp_path / f"{name}.html")
    options = (tmp_path / "reference" / "command_line.html").read_text()
    assert "sbonnx quantize" in options
    assert "--average-bits" in options
    assert "ACCURACY_LEVEL" in (tmp_path / "reference" / "recipe_defaults.html").read_text()
    for rule in (rule for rules in RULES.values() for rule in rules):
        assert rule.id in (tmp_path / "reference" / "lint" / f"{rule.id}.html").read_text()
    assert "Quantize a float ONNX model" in (tmp_path / "reference" / "python.html").read_text()
