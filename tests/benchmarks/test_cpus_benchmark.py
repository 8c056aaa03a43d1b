"""The benchmark of files for CPUs with and without VNNI: what is run where, a measured record, and the section."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy import load_pack
from benchmarks.runtimes.cpus import EXACT, measure
from benchmarks.w8a8.runs import Bench

MODEL = "cifar_resnet20"


def test_a_record_has_scores_and_a_ratio_of_times(pack: Path, tmp_path: Path) -> None:
    """Few samples; 8-bit weights without limits are exact in a session with exact products, on any CPU."""
    bench = Bench(load_pack(pack), tmp_path, tmp_path, limit=8, count=8)
    record = measure(bench, MODEL, EXACT, rounds=7)
    assert record["sqnr"]["value"] > 20 and record["agreement"]["value"] >= 0.75
    assert 0 < record["ratio"]["low"] <= record["ratio"]["value"] <= record["ratio"]["high"]
    assert bench.kept.get(MODEL, EXACT) is record
