"""The benchmark of low bits: its tables, its children, and AdaRound on batches beside what its paper says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.calibration.subjects import save_feeds
from benchmarks.lowbit import adaround as lowbit_adaround
from benchmarks.lowbit import effort as lowbit_effort
from benchmarks.lowbit.runs import Bench, Effort
from benchmarks.lowbit.table import Cost, Line, beside, best_peer, lost, mean_of
from benchmarks.lowbit.ways import ACCURACY, ALL_SAMPLES, PeerWay, Table, Way
from benchmarks.peers import environments, measured
from sbonnx.pipeline import prepare
from sbonnx.stages.state import read_recipe

CIFAR = "cifar_resnet20"
FLOAT = Line(CIFAR, "float", (0.91, 0.80), by="float")
OURS = Line(CIFAR, "default", (0.90, 0.797), Cost(10.0, 6.0, 200.0), main=True, rival=True)
PEER = Line(CIFAR, "AIMET AdaRound", (0.95, 0.796), Cost(200.0, 150.0, 700.0), by="peer", learns=True)

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
small (float[N, 3, 8, 8] image) => (float[N, 4, 1, 1] y)
<float[6, 3, 3, 3] w, float[4, 6, 1, 1] v>
{
    c = Conv <pads = [1, 1, 1, 1]> (image, w)
    r = Relu (c)
    d = Conv (r, v)
    y = GlobalAveragePool (d)
}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small net and eight samples: small.onnx, small.npz."""
    folder = tmp_path_factory.mktemp("small")
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(MODEL)
    for name, shape in (("w", (6, 3, 3, 3)), ("v", (4, 6, 1, 1))):
        tensor = onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    onnx.save(model, str(folder / "small.onnx"))
    save_feeds(folder / "small.npz", [{"image": x} for x in rng.normal(size=(8, 1, 3, 8, 8)).astype(np.float32)])
    return folder


def test_the_metric_that_counts_is_lost_against_float() -> None:
    assert lost(OURS, FLOAT) == pytest.approx(0.003)  # of the JPEG set, the second metric
    other = Line("squeezenet11", "default", (0.58, 0.78))
    assert lost(other, Line("squeezenet11", "float", (0.60, 0.79), by="float")) == pytest.approx(0.02)
    assert lost(replace(OURS, scores=()), FLOAT) is None


def test_the_peer_that_counts_is_the_most_accurate_one() -> None:
    worse = replace(PEER, way="AIMET min-max", scores=(0.99, 0.70), cost=Cost(1.0, 1.0, 1.0))
    failed = replace(PEER, way="AIMET SeqMSE", scores=(), note="fails")
    assert best_peer([OURS, worse, PEER, failed], CIFAR) is PEER
    cheaper = replace(PEER, way="AIMET SQNR", cost=Cost(2.0, 2.0, 1.0))
    assert best_peer([PEER, cheaper, worse], CIFAR) is cheaper
    assert best_peer([OURS], CIFAR) is None


def test_beside_the_peer_both_accuracy_and_time_count() -> None:
    assert beside(OURS, PEER) == "+0.10, 20.0 × less CPU than AIMET AdaRound: met"
    assert beside(replace(OURS, scores=(0.9, 0.79)), PEER) == "-0.60, 20.0 × less CPU than AIMET AdaRound: **missed**"
    assert "**missed**" in beside(replace(OURS, cost=Cost(30.0, 20.0, 200.0)), PEER)
    assert "met" not in beside(replace(OURS, rival=False), PEER)
    cheap = replace(PEER, learns=False, cost=Cost(1.0, 1.0, 100.0))  # by accuracy alone
    assert beside(OURS, cheap).endswith(": met")
    assert beside(replace(OURS, scores=(0.9, 0.79)), cheap).endswith(": **missed**")
    assert beside(PEER, PEER) == beside(OURS, None) == ""


def test_several_seeds_count_by_their_mean() -> None:
    """And are compared with the goal by it: one run is above, one below."""
    seen = ((0.79, 3.0), (0.80, 1.0), (0.795, 2.0))
    runs = [replace(OURS, scores=(0.9, score), cost=Cost(cpu, cpu, 100.0)) for score, cpu in seen]
    found = mean_of(runs)
    assert found.scores == pytest.approx((0.9, 0.795)) and found.cost == runs[2].cost and found.main
    assert found.way == "default, mean of 3 seeds (0.7900 to 0.8000)"
    assert mean_of(runs[:1]) is runs[0]


@pytest.mark.slow
def test_only_rows_that_are_asked_for_and_fit_the_model_are_run(small: Path) -> None:
    ways = {"nearest": Way({"w_bit": 4, "rounding": "nearest"}), "other": Way({}), "elsewhere": Way({}, only=(CIFAR,))}
    peers = {"NNCF": PeerWay("nncf", "nearest", 4, lacks="8 bits only"), "cle": PeerWay("aimet", "x", 4, only=(CIFAR,))}
    bench = _bench(small)
    bench.effort = replace(bench.effort, peers=small, only=("nearest", "elsewhere", "NNCF", "cle"))
    found = list(bench.lines(Table("", "", ("small",), ways, {}, peers), ["small"]))
    assert [line.way for line in found] == ["float", "nearest", "NNCF"]
    assert found[-1].note == "cannot be had: 8 bits only"


@pytest.mark.parametrize("which", ACCURACY)
def test_every_setting_is_a_recipe(which: str) -> None:
    for way in ACCURACY[which].ways.values():
        overrides = dict(way.overrides)
        backend, recipe = overrides.pop("backend", "onnxruntime"), overrides.pop("recipe", None)
        found, _ = read_recipe(recipe, backend, {**ALL_SAMPLES, **overrides})
        assert found.verify.held_out == 0.0
        assert found.w.quantizer.bit == overrides.get("w_bit", 8)
    assert set(ACCURACY[which].goals) <= set(ACCURACY[which].models)


@pytest.mark.slow
def test_a_child_quantizes_and_says_what_it_cost(small: Path) -> None:
    bench = _bench(small)
    line = bench.ours("small", "nearest", Way({"w_bit": 4, "rounding": "nearest"}))
    assert line.note == "" and line.cost is not None and line.size_mb > 0
    assert line.scores == (1.0, 2.0)
    assert 0 < line.cost.cpu < 60 and line.cost.peak_mb > 20
    assert bench.ours("small", "wrong", Way({"rounding": "magic"}, seeds=2)).note.startswith("fails: ")
    twice = bench.ours("small", "gptq", Way({"w_bit": 4, "rounding": "gptq"}, seeds=2))
    assert twice.way == "gptq, mean of 2 seeds (1.0000 to 1.0000)" and twice.scores == (1.0, 2.0)


def test_losses_of_other_inputs_are_not_compared() -> None:
    ours = {"a": [1.0, 4.0], "b": [2.0, 4.0]}
    assert lowbit_effort.compared(ours, {"a": [1.5, 4.0], "b": [2.0, 4.0]}).startswith("2 of 2: met; largest ÷ 1.000")
    assert "1 of 2: **missed**" in lowbit_effort.compared(ours, {"a": [0.5, 4.0], "b": [2.0, 4.0]})
    with pytest.raises(ValueError, match="same inputs"):
        lowbit_effort.compared(ours, {"a": [1.0, 4.0], "b": [2.0, 5.0]})


def test_both_forms_of_adaround_find_better_codes_than_the_nearest(small: Path) -> None:
    pytest.importorskip("torch")
    recipe, backend = read_recipe(None, "onnxruntime", {"w_bit": 3, "rounding": "adaround"})
    made = prepare(small / "small.onnx", recipe, backend)
    with np.load(small / "small.npz") as held:
        feeds = [{"image": x} for x in held["image"]]
    found = list(lowbit_adaround.cases(made, feeds, None))
    assert [layer.node.op for layer, *_ in found] == ["Conv", "Conv"]
    pairs = [lowbit_adaround.both("small", *case, 200) for case in found]
    assert np.mean([pair.moments.error for pair in pairs]) < 0.95
    assert np.mean([pair.batches.error for pair in pairs]) < 0.95
    for pair in pairs:  # inputs of the first are white noise: there is next to nothing to gain
        assert pair.moments.error < 1 and pair.batches.error < 1.02
        assert pair.sums <= pair.moments.seconds
        assert len(lowbit_adaround.row(pair)) == 10


def test_a_peer_is_told_what_it_cost_apart_from_what_it_prints(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((7, 2), np.float32))
    assert [len(feed["x"]) for feed in measured.feeds({"data": tmp_path / "d.npz", "batch": 3})] == [3, 3]
    script = (
        "import contextlib, sys; from benchmarks.peers import measured\n"
        "with contextlib.redirect_stdout(sys.stderr): measured.tell(lambda: print('noise'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=environments.ROOT
    )
    assert done.stderr == "noise\n"
    assert json.loads(done.stdout).keys() == {"cpu", "wall", "peak_mb"}


class _Pack:
    """As much of the pack as is needed, around one small net."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model_path(self, name: str) -> str:
        return str(self.folder / f"{name}.onnx")

    def load_calib(self, name: str, limit: int | None = None) -> list[dict[str, np.ndarray]]:
        with np.load(self.folder / f"{name}.npz") as held:
            return [{"image": x} for x in held["image"][:limit]]


def _bench(folder: Path) -> Bench:
    return _SmallBench(_Pack(folder), folder, Effort(count=4, peers=None))


class _SmallBench(Bench):
    """Scores that say no more than that a file was evaluated."""

    def scores(self, name: str, path: Path | None) -> tuple[float, ...]:
        assert path is None or onnx.load(str(path)).graph.node
        return (1.0, 2.0)
