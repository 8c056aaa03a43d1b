"""A solution survives the trip to disk: the file made from the copy is the same, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.errors import ModelError, OutputError
from sbonnx.pipeline import prepare, quantized_graph
from sbonnx.plan import load_solution, save_solution
from sbonnx.stages.state import read_recipe
from tests.support.calibration import calibrate
from tests.support.models import residual


@pytest.mark.parametrize(("backend", "bits"), [("onnxruntime", "w8a8"), ("tensorrt", "w8a8"), ("virtual", "w4a6")])
def test_the_copy_makes_the_same_file(backend: str, bits: str, tmp_path: Path) -> None:
    wishes, rules = read_recipe(None, backend, {"bits": bits})
    prepared = prepare(residual(), wishes, rules)
    feeds = [{"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}]
    solution = calibrate(prepared.graph, prepared.plan, feeds)
    save_solution(solution, tmp_path / "solution.npz")
    copy = load_solution(tmp_path / "solution.npz")
    assert copy.samples == solution.samples == 2
    assert copy.refusals == solution.refusals
    made = [
        graphs.to_proto(quantized_graph(prepared, one)).SerializeToString(deterministic=True)
        for one in (solution, copy)
    ]
    assert made[0] == made[1]


def test_what_is_no_solution_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    for name in ("text.npz", "other.npz", "missing.npz"):
        with pytest.raises(ModelError, match="Calibrate again"):
            load_solution(tmp_path / name)


@pytest.mark.slow
def test_damage_is_refused(tmp_path: Path) -> None:
    wishes, rules = read_recipe(None, "virtual", {})
    prepared = prepare(residual(), wishes, rules)
    file = tmp_path / "solution.npz"
    save_solution(calibrate(prepared.graph, prepared.plan, [{"x": np.ones((1, 3, 8, 8), np.float32)}]), file)
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 4)):
            content[place] = rng.integers(256)
        file.write_bytes(content if rng.integers(4) else content[: rng.integers(len(whole))])
        try:
            load_solution(file)
        except ModelError as error:
            assert "Calibrate again" in str(error)
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("head", ["[]", "3", "{}", '{"format": 1}', '{"format": 1, "keys": [3]}', '{"format": 2}'])
def test_another_head_is_refused(head: str, tmp_path: Path) -> None:
    members: dict[str, Any] = {"sbonnx.json": np.frombuffer(head.encode(), np.uint8)}
    np.savez(tmp_path / "solution.npz", **members)
    with pytest.raises(ModelError, match="Calibrate again"):
        load_solution(tmp_path / "solution.npz")


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    wishes, rules = read_recipe(None, "virtual", {})
    prepared = prepare(residual(), wishes, rules)
    solution = calibrate(prepared.graph, prepared.plan, [{"x": np.ones((1, 3, 8, 8), np.float32)}])
    with pytest.raises(OutputError, match="folder"):
        save_solution(solution, tmp_path / "none" / "solution.npz")
    assert not list(tmp_path.iterdir())
