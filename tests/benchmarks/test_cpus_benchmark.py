"""The benchmark of files for CPUs with and without VNNI: what is run where, a measured record, and the section."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept
from benchmarks.runtimes import cpus
from benchmarks.runtimes.cpus import EXACT, FILES, PAIRS, SHORT, VNNI, command, lines, measure, section, verdict
from benchmarks.scores import Estimate
from benchmarks.w8a8.runs import Bench
from benchmarks.w8a8.table import FLOAT
from sbonnx.system.cpu import CPUS, TargetCpu

MODEL = "cifar_resnet20"


def kept(*models: dict[str, tuple[float, float, float]]) -> Kept:
    """Records by file: SQNR, metric and ratio to float, each with an interval of one unit on both sides."""
    held = Kept()
    for number, files in enumerate(models):
        for file, figures in files.items():
            named = zip(("sqnr", "metric", "ratio", "agreement"), (*figures, 1.0), strict=True)
            record = {what: asdict(Estimate(value, value - 1, value + 1)) for what, value in named}
            held.record((str(number), file), lambda record=record: record)  # type: ignore[misc]
    return held


@pytest.mark.parametrize(
    ("here", "cpu", "masked"),
    [("vnni", "vnni", False), ("amx", "vnni", False), ("vnni", "avx2", True), ("avx2",) * 2 + (False,)],
)
def test_files_run_where_their_kernels_are(here: str, cpu: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "target_cpu", lambda: CPUS[here])
    assert command(cpu) == ([sys.executable, str(cpus.MASK), sys.executable] if masked else [sys.executable])
    assert cpus.MASK.is_file()


def test_no_cpu_gets_instructions_by_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def without() -> TargetCpu:
        return CPUS["avx2"]

    monkeypatch.setattr(cpus, "target_cpu", without)
    with pytest.raises(LookupError, match="no instructions of 'vnni'"):
        command("vnni")


def test_the_default_for_avx2_has_no_setting_but_the_cpu() -> None:
    assert FILES[PAIRS].way.flags == ("--no-verify", "--cpu", "avx2")
    assert FILES[SHORT].way.flags[-2:] == ("--set", "REDUCE_RANGE=true")
    assert FILES[EXACT].entries == {"session.x64quantprecision": "1"}


def test_a_record_has_scores_and_a_ratio_of_times(pack: Path, tmp_path: Path) -> None:
    """Few samples; 8-bit weights without limits are exact in a session with exact products, on any CPU."""
    bench = Bench(load_pack(pack), tmp_path, tmp_path, limit=8, count=8)
    record = measure(bench, MODEL, EXACT, rounds=7)
    assert record["sqnr"]["value"] > 20 and record["agreement"]["value"] >= 0.75
    assert 0 < record["ratio"]["low"] <= record["ratio"]["value"] <= record["ratio"]["high"]
    assert bench.kept.get(MODEL, EXACT) is record


def test_the_default_is_compared_with_seven_bits_and_with_vnni() -> None:
    files = {FLOAT: (99.0, 3.0, 1.0), VNNI: (30.0, 3.0, 0.4), SHORT: (26.0, 1.9, 0.6), PAIRS: (29.6, 2.1, 0.6)}
    worse = {FLOAT: (99.0, 3.0, 1.0), VNNI: (30.0, 3.0, 0.2), SHORT: (30.0, 1.0, 0.4), PAIRS: (29.0, 4.1, 0.5)}
    worse[EXACT] = (30.0, 3.0, 0.7)
    incomplete = {VNNI: (30.0, 0.9, 0.9)}
    said = verdict(kept(files, worse, incomplete), ("0", "1", "2"))
    assert "SQNR +1.3 dB against 7 bits (median; -1.0 to +3.6)" in said
    assert "at most 0.5 dB below VNNI on 1 of 2 models" in said
    assert "interval of AVX2, pair-safe on 1 of 2, AVX2, 7 bits on 0 of 2, VNNI on 2 of 2." in said
    assert "AVX2, pair-safe 0.55, AVX2, 7 bits 0.50, VNNI 0.30." in said
    assert said.endswith("take 1.40 to 1.40 times that of pair-safe weights.**")
    assert verdict(kept(incomplete), ("0",)) == "**No model was measured with all files.**"


def test_a_file_without_a_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = kept({VNNI: (30.0, 0.9, 0.4), PAIRS: (29.6, 0.9, 0.6)})
    assert [row[1:3] for row in lines(held, ("0",))] == [
        [VNNI, "30.00 (29.00 to 31.00)"],
        [PAIRS, "29.60 (28.60 to 30.60)"],
    ]
    monkeypatch.setattr(cpus, "metrics", lambda _: "")
    assert f"Not measured: {SHORT}: 0; {EXACT}: 0." in section(held, ("0",), 40)
