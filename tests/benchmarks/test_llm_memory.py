"""Memory of large decoders: a small one is measured, and its row has the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kept import Kept
from benchmarks.llm import memory as llm_memory
from benchmarks.llm.random_decoder import DecoderSize


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peaks of processes are read from /proc")
def test_a_small_decoder_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    size = DecoderSize(hidden=256, inner=256, layers=1, heads=4, kv_heads=2, vocabulary=256, context=llm_memory.LENGTH)
    monkeypatch.setattr(llm_memory, "SHAPES", {"small": llm_memory.Shape("one block", size)})
    kept = Kept()
    record = kept.record(("memory", "small", "gptq"), lambda: llm_memory.measure("small", "gptq", 8))
    assert (record["code"], record["tokens"], record["alone"]) == (0, 8 * llm_memory.LENGTH, 0)
    assert 1 << 20 < record["weights"] < 1 << 22
    assert 50 << 20 < record["peak"] < 2 << 30
    row = llm_memory.text_of(kept).splitlines()[-1].split(" | ")
    assert row[0] == "| small: one block"
