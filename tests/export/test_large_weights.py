"""Weights alone of a model of 0.4 GiB: in memory that one layer needs, not the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.graph.test_weights_large import ROWS, write_sparse

ROOT = Path(__file__).resolve().parents[2]

LAYERS = 6
LIMIT_MIB = 256
"""Memory of the process that belongs to no file: what a weight of 64 MiB needs while it is rounded and packed."""

WEIGHTS_ALONE = """
import sys, threading, time
import sbonnx

peak, done = 0, threading.Event()

def anonymous():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, anonymous())

before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
report = sbonnx.quantize(
    sys.argv[1], None, backend=sys.argv[3], mode="weight_only", w_observer="minmax", output=sys.argv[2],
    verify=False, **{"W.ROUNDING.TYPE": "nearest"},
)
done.set()
watcher.join()
print(report.counts.weights, peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_layers_weights_at_a_time(tmp_path: Path) -> None:
    source, target = write_sparse(tmp_path, LAYERS), tmp_path / "q.onnx"
    script = [sys.executable, "-c", WEIGHTS_ALONE, str(source), str(target), "onnxruntime"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    weights, peak = (int(word) for word in done.stdout.split()[-2:])
    assert weights == LAYERS
    assert peak < LIMIT_MIB, peak
    nodes = onnx.load(str(target), load_external_data=False).graph.node
    assert sum(node.op_type == "MatMulNBits" for node in nodes) == LAYERS
    size = sum(path.stat().st_size for path in tmp_path.glob("q.onnx*"))
    assert size < ROWS * ROWS * LAYERS * 0.65 + (4 << 20)  # 4 bits, and scales and zero points of blocks of 32
