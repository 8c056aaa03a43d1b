"""Every public call of the ancestor, on an ONNX file: what is called, and what it gives.

`CALLS` is the table. Numbers are held against numpy and onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.ancestor import calls_around  # noqa: F401
from tests.ancestor.calls_steps import CALLS, Context


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Context]:
    context = Context(tmp_path)
    yield context
    context.close()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CALLS)
def test_call(name: str, it: Context) -> None:
    CALLS[name](it)
