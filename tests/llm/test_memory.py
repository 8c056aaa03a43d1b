"""Memory of `sbonnx.llm.quantize`: weights are mapped, and what is held does not grow with the model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.llm.random_decoder import DecoderSize, write_random_decoder
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import read_decoder

ROOT = Path(__file__).resolve().parents[2]

PEAK = """
import sys
from pathlib import Path
from sbonnx import llm

report = llm.quantize(sys.argv[1], output=sys.argv[2], overrides={"W.OBSERVER.TYPE": "minmax"})
assert report.ok, report.problems
fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(fields["VmHWM"].split()[0]) * 1024)
"""


def test_random_decoders_run(tmp_path: Path) -> None:
    size = DecoderSize(hidden=64, inner=96, layers=2, heads=4, kv_heads=2, vocabulary=128, context=32)
    decoder = read_decoder(write_random_decoder(tmp_path / "m", size))
    assert (decoder.vocabulary, len(decoder.structure.blocks)) == (128, 2)
    logits, cache = DecoderSession(decoder, threads=1)(np.arange(20)[None])
    assert logits.shape == (1, 20, 128)
    assert np.isfinite(logits).all()
    assert all(values.shape == (1, 2, 20, 16) for values in cache.values())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peaks of processes are read from /proc")
def test_peak_of_a_large_decoder(tmp_path: Path) -> None:
    """Rounded to nearest, a decoder of 1.3 GB in float32 has a peak of 0.4 GB; bound: 0.64 GB."""
    size = DecoderSize(hidden=2048, inner=5632, layers=4, heads=16, kv_heads=8, vocabulary=32000)
    folder = write_random_decoder(tmp_path / "m", size)
    assert (folder / "model.onnx.data").stat().st_size > 1.27e9
    command = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "q")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shutil.rmtree(tmp_path)
    assert int(done.stdout.split()[-1]) < 0.64e9
