"""The machine fails at any moment: what is written is whole or absent, and the next run gives the same bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fuzz import seeds
from tests.fuzz.datafiles import good_npz
from tests.fuzz.harness import Zygote, state

QUANTIZE: Final = ("quantize", "m.onnx", "--data", "d.npz", "--split", "1", "-o", "out/q.onnx", "--force", "-q")
CACHED: Final = (*QUANTIZE, "--cache", "kept")
JOBS: Final = (
    "output: out\n"
    "defaults: {data: d.npz, split: 1, backend: [onnxruntime, tensorrt], set: {kernel_costs: none}}\n"
    "jobs:\n  - model: m.onnx\n"
)
BATCH: Final = ("batch", "j.yaml", "-q", "--workers", "1")


class Bench:
    """A folder with a model and data, in which command lines run."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder, self.logs, self.zygote = folder / "case", folder / "logs", zygote
        (self.folder / "out").mkdir(parents=True)
        (self.logs / "tmp").mkdir(parents=True)
        (self.folder / "m.onnx").write_bytes(seeds.seed("residual"))
        (self.folder / "d.npz").write_bytes(good_npz(8))
        (self.folder / "j.yaml").write_text(JOBS)
        self.inputs = state(self.folder)

    def run(self, argv: Sequence[str], **limits: Any) -> dict[str, Any]:
        """Run a command line. What it says is in `said`."""
        for name in ("out", "err", "ended"):
            (self.logs / name).unlink(missing_ok=True)
        reply = self.zygote.ask(self.folder, self.logs, argv, **limits)
        now = state(self.folder)
        assert {name: now.get(name) for name in self.inputs} == self.inputs
        return reply

    @property
    def said(self) -> str:
        return (self.logs / "err").read_text()

    def content(self, name: str = "out/q.onnx") -> bytes | None:
        """The bytes of an output; None where there is none."""
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def left(self, *known: str) -> list[str]:
        """Files in the folder and among the temporary files, except the inputs and `known`."""
        own = [name for name in state(self.folder) if name not in self.inputs and not name.startswith(known)]
        return own + sorted(path.name for path in (self.logs / "tmp").iterdir())


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as server:
        yield server


@pytest.fixture
def bench(tmp_path: Path, zygote: Zygote) -> Bench:
    return Bench(tmp_path, zygote)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [QUANTIZE, CACHED], ids=["plain", "cached"])
def test_killed_at_random_moments(argv: tuple[str, ...], bench: Bench) -> None:
    """`tests/graph/test_temporary.py` kills at each line of the code that makes and removes temporary folders."""
    whole = bench.run(argv)
    assert whole["code"] == 0, bench.said
    good = bench.content()
    bench.run(argv)
    rng = random.Random(7)
    killed = 0
    for _ in range(8):
        (bench.folder / "out" / "q.onnx").unlink(missing_ok=True)
        killed += bench.run(argv, seconds=rng.uniform(0, whole["seconds"]))["hung"]
        assert bench.content() in (None, good)
    assert killed >= 3
    assert bench.run(argv)["code"] == 0, bench.said
    assert bench.content() == good
    assert bench.left("out/q.onnx", "kept") == []


@pytest.mark.slow
def test_a_full_disk(bench: Bench) -> None:
    assert bench.run(QUANTIZE)["code"] == 0, bench.said
    good = bench.content()
    assert good is not None
    for size in (4096, len(good) - 1):  # the line on stderr is written to a file as well
        assert bench.run(QUANTIZE, file_size=size)["code"] == 2
        assert len(bench.said.splitlines()) == 1 and "internal error" not in bench.said, bench.said
        assert bench.content() == good
        assert bench.left("out/q.onnx") == []


@pytest.mark.slow
def test_two_at_once(bench: Bench) -> None:
    """One model, one cache, one output: both end well, and the output is that of either."""
    assert bench.run(CACHED)["code"] == 0, bench.said
    good, codes = bench.content(), []
    with Zygote() as other:
        second = Bench.__new__(Bench)
        second.__dict__.update(bench.__dict__, zygote=other, logs=bench.logs.with_name("logs2"))
        (second.logs / "tmp").mkdir(parents=True)
        for _ in range(3):
            threads = [
                threading.Thread(target=lambda one=one: codes.append(one.run(CACHED)["code"]))
                for one in (bench, second)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert bench.content() == good
    assert codes == [0] * 6, (bench.said, second.said)
    assert bench.left("out/q.onnx", "kept") == []


def damage(path: Path, rng: random.Random) -> None:
    """Flip bytes of a file, cut it off, or empty it."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "flip", "cut", "empty"))
    if kind == "flip" and data:
        for _ in range(rng.choice((1, 8))):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    path.write_bytes(bytes(data if kind == "flip" else data[: len(data) // 2] if kind == "cut" else b""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "below", "output", "times"),
    [(CACHED, "kept", "out/q.onnx", 8), (BATCH, "out/.sbonnx", "out/m-onnxruntime.onnx", 3)],
    ids=["cache", "batch"],
)
def test_damaged_state(argv: tuple[str, ...], below: str, output: str, times: int, bench: Bench) -> None:
    """A run ends with the same bytes, or with one line after which the state can be removed."""
    assert bench.run(argv)["code"] == 0, bench.said
    good = bench.content(output)
    assert good is not None
    rng = random.Random(3)
    for _ in range(times):
        files = sorted(path for path in (bench.folder / below).rglob("*") if path.is_file())
        for path in rng.sample(files, min(len(files), rng.choice((1, 3)))):
            damage(path, rng)
        reply = bench.run(argv)
        assert "internal error" not in bench.said and "Traceback" not in bench.said, bench.said
        if reply["code"] == 0:
            assert bench.content(output) == good
        else:
            assert reply["code"] == 2 and len(bench.said.splitlines()) == 1, (reply, bench.said)
