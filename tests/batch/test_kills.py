"""kill -9 at random moments, of workers and of the parent, then the same again: the files of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sbonnx.batch.jobs.batch_plan import BatchRequest
from sbonnx.batch.jobs.job import Places
from sbonnx.batch.process.cleanup import scratch_of
from tests.batch import works

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "sbonnx" / "assets"

SMALL = """
import sys
from pathlib import Path
from sbonnx.batch.api import fulfil
from sbonnx.batch.engine import LocalEngine
from tests.batch.test_kills import small
from tests.batch import works

engine = LocalEngine(3, work=works.work, publish=works.publish)
sys.exit(fulfil(small(Path(sys.argv[1])), engine=engine, publish=works.publish).exit_code)
"""

REAL = """
import sys
from pathlib import Path
from sbonnx.batch.api import batch
sys.exit(batch(Path(sys.argv[1]) / "jobs.yaml", workers=2).exit_code)
"""

JOBS = """
output: out
defaults: {{data: {data}, split: 16, limits: {{retries: 9}}}}
matrix: {{backend: [onnxruntime, virtual], recipe: [a.yaml, b.yaml]}}
jobs:
  - model: one.onnx
  - model: two.onnx
"""
RECIPES = {
    "a": "SAMPLES: 8\nW: {ROUNDING: {TYPE: nearest}}\n",
    "b": "SAMPLES: 8\nW: {ROUNDING: {TYPE: nearest}}\nA: {OBSERVER: {TYPE: percentile}}\n",
}


def small(output: Path) -> BatchRequest:
    """Steps that take moments: 6 of a kind that others wait for, 24 that wait."""
    first = [works.step_of(f"sleep-0.05-c{n}", output, kind="calibrate", retries=99) for n in range(6)]
    rest = [
        works.step_of(f"sleep-0.0{n % 5 + 1}-q{n}", output, after=(first[n % 6].key,), retries=99) for n in range(24)
    ]
    jobs = tuple(step.jobs[0] for step in rest)
    return BatchRequest("kills", Places(output), jobs, jobs, (*first, *rest))


PATIENCE = 600.0
"""Seconds for all kills of a batch, on a busy machine."""


@dataclass
class Killer:
    """Runs a batch again and again, and kills something of it each time it has waited.

    Attributes:
        kills: how often whom.
    """

    command: list[str]
    chance: random.Random
    kills: Counter[str] = field(default_factory=Counter)

    def start(self) -> subprocess.Popen[bytes]:
        """The batch, once more."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            self.command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def torment(self, kills: int, wait: tuple[float, float]) -> None:
        """So many kills, each a random while after the one before, while steps are at work."""
        batch = self.start()
        deadline = time.monotonic() + PATIENCE
        try:
            while self.kills.total() < kills:
                began = time.monotonic()
                assert began < deadline, f"the batch has no more steps and does not end, after {self.kills}"
                while not workers(batch.pid) and batch.poll() is None and time.monotonic() - began < 30:
                    time.sleep(0.005)
                time.sleep(self.chance.uniform(*wait))
                if batch.poll() is not None:
                    assert batch.returncode == 0, (batch.stderr.read() if batch.stderr else b"").decode()
                    return  # all is done: nothing is left to be killed
                whom = "parent" if self.kills.total() % 4 == 1 else "worker"
                if whom == "parent":
                    batch.kill()
                    batch.communicate()
                    self.kills[whom] += 1
                    batch = self.start()  # at once: what the other has left may still be dying
                    continue
                victims = workers(batch.pid)
                if victims:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self.chance.choice(victims).kill()
                        self.kills[whom] += 1
            batch.kill()
            self.kills["parent"] += 1
        finally:
            batch.kill()
            batch.communicate()

    def complete(self) -> None:
        """The same command again, undisturbed."""
        batch = self.start()
        _, said = batch.communicate(timeout=300)
        assert batch.returncode == 0, said.decode()


def workers(parent: int) -> list[psutil.Process]:
    """Processes of steps: below the server of forks, with a group of their own."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(one.pid) == one.pid:
                    found.append(one)
    return found


def hidden(output: Path) -> list[str]:
    """Names of what should not be there in the end."""
    return [
        path.relative_to(output).as_posix()
        for path in output.rglob("*")
        if (path.name.startswith(".") and path.name != ".sbonnx") or path.name.endswith(".tmp")
    ]


def done_attempts(places: Places) -> Counter[str]:
    """How often each step's process came to its end, by the database."""
    db = sqlite3.connect(places.database)
    try:
        return Counter(key for (key,) in db.execute("SELECT key FROM attempts WHERE status = 'done'"))
    finally:
        db.close()


@pytest.mark.slow
def test_small_steps(tmp_path: Path) -> None:
    """All is there, whole, made once; nothing else is."""
    output = tmp_path
    killer = Killer([sys.executable, "-c", SMALL, str(output)], random.Random(2))
    killer.torment(12, (0.0, 0.15))
    killer.complete()
    assert killer.kills["worker"] >= 2
    assert killer.kills["parent"] >= 1
    wished, places = small(output), Places(output)
    steps = wished.steps
    for step in steps:
        if step.kind == "quantize" or Path(step.jobs[0].output).exists():
            assert Path(step.jobs[0].output).read_bytes() == works.content(step)
    assert hidden(output) == []
    ran = Counter((output / "ran.txt").read_text().split())
    assert set(ran) <= {step.key for step in steps}
    assert max(ran.values()) == 1, "made twice"
    assert max(done_attempts(places).values()) == 1, "run twice to the end"
    report = json.loads((output / "report.json").read_text())
    assert [row["outcome"]["status"] for row in report["rows"]] == ["done"] * 24
    assert not scratch_of(places).exists()
    allowed = {"ran.txt", "report.json", "report.html", "report.xml", ".sbonnx"}
    outputs = {f"{step.title}.onnx" for step in steps}
    assert {path.name for path in output.iterdir()} <= allowed | outputs


def place(folder: Path) -> None:
    """A folder with the job file of `JOBS`: the bundled model, and one that differs in its last bias."""
    import onnx

    folder.mkdir()
    model = onnx.load(str(ASSETS / "digits.onnx"))
    onnx.save(model, str(folder / "one.onnx"))
    model.graph.doc_string = "another"
    weight = model.graph.initializer[-1]
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(values * values.dtype.type(1.5), weight.name))
    onnx.save(model, str(folder / "two.onnx"))
    for name, text in RECIPES.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "jobs.yaml").write_text(JOBS.format(data=ASSETS / "digits_calib.npz"))


@pytest.mark.slow
def test_real_jobs(tmp_path: Path) -> None:
    """Eight quantized files of two models, 8 kills: byte for byte those of a run that nobody disturbed."""
    for name in ("calm", "wild"):
        place(tmp_path / name)
    calm = Killer([sys.executable, "-c", REAL, str(tmp_path / "calm")], random.Random(0))
    began = time.monotonic()
    calm.complete()
    took = time.monotonic() - began  # a fast machine is to be killed sooner: all may be done before the fifth
    wild = Killer([sys.executable, "-c", REAL, str(tmp_path / "wild")], random.Random(3))
    wild.torment(8, (0.0, took / 8))
    wild.complete()
    files = sorted(path.name for path in (tmp_path / "calm" / "out").glob("*.onnx"))
    assert len(files) == 8
    assert sorted(path.name for path in (tmp_path / "wild" / "out").glob("*.onnx")) == files
    for name in files:
        ours, theirs = (tmp_path / folder / "out" / name for folder in ("wild", "calm"))
        assert ours.read_bytes() == theirs.read_bytes(), name
    assert hidden(tmp_path / "wild" / "out") == []
    assert max(done_attempts(Places(tmp_path / "wild" / "out")).values()) == 1
    assert wild.kills.total() >= 5, f"{took:.1f} s undisturbed"
