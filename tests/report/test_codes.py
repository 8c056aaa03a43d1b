"""Sentences with codes: they stay strings, and every code of the source has one explanation."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from sbonnx.report import Note, Reason, Refusal
from sbonnx.report.codes import by_code, summary
from sbonnx.report.explanations import EXPLANATIONS, Explanation, explanation_of
from sbonnx.report.reading import read
from tests.support.codes import codes, modules

ROOT = Path(__file__).parents[2]

READS_TEXT = {
    "sbonnx/present/text/printer.py": "numbers in cells of tables",
    "sbonnx/present/html/formatting.py": "illegal characters and addresses",
    "sbonnx/present/html/layer_views.py": "blocks in names of nodes",
    "sbonnx/present/html/overview.py": "names of anchors",
    "sbonnx/system/terminal.py": "control characters and long words",
}
"""Modules that show sentences and use `re`, with what they look for."""


def test_sentences_are_strings_with_a_code() -> None:
    note = Note("scales-raised", "5 scales are raised")
    for same in (note, copy.deepcopy(note), pickle.loads(pickle.dumps(note))):
        assert (same, same.code, type(same)) == ("5 scales are raised", "scales-raised", Note)
        assert json.dumps([same]) == '["5 scales are raised"]'


def test_a_plain_sentence_of_a_plug_in_gets_a_code() -> None:
    assert Reason.of("too wide", "by-backend").code == "by-backend"
    assert Reason.of(Reason("few-channels", "4 channels"), "by-backend").code == "few-channels"


def test_a_refusal_has_the_code_of_its_reason() -> None:
    refusal = Refusal("quantize", "conv", Reason("few-channels", "4 channels"))
    values = json.loads(json.dumps({**vars(refusal)}))
    assert values == {"what": "quantize", "where": "conv", "why": "4 channels", "code": "few-channels"}
    assert read(Refusal, values) == refusal and read(Refusal, values).why.code == "few-channels"


def test_sentences_are_grouped_by_code() -> None:
    notes = [Note("scales-raised", f"'{850 + index}': {index + 2} scales are raised") for index in range(15)]
    other = Note("opset-converted", "the opset was converted")
    groups = by_code([notes[0], other, *notes[1:], notes[3]])
    assert [len(group) for group in groups] == [15, 1]
    assert [summary(group) for group in groups] == [f"{notes[0]} (and 14 more of this kind)", other]


def test_every_code_has_one_explanation() -> None:
    given, explained = codes(), Counter(code for row in EXPLANATIONS for code in row.codes.split())
    assert {code: where for code, where in given.items() if code not in explained} == {}
    assert [code for code in explained if code not in given] == [], "no code gives these"
    assert [code for code, times in explained.items() if times > 1] == []
    assert {"slower-in-integers", "not-constant", "opset-converted", "cache-damaged"} <= given.keys()


@pytest.mark.parametrize("row", EXPLANATIONS, ids=[row.id for row in EXPLANATIONS])
def test_an_explanation_is_found_and_names_a_page(row: Explanation) -> None:
    assert explanation_of(row.id.lower()) is row and explanation_of(row.codes.split()[0]) is row
    assert (ROOT / row.page).is_file()


def test_ids_are_unique() -> None:
    assert len({row.id for row in EXPLANATIONS}) == len(EXPLANATIONS)


def test_no_code_reads_sentences() -> None:
    """Nothing matches or splits them; where they are grouped, shown or explained, `re` has another purpose."""
    places = ("sbonnx/report/", "sbonnx/present/html/", "sbonnx/stages/", "sbonnx/cli/output/", "sbonnx/cli/about/")
    for name, tree in modules():
        imported = {alias.name for part in ast.walk(tree) if isinstance(part, ast.Import) for alias in part.names}
        if name.startswith(places) and "re" in imported:
            assert name in READS_TEXT, name
        for part in ast.walk(tree):
            if isinstance(part, (ast.Call, ast.Compare)):
                assert not _reads(part), f"{name}:{part.lineno}: {ast.unparse(part)}"


SENTENCES = {"why", "note", "reason", "problem"}
"""Names of variables and attributes that hold sentences with a code."""


def _reads(part: ast.Call | ast.Compare) -> bool:
    """Whether an expression looks into a sentence."""
    if isinstance(part, ast.Compare):
        inside = any(isinstance(operator, (ast.In, ast.NotIn)) for operator in part.ops)
        return inside and isinstance(part.left, ast.Constant) and _named(part.comparators[0]) in SENTENCES
    looks = {"startswith", "endswith", "partition", "rpartition", "split", "removeprefix", "removesuffix", "find"}
    return isinstance(part.func, ast.Attribute) and part.func.attr in looks and _named(part.func.value) in SENTENCES


def _named(value: ast.expr) -> str:
    return str(getattr(value, "attr", getattr(value, "id", "")))
