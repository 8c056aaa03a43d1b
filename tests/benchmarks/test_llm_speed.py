"""Speed of rounding: a small product is measured, and its row has the figures."""

from __future__ import annotations

import pytest

from benchmarks.kept import Kept
from benchmarks.llm import speed as rounding_speed


@pytest.mark.slow
def test_a_small_product_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(rounding_speed, "PRODUCTS", {"small": rounding_speed.ProductShape("a product", 128, 16)})
    kept = Kept()
    record = kept.record(("speed", "small"), lambda: rounding_speed.measure(rounding_speed.PRODUCTS["small"]))
    for errors in (record["ours"]["errors"], record["torch"]["errors"]):
        assert errors[0] < errors[1] < 1
    assert record["ours"]["errors"][1] < record["torch"]["errors"][1]
    row = rounding_speed.text_of(kept).splitlines()[-1].split(" | ")
    assert (row[0], len(row)) == ("| small: a product", len(rounding_speed.HEADER))
