"""The table of what can be reimported agrees with ONNX's schemas and with what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

torch = pytest.importorskip("torch")

from benchmarks.qat.operators import INLINED, LIMITS, RUNTIME_LIMITS, UNWRITTEN, WHY, coverage, page  # noqa: E402
from sbonnx.graph.opset_convert import NEWEST  # noqa: E402
from sbonnx.torchnet import FUNCTIONS, NUMBERS, RUNTIME_FUNCTIONS  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.shape_arith import SIZES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_every_op_of_every_opset_has_a_row() -> None:
    rows = {(row.op, row.opset) for row in coverage()}
    for opset in range(13, NEWEST + 1):
        for schema in onnx.defs.get_all_schemas_with_history():
            if not schema.domain and schema.since_version <= opset:
                found = onnx.defs.get_schema(schema.name, opset, "")
                assert ((schema.name, opset) in rows) != found.deprecated


def test_a_row_says_what_is_there() -> None:
    for row in coverage([13, 23]):
        assert row.since <= row.opset
        assert (row.state == "supported") == (row.op in FUNCTIONS)
        assert (row.state == "inlined") == (row.op in INLINED)
        assert row.state == "supported" or row.why


def test_up_to_opset_23_every_gap_has_its_reason() -> None:
    assert not [row for row in coverage(range(13, 24)) if row.why == UNWRITTEN]


def test_the_lists_name_ops_of_onnx() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain}
    assert {*FUNCTIONS, *SIZES, *LIMITS, *WHY, *INLINED} <= known
    assert NUMBERS.keys() <= FUNCTIONS.keys() | RUNTIME_FUNCTIONS.keys()
    assert RUNTIME_LIMITS.keys() <= RUNTIME_FUNCTIONS.keys()
    assert SIZES.keys() <= FUNCTIONS.keys()
    assert not WHY.keys() & FUNCTIONS.keys()
    assert LIMITS.keys() <= FUNCTIONS.keys()


def test_most_of_what_networks_are_made_of_is_there() -> None:
    rows = coverage([17])
    assert sum(row.state == "supported" for row in rows) > 0.75 * len(rows)


def test_the_page_is_what_is_written() -> None:
    """By the command that the page names."""
    found = (ROOT / "docs" / "qat_operators.md").read_text()
    if f" onnx {onnx.__version__}." not in found:
        pytest.skip(f"the page is of another onnx than {onnx.__version__}")
    command = [sys.executable, "-m", "benchmarks.qat.operators"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == page() == found, "write it again: python -m benchmarks.qat.operators > docs/qat_operators.md"


def test_the_page_has_every_op_and_every_gap() -> None:
    table = page().partition("## ")[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    rows = {line[0].removeprefix("| "): line[1:] for line in lines}
    for row in coverage(range(13, 24)):
        mark = rows[row.op][row.opset - 13].strip()
        assert mark == {"supported": "+", "inlined": "o", "missing": "-"}[row.state]
        assert row.why in rows[row.op][-1]
