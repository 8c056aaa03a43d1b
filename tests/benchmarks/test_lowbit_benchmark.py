"""The benchmark of low bits: its tables, its children, and AdaRound on batches beside what its paper says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.calibration.subjects import save_feeds
from benchmarks.lowbit import adaround as lowbit_adaround
from benchmarks.lowbit.runs import Bench, Effort
from benchmarks.lowbit.ways import ACCURACY, ALL_SAMPLES, Way
from sbonnx.pipeline import prepare
from sbonnx.stages.state import read_recipe

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
