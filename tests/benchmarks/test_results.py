"""Pages of results: what a section becomes, and that the pages in the repository are as a benchmark writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.pages import PAGES, Page, table_of

METHOD = "Each file runs ten times in turn, and the figure is the median of the ratios with its interval."
SECTION = f"""## Title

**Met.**

`python -m benchmarks.some --write`; 3 rounds. {METHOD} {METHOD} {METHOD}

{results.table(("model", "way", *"abcdefgh"), [["one", "x", *"12345678"], ["one", "y", *"87654321"]])}

All goals met.
"""


def blocks(text: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- begin (.*?) -->\n(.*?)\n<!-- end \1 -->", text, re.DOTALL))


def test_wide_tables_repeat_the_columns_that_name_a_row() -> None:
    first = table_of(f"<!-- begin s -->{SECTION}<!-- end s -->", "s")
    last = table_of(f"<!-- begin s -->{SECTION}<!-- end s -->", "s", "h")
    assert list(first[1].values()) == ["one", "y", "8", "7", "6", "5"]
    assert list(last[1].values()) == ["one", "y", "4", "3", "2", "1"]


def test_rows_without_a_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="columns from the left"):
        results.table("abcdefghi", ["123456789", "123456789"])


def test_a_caption_has_two_lines_and_the_method_has_the_rest() -> None:
    shown, method = results.parted(SECTION)
    assert shown.split("\n\n")[:3] == ["## Title", "**Met.**", f"{METHOD} {METHOD}"]
    assert shown.endswith("\n\nAll goals met.")
    assert method == f"**Title**\n\n- `python -m benchmarks.some --write`; 3 rounds.\n- {METHOD}"


def test_a_section_is_replaced_in_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(
        results, "PAGES", {"some": Page("Some", ("first", "second"), lambda text: f"{text.count(chr(124))} cells")}
    )
    results.write_section("second", SECTION)
    results.write_section("first", "## First\n\nShort.")
    results.write_section("second", SECTION.replace("Met", "Missed"))
    page = (tmp_path / "some.md").read_text()
    assert page.index("## First") < page.index("**Missed.**") < page.index(results.METHODS) < page.index("3 rounds")
    assert "**Met.**" not in page
    assert "[Some](some.md)" in (tmp_path / "index.md").read_text()
    with pytest.raises(ValueError, match="no page"):
        results.write_section("third", "")


@pytest.mark.parametrize("file", PAGES)
def test_pages_are_as_written(file: str) -> None:
    text = (results.RESULTS / f"{file}.md").read_text(encoding="utf-8")
    assert text == results.page_text(PAGES[file], blocks(text))
    for block in re.split(r"\n{2,}", text.split(results.METHODS)[0]):
        if block.startswith("|"):
            assert block.splitlines()[0].count("|") <= results.COLUMNS + 1
        elif not block.startswith(("<!--", "-", "#")):
            assert len(block.split("\n<!--")[0]) <= results.CAPTION, block


def test_index_has_the_key_figure_of_each_page() -> None:
    index = results.index()
    assert not re.search(r"\b(lose|lost|loss)\b[^|]*-\d", index), "a negative loss is a gain"
    assert (results.RESULTS / "index.md").read_text(encoding="utf-8") == index
    home = (results.RESULTS.parent / "index.md").read_text(encoding="utf-8")
    shown = [
        line.replace("](results/", "](")
        for line in home.splitlines()
        if line.startswith("| [") and "?](results/" in line
    ]
    assert shown and set(shown) <= set(index.splitlines()), "key figures on the home page are those of the results"
    assert {path.stem for path in results.RESULTS.glob("*.md")} == {"index", *PAGES}
