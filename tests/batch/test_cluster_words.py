"""What a cluster refuses, and where steps go on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbonnx.batch.dask import cluster, cluster_check, cluster_tasks, sharding
from sbonnx.batch.jobs.job import Job, Places, Step, StepLimits
from sbonnx.errors import DeviceError
from tests.batch import works
from tests.batch.clusters import (
    GIB,
    Cluster,
    Seen,
    distributed,
    engine,
)
from tests.support.caching import KEYS, opened, seen


@pytest.mark.slow
def test_steps_go_where_their_resources_are(both: Cluster, tmp_path: Path) -> None:
    """A recipe for CUDA runs on the worker with the GPU, a step that needs more memory than the other has there too."""
    gpu = works.step_of("gpu", tmp_path)
    gpu = replace(gpu, jobs=(replace(gpu.jobs[0], overrides=(("device", "cuda"),)),))
    large = works.step_of("large", tmp_path, memory=GIB + GIB // 2)
    seen = Seen()
    found = engine(both.client).run([gpu, large], Places(tmp_path), seen)
    assert {one.status for one in found.values()} == {"done"}
    assert {where for _, _, where in seen.begun} == {both.address_of("graphic")}
    huge = works.step_of("huge", tmp_path, memory=3 * GIB)
    needs = works.step_of("needs", tmp_path, after=("k-huge",))
    found = engine(both.client).run([huge, needs], Places(tmp_path), Seen())
    assert found["k-huge"].status == "refused" and "no worker has more than" in found["k-huge"].reason
    assert found["k-needs"].status == "skipped"


def test_no_worker_with_a_gpu_is_said() -> None:
    job = Job("j", "m.onnx", None, "onnxruntime", "q.onnx", overrides=(("device", "cuda"),))
    step = Step("k", "quantize", "j", (job,), limits=StepLimits(memory=5))
    wanted, why = cluster_check.needed(step, cluster_check.ClusterResources({"h": 1}, False, None), Path())
    assert wanted == {"GPU": 1} and "start one with --resources 'GPU=1'" in str(why)
    wanted, why = cluster_check.needed(step, cluster_check.ClusterResources({"h": 1}, True, None), Path())
    assert (wanted, why) == ({"GPU": 1}, None)  # nobody says what memory there is: nobody is asked for it


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused(both: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster_tasks.installed()
    monkeypatch.setattr(cluster_check, "installed", lambda: {**found, "onnxruntime": "0.1"})
    with pytest.raises(DeviceError) as caught:
        engine(both.client).run([works.step_of("good", tmp_path)], Places(tmp_path), Seen())
    assert str(caught.value) == (
        f"worker {min(both.client.run(os.getpid))} has onnxruntime {found['onnxruntime']} (here: 0.1): install "
        "the same versions on all workers and here (1 more workers have such a problem)"
    )
    monkeypatch.undo()
    monkeypatch.setattr(cluster, "installed", lambda: {**found, "sbonnx": "9"})  # of a worker that joins later
    late = engine(both.client).run([works.step_of("good", tmp_path)], Places(tmp_path), Seen())
    assert late["k-good"].status == "refused" and "has sbonnx" in late["k-good"].reason


def test_a_file_that_workers_do_not_see_is_said(tmp_path: Path) -> None:
    """Before anything runs, and once; what is not here either is left to its step."""
    model = tmp_path / "m.onnx"
    model.write_bytes(b"x")
    job = Job("j", str(model), "s3://bucket/data", "onnxruntime", str(tmp_path / "gone" / "q.onnx"))
    asked: list[list[str]] = []

    class Client:
        def run(self, function: Any, paths: list[str]) -> dict[str, list[str]]:
            asked.append(paths)
            return {"tcp://a:1": function(paths), "tcp://b:1": [str(model)]}

    with pytest.raises(DeviceError, match=r"worker tcp://b:1 does not see '.*m.onnx': put the inputs of jobs"):
        cluster_check.check_paths(Client(), [job, replace(job, recipe=str(tmp_path / "none.yaml"))], shared=True)
    assert asked == [[str(model)]]


def test_one_worker_that_does_not_see_the_folder_is_enough(tmp_path: Path) -> None:
    """To have what is made travel back; nothing of the question stays."""

    class Client:
        def run(self, function: Any, path: str, word: str) -> dict[str, bool]:
            return {"tcp://a:1": function(path, word), "tcp://b:1": function(path + "-elsewhere", word)}

    places = Places(tmp_path)
    places.state.mkdir()
    assert not cluster_check.is_shared(Client(), places)
    one = Client()
    one.run = lambda function, path, word: {"tcp://a:1": function(path, word)}  # type: ignore[method-assign]
    assert cluster_check.is_shared(one, places)
    assert list(places.state.iterdir()) == []


def test_relative_paths_mean_the_same_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job("j", "m.onnx", "s3://b/d", "onnxruntime", "out/q.onnx", recipe="auto")
    found = cluster_check.absolute(job)
    assert (found.model, found.data, found.output) == (str(tmp_path / "m.onnx"), job.data, str(tmp_path / "out/q.onnx"))
    assert found.recipe == "auto" and cluster_check.absolute(found) == found


def test_no_cluster_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [works.step_of("good", tmp_path)]
    for wrong in ("tcp://127.0.0.1:9", 3):
        with pytest.raises(DeviceError, match=f"there is no scheduler at {wrong!r}"):
            engine(wrong, patience=1.0).run(steps, Places(tmp_path), Seen())
    with pytest.raises(DeviceError, match="at least one shard, got shards=0"):
        engine("tcp://127.0.0.1:9", shards=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"distributed, which is not installed: pip install 'sbonnx\[cluster\]'"):
        engine("tcp://127.0.0.1:9").run(steps, Places(tmp_path), Seen())


@pytest.mark.slow
def test_a_cluster_without_workers_is_said(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    made = Cluster(tmp_path / "cluster")
    try:
        with pytest.raises(DeviceError, match="had no workers for 1 s: start some with 'dask worker"):
            engine(made.client, patience=1.0).run([works.step_of("good", tmp_path)], Places(tmp_path), Seen())
    finally:
        made.close()


@pytest.mark.slow
def test_a_cluster_object_will_do(tmp_path: Path) -> None:
    """Its workers are children of a nanny, which may have none of their own as multiprocessing has it."""
    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=True,
        dashboard_address=":0",
        local_directory=str(tmp_path / "dask"),
    ) as made:
        found = engine(made).run([works.step_of("good", tmp_path)], Places(tmp_path), Seen())
    assert found["k-good"].status == "done" and (tmp_path / "good.onnx").exists()


def test_caches_of_parts_are_merged(tmp_path: Path) -> None:
    """Below any folder; a sketch that a part lacks is left out."""
    parts, place = [tmp_path / "a", tmp_path / "b"], Path("model") / "course"
    for part, keys in zip(parts, (KEYS, KEYS[1:]), strict=True):
        (part / place.parent).mkdir(parents=True)
        opened(part / place).save({key: seen(key) for key in keys})
    sharding.merge_caches(parts, tmp_path / "whole")
    assert set(opened(tmp_path / "whole" / place).load(KEYS)) == set(KEYS[1:])


def test_statistics_of_a_worker_add_to_those_of_the_batch(tmp_path: Path) -> None:
    places = Places(tmp_path / "out")
    (places.state / "sketches").mkdir(parents=True)
    opened(places.state / "sketches" / "m").save({KEYS[0]: seen(KEYS[0])})
    opened(tmp_path / "worker").save({KEYS[1]: seen(KEYS[1])})
    made = {path.name: path.read_bytes() for path in (tmp_path / "worker").iterdir()}
    cluster_tasks.unpack([(f"sketches/{to}/{name}", content) for to in "mn" for name, content in made.items()], places)
    assert set(opened(places.state / "sketches" / "m").load(KEYS)) == set(KEYS[:2])
    assert set(opened(places.state / "sketches" / "n").load(KEYS)) == {KEYS[1]}
    packed = {name for name, _ in cluster_tasks._packed(places)}
    assert len(packed) == 3 + 2 and {f"sketches/{to}/{name}" for to in "mn" for name in made} <= packed


@pytest.mark.parametrize(
    "name",
    [
        "steps/../../../escaped",
        "steps/k/../../../escaped",
        "logs/../escaped",
        "/escaped",
        "escaped",
        "remote/x/fetched.json",
        "state.sqlite",
        "steps/k.lock",
        "steps/.k.12/outcome.json",
        "logs\\..\\..\\escaped",
        "logs/link/escaped",
        "logs/nul\0",
        "steps/k//x",
    ],
)
def test_files_of_a_worker_stay_in_the_state(name: str, tmp_path: Path) -> None:
    """Whatever a worker calls them; nothing of such a parcel is written."""
    places = Places(tmp_path / "out")
    (places.state / "logs").mkdir(parents=True)
    (places.state / "logs" / "link").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DeviceError, match="does not belong to the state of the batch"):
        cluster_tasks.unpack([("logs/good.log", b"x"), (name, b"x")], places)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_worker_that_sends_such_files_costs_its_step(
    both: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(files: Any, places: Places) -> None:
        cluster_tasks.unpack([("../escaped", b"x")] if files and "bad" in str(files) else files, places)

    monkeypatch.setattr(cluster, "is_shared", lambda client, places: False)
    monkeypatch.setattr(cluster, "unpack", unpack)
    steps = [works.step_of("bad", tmp_path), works.step_of("good", tmp_path)]
    found = engine(both.client).run(steps, Places(tmp_path), Seen())
    assert {key: one.status for key, one in found.items()} == {"k-bad": "refused", "k-good": "done"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority and a certificate that it has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl")
    folder = tmp_path_factory.mktemp("tls")
    names = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=node -keyout node.key -out node.csr",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out node.pem",
    )
    for line in names:
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_tls(certificates: Path, tmp_path: Path) -> None:
    """As docs/batch.md says: the settings of Dask are enough, and who has no certificate is not let in."""
    import dask

    settings = {
        "distributed.comm.require-encryption": "true",
        "distributed.comm.tls.ca-file": str(certificates / "ca.pem"),
    }
    for who in ("scheduler", "worker", "client"):
        settings[f"distributed.comm.tls.{who}.cert"] = str(certificates / "node.pem")
        settings[f"distributed.comm.tls.{who}.key"] = str(certificates / "node.key")
    environment = {"DASK_" + key.replace(".", "__").replace("-", "_").upper(): value for key, value in settings.items()}
    with dask.config.set({**settings, "distributed.comm.require-encryption": True}):
        (tmp_path / "cluster").mkdir()
        made = Cluster(tmp_path / "cluster", "--protocol", "tls", environment=environment)
        try:
            made.add("worker")
            assert made.address.startswith("tls://")
            step = works.step_of("good", tmp_path)
            assert engine(made.address).run([step], Places(tmp_path), Seen())[step.key].status == "done"
            nothing = {f"distributed.comm.tls.client.{part}": None for part in ("cert", "key")}
            with dask.config.set(nothing), pytest.raises(DeviceError, match="there is no scheduler at"):
                engine(made.address, patience=5).run([step], Places(tmp_path / "other"), Seen())
        finally:
            made.close()
