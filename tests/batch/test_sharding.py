"""A calibration cut into shards of samples gives bit for bit what one process gives."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.batch.dask import sharding
from sbonnx.batch.jobs.job import Job, Places, Step
from sbonnx.batch.jobs.steps import steps_of
from sbonnx.batch.work import run_step
from sbonnx.calib.cache.sketch_cache import CalibrationCache
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.engine.runner import settings
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.shared_calibration import CalibrationTask
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import NumericError
from sbonnx.options import RunOptions
from sbonnx.pipeline import prepare
from sbonnx.planning.types import Plan, Site, Solution
from sbonnx.progress import JsonLines, Progress, Silent
from sbonnx.stages.state import Prepared, read_recipe
from tests.support.caching import complete
from tests.support.calibration import calibrate
from tests.support.sample_count import SampleCount

ASSETS = Path(__file__).resolve().parents[2] / "sbonnx" / "assets"
MODEL, DATA = ASSETS / "digits.onnx", ASSETS / "digits_calib.npz"


def prepared_for(**overrides: Any) -> Prepared:
    wishes, rules = read_recipe(None, None, overrides)
    return prepare(MODEL, wishes, rules)


def data_of(prepared: Prepared, limit: int = 24, split: int | None = None) -> Any:
    with np.load(DATA) as held:
        feeds = {name: held[name][:limit] for name in held.files}
    return read(feeds, prepared.graph, split=split)


def sites_of(plan: Plan) -> list[Site]:
    """The sites whose ranges are measured."""
    return [site for site in plan.of_role("activation") if site.fixed is None]


def observe(
    prepared: Prepared, data: Dataset, shard: sharding.Shard, progress: Progress, threads: int = 1
) -> dict[Key, Sketch]:
    sites = {(site.tensor, site.spec.axis): site for site in sites_of(prepared.plan)}
    options = RunOptions(threads=threads, progress=progress)
    samples = Samples.of(data, prepared.graph, options)
    return shard(CalibrationTask("task", prepared.graph, sites), sites, samples)


def merged_shards(prepared: Prepared, data: Dataset, of: int) -> tuple[dict[Key, Sketch], list[int]]:
    """Merged sketches of all shards, the last shard first, and their numbers of samples."""
    counts = [SampleCount() for _ in range(of)]
    parts = [
        observe(prepared, data, sharding.Shard(number, of), counts[number], threads=1 + number % 2)
        for number in range(of)
    ]
    whole = parts.pop()
    for part in reversed(parts):
        assert part.keys() == whole.keys()
        for key, sketch in part.items():
            whole[key].merge(sketch)
    return whole, [count.samples for count in counts]


def assert_same(one: Solution, two: Solution) -> None:
    assert one.qparams.keys() == two.qparams.keys() and one.qparams
    for key, own in one.qparams.items():
        other = two.qparams[key]
        assert own.scale.tobytes() == other.scale.tobytes() and own.zero_point.tobytes() == other.zero_point.tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_merged_shards_are_the_sketches_of_one_process(of: int, tmp_path: Path) -> None:
    """Every array of every sketch, places of samples included; in any order of merging."""
    prepared = prepared_for()
    data = data_of(prepared)
    merged, samples = merged_shards(prepared, data, of)
    assert samples == [len(range(n, 24, of)) for n in range(of)]
    with Calibrator(prepared.graph, prepared.plan, RunOptions(cache=tmp_path / "cache")) as alone:
        alone.observe_all(Samples.of(data, prepared.graph))
        expected = alone.sketches()
    assert merged.keys() == expected.keys() and len(merged) > 3
    for key, sketch in expected.items():
        mine, theirs = merged[key].to_arrays(), sketch.to_arrays()
        assert mine.keys() == theirs.keys() and "track" in mine
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine), key


@pytest.mark.sampled(2)
@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse", "kl_histogram", "moving_average", "aciq"])
def test_from_shards_in_a_cache_come_the_same_scales(
    observer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration over the cache then runs nothing, and its scales are those without shards and without a cache."""
    prepared = prepared_for(**{"a.observer.type": observer})
    data = data_of(prepared)
    expected = calibrate(prepared.graph, prepared.plan, data)
    merged, _ = merged_shards(prepared, data, 3)
    CalibrationCache(tmp_path / "cache", prepared.graph, data, settings("cpu")).save(merged)
    monkeypatch.setattr("sbonnx.calib.engine.observation.Observation.stream", _never)
    assert_same(expected, calibrate(prepared.graph, prepared.plan, data, cache=tmp_path / "cache"))


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the float model ran though all was known")


def test_batches_of_any_size(tmp_path: Path) -> None:
    prepared = prepared_for()
    whole, _ = merged_shards(prepared, data_of(prepared), 2)
    cut, _ = merged_shards(prepared, data_of(prepared, split=5), 3)
    for key, sketch in whole.items():
        mine, theirs = sketch.to_arrays(), cut[key].to_arrays()
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


def test_more_shards_than_samples() -> None:
    prepared = prepared_for()
    data = data_of(prepared, limit=2)
    merged, samples = merged_shards(prepared, data, 4)
    assert samples == [1, 1, 0, 0]
    expected = calibrate(prepared.graph, prepared.plan, data)
    bounds = {site.key: merged[site.tensor, site.spec.axis] for site in sites_of(prepared.plan)}
    assert all(sketch.samples == 2 for sketch in bounds.values()) and expected.samples == 2


def test_progress_counts_every_feed_once_a_shard() -> None:
    prepared = prepared_for()
    stream = io.StringIO()
    progress = JsonLines(stream)
    observe(prepared, data_of(prepared, split=4), sharding.Shard(1, 2), progress)
    progress.close()
    assert json.loads(stream.getvalue().splitlines()[-1])["done"] == 6


def test_a_sample_that_is_not_finite_is_refused_by_its_shard_alone() -> None:
    prepared = prepared_for()
    data = data_of(prepared)
    huge = np.concatenate([feed[data.inputs[0].name] for feed in data])
    huge[5] = 3e38
    broken = read({data.inputs[0].name: huge}, prepared.graph)
    count = SampleCount()
    observe(prepared, broken, sharding.Shard(0, 2), count)
    assert count.samples == 12
    with pytest.raises(NumericError, match="sample 5"):
        observe(prepared, broken, sharding.Shard(1, 2), Silent())


def test_what_cannot_be_cut_says_why() -> None:
    def why(**overrides: Any) -> str:
        return str(sharding.shardable(read_recipe(None, None, overrides)[0]))

    assert why() == "None"
    assert "holds out" in why(max_loss="1%")
    assert "one store" in why(**{"calibration.granularity": "layer"})
    assert "equalization" in why(**{"equalize.smooth_quant": True})
    assert "state feedback" in why(**{"calibration.feedback": {"h_out": "h_in"}})


def test_a_shard_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no shard 2 of 2"):
        sharding.Shard(2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar_resnet20", "silero_vad"])
def test_a_calibrate_step_of_a_real_model_in_parts(name: str, pack: Path, tmp_path: Path) -> None:
    """Three targets of two opsets; the second model has branches. The caches have the same rows,
    whether one process filled them or three parts were merged, and every sample ran once.
    """
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    evaluation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evaluation)
    data = tmp_path / "data"
    data.mkdir()
    for number, feed in enumerate(evaluation.load_calib(name, batch=1, limit=12)):
        np.savez(data / f"{number:03d}.npz", **feed)

    def step_in(place: str) -> tuple[Step, Places]:
        places = Places(tmp_path / place)
        rows = [("onnxruntime", "w8a8"), ("onnxruntime", "w4a8"), ("tensorrt", "w8a8")]
        jobs = [
            Job(f"{to}-{bits}", str(evaluation.model_path(name)), str(data), to, f"{to}-{bits}.onnx", None, None, over)
            for to, bits in rows
            for over in [(("bits", bits),)]
        ]
        return steps_of(jobs, places.state)[0], places

    step, places = step_in("alone")
    alone = run_step(step, places, _quiet, 1)
    assert (alone.status, alone.counters["runs"]) == ("done", 12)
    expected = complete(places.state / "sketches")
    step, places = step_in("parts")
    keys = sharding.part_keys(step.key, 3)
    for number, key in enumerate(keys):
        part = sharding.run_part(replace(step, key=key), places, _quiet, 1, shard=sharding.Shard(number, 3))
        assert (part.status, part.counters["runs"]) == ("done", 4)
    whole = sharding.run_merged(step, places, _quiet, 1, parts=keys)
    assert (whole.status, whole.counters["runs"]) == ("done", 12)
    assert complete(places.state / "sketches") == expected and len(expected) >= 2


def _quiet(stage: str, done: int = 0, total: int | None = None) -> None:
    """Says nothing."""
