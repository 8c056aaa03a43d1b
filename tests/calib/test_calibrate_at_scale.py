"""Calibration on real models, and its memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.graph import load
from sbonnx.planning.types import ObserverChoice
from sbonnx.spec import QuantSpec
from tests.calib.test_calibrate import same
from tests.support.calibration import calibrate
from tests.support.naive import plan_linear

ROOT = Path(__file__).resolve().parents[2]

PEAK = """
import resource, sys
import numpy as np
from tests.support.calibration import calibrate
from sbonnx.graph import load
from tests.support.naive import plan_linear
from tests.support.models import residual

class Feeds:
    def __iter__(self):
        rng = np.random.default_rng(0)
        return ({"x": rng.standard_normal((64, 3, 8, 8)).astype(np.float32)} for _ in range(int(sys.argv[1])))

graph = load(residual())
calibrate(graph, plan_linear(graph), Feeds(), granularity=sys.argv[2], memory="1 MiB")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(feeds: int, granularity: str) -> int:
    """Peak memory in KiB of a calibration on so many feeds of 64 samples, 48 KiB each, in a fresh process."""
    command = [sys.executable, "-c", PEAK, str(feeds), granularity]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_does_not_grow_with_the_data() -> None:
    """25 times the data: 12 MiB of feeds and 100 MiB of activations more, that must not stay."""
    assert peak(50, "whole") - peak(2, "whole") < 16 << 10
    assert peak(50, "layer") - peak(2, "layer") < 32 << 10


def calibration_feeds(pack: Path, name: str, limit: int) -> Any:
    """Feeds of the pack's calibration set, one sample each."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_calib(name, limit=limit)


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
def test_real_model_bit_for_bit(pack: Path, observer: str) -> None:
    graph = load(pack / "models" / "cifar_resnet20.onnx")
    plan = plan_linear(graph, observer=ObserverChoice(observer), weight=QuantSpec(axis=0))
    feeds = calibration_feeds(pack, "cifar_resnet20", 24)
    x = np.concatenate([feed["input"] for feed in feeds])
    alone = calibrate(graph, plan, feeds, threads=1)
    for size, workers in ((1, 2), (3, 2), (8, 1), (24, 3)):
        cut = [{"input": x[i : i + size]} for i in range(0, 24, size)]
        assert same(alone, calibrate(graph, plan, cut, threads=workers))


def test_branches_of_a_real_model(pack: Path) -> None:
    """silero_vad: the network for 16 kHz ran, that for 8 kHz did not."""
    graph = load(pack / "models" / "silero_vad.onnx")
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, calibration_feeds(pack, "silero_vad", 8))
    solved = [site for site in plan.of_role("activation") if site.key in solution.bounds]
    assert len(solved) >= 5
    assert len({site.scope for site in solved}) == 1
    assert {refusal.why for refusal in solution.refusals} == {"its branch never ran on the calibration data"}
    assert len(solved) + len(solution.refusals) == len(plan.of_role("activation"))


HELD = """
import sys
import numpy as np
from sbonnx.calib.quantized.forward import Forward
from tests.support.calibration import calibrate
from sbonnx.graph import load, save
from tests.support.naive import plan_linear
from tests.support.models import model

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

proto = model("agraph (float[N,4096] x) => (float[N,8192] y) { y = MatMul (x, w) }", w=(4096, 8192))
save(load(proto), sys.argv[1], external_over=0)
graph = load(sys.argv[1])
feeds = {"x": np.ones((1, 4096), np.float32)}
plan = plan_linear(graph)
solution = calibrate(graph, plan, [feeds])
before = anonymous()
with Forward(graph, plan, solution) as quantized, Forward(graph, plan, solution, w_quant=False) as floats:
    quantized(feeds), floats(feeds)
    print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forward_shares_its_weights_with_the_session(tmp_path: Path) -> None:
    """128 MiB of weights, once float and once rounded: neither is held as a copy."""
    command = [sys.executable, "-c", HELD, str(tmp_path / "m.onnx")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10
