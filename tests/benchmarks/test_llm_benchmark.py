"""The benchmark of decoders: settings, figures with intervals, tables and requirements."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kept import Record
from benchmarks.llm import __main__ as llm
from benchmarks.llm.runs import FLOAT, DecoderBench, figures
from benchmarks.llm.table import HEADER, SPEED_HEADER, acceptance, speed_lines
from benchmarks.llm.ways import CACHES, ORT, OURS, TORCH, DecoderWay
from benchmarks.scores import Estimate
from sbonnx import llm as decoders
from sbonnx.llm.layout import read_decoder
from sbonnx.llm.scores import TokenSums, score_windows
from tests.llm.tiny_decoder import token_windows, write_folder

W4 = "w4 g32"
OWN = f"{OURS} default"
PLAIN = f"{ORT} asymmetric (default)"


def record(kl: float, perplexity: float | None = None, mb: float = 1.0) -> Record:
    made = {"perplexity": perplexity or 36 + 50 * kl, "kl": kl, "agreement": 0.9}
    return {"note": "", "cpu": 2.0, "mb": mb, **{key: asdict(Estimate(x, x, x)) for key, x in made.items()}}


def test_figures_are_those_of_the_evaluation(tmp_path: Path) -> None:
    """Sums by window give the figures of `evaluate`, and the interval contains them."""
    folder, ids = write_folder(tmp_path / "m"), token_windows()
    decoders.quantize(folder, output=tmp_path / "q", overrides=["MIN_WEIGHT_SIZE=0"], latency=False)
    found = decoders.evaluate(tmp_path / "q", ids, against=folder, latency=False)
    sums = list(score_windows(ids, read_decoder(tmp_path / "q"), read_decoder(folder), threads=1))
    made = figures(sums)
    for name, figure in made.items():
        assert figure.value == pytest.approx(getattr(found, name), rel=1e-6)
        assert figure.low < figure.value < figure.high
    assert sum(sums, TokenSums()).float_perplexity == pytest.approx(found.float_perplexity)


def test_commands(tmp_path: Path) -> None:
    """Our command line by setting, and the job of onnxruntime's quantizer with the windows that ours calibrates on."""
    source, text = write_folder(tmp_path / "m"), tmp_path / "calib.npz"
    np.savez(text, ids=token_windows(16))
    bench = DecoderBench(source, text, token_windows(), tmp_path)
    own = bench.command(DecoderWay(OURS, 4, 32, ("ACCURACY_LEVEL=0",)), tmp_path / "q")
    assert own[:5] == [sys.executable, "-m", "sbonnx", "llm", "quantize"]
    assert own[-2:] == ["--set", "ACCURACY_LEVEL=0"] and own[own.index("--bits") + 1] == "w4"
    job = json.loads(bench.command(DecoderWay(ORT, 4, 32, method="gptq mse"), tmp_path / "o")[-1])
    assert (job["bits"], job["block"], job["method"], job["level"]) == (4, 32, "gptq mse", None)
    with np.load(job["data"]) as feeds:
        assert {len(feeds[name]) for name in feeds.files} == {14}
    assert (tmp_path / "o" / "config.json").is_file() and not (tmp_path / "o" / "model.onnx").exists()


def test_requirements() -> None:
    held = {(FLOAT, FLOAT): record(0.0), (W4, OWN): record(0.003), (W4, PLAIN): record(0.010)}
    share, ahead = acceptance(held)
    assert share.startswith("met: KL at w4 g32") and "0.30" in share
    assert ahead.startswith("met: ") and "than 1 of 1" in ahead
    *_, cost, ahead = acceptance({**held, (W4, f"{TORCH} GPTQ"): {**record(0.010), "cpu": 1.9}})
    assert cost.startswith("**missed**: CPU seconds") and "2.0 / 1.9" in cost and "than 2 of 2" in ahead
    share, ahead = acceptance({**held, (W4, OWN): record(0.004), (W4, f"{ORT} HQQ"): record(0.002)})
    assert share.startswith("**missed**") and "0.40" in share
    assert ahead.startswith("**missed**") and "than 1 of 2" in ahead and "(onnxruntime HQQ)" in ahead
    (_, larger) = acceptance({**held, (W4, OWN): record(0.003, mb=1.1)})
    assert larger.startswith("**missed**")
    two = acceptance(
        {(FLOAT, FLOAT): record(0.0, 36.15), ("w2 g32", OWN): record(0.1, 39.9), ("w2 g128", OWN): record(0.1, 41.0)}
    )
    assert [line.split(":")[0] for line in two] == ["met", "**missed**"]
    caches = {(CACHES, f"{OURS} {bits}-bit caches"): record(0.001, value) for bits, value in ((8, 36.151), (4, 36.5))}
    said = acceptance({(FLOAT, FLOAT): record(0.0, 36.15), **caches})
    assert [line.split(":")[0] for line in said] == ["met", "**missed**"] and "0.003%, at most 0.05%" in said[0]


def test_tables() -> None:
    names = (FLOAT, ORT, OURS)
    speed = {
        "first": dict(zip(names, ([4.0, 4.0], [2.0, 2.0], [2.0, 1.0]), strict=True)),
        "token": dict(zip(names, ([1.0, 1.0], [0.5, 0.5], [0.5, 0.25]), strict=True)),
        "memory": dict(zip(names, (10.0, 5.0, 4.0), strict=True)),
    }
    rows = speed_lines(speed)
    assert {len(row) for row in rows} == {len(SPEED_HEADER)}
    assert rows[0][4].startswith("0.38") and "(0.25 to 0.5" in rows[0][4]
    assert rows[2][0] == "tokens/s" and rows[2][4].startswith("3.0")
    assert rows[3][-2:] == ["0.40", "0.80"]
    held = {(FLOAT, FLOAT): record(0.0), (W4, OWN): record(0.003), (W4, PLAIN): record(0.010)}
    text = llm.text_of(held, speed, "About.")
    assert text.startswith("## Decoders") and "### Speed and memory" in text
    assert {row.count("|") for row in text.splitlines() if row.startswith(f"| {W4}")} == {len(HEADER) + 1}
