"""One measurement serves several budgets: cached in the folder of the calibration cache, and shared in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.batch.jobs.job import Job, Places
from sbonnx.batch.jobs.steps import steps_of
from sbonnx.batch.work import run_step
from sbonnx.pruning.float_pass import float_moments
from tests.pruning.test_prune import feeds, inverted
from tests.support.values import some

BUDGETS = (0.85, 0.7, 0.6)


def quiet(stage: str, done: int = 0, total: int | None = None) -> None:
    """Nobody listens."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model, data = tmp_path / "m.onnx", tmp_path / "d.npz"
    graphs.save(inverted(), model)
    np.savez(data, x=np.concatenate([feed["x"] for feed in feeds(40)]))
    return model, data


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry with each pass over the data that pruning measures."""
    passes: list[int] = []

    def counted(*arguments: Any) -> Any:
        passes.append(1)
        return float_moments(*arguments)

    monkeypatch.setattr("sbonnx.pruning.graph_pruning.float_moments", counted)
    return passes


@pytest.mark.slow
def test_budgets_share_a_measurement_in_the_cache(
    files: tuple[Path, Path], tmp_path: Path, measured: list[int]
) -> None:
    cache = tmp_path / "cache"
    plain = [sbonnx.quantize(*files, split=1, recipe={"SPARSE": {"BUDGET": {"MACS": share}}}) for share in BUDGETS]
    assert len(measured) == 3
    cached = [
        sbonnx.quantize(*files, split=1, cache=cache, recipe={"SPARSE": {"BUDGET": {"MACS": share}}})
        for share in BUDGETS
    ]
    assert len(measured) == 4
    assert [one.quantized for one in cached] == [one.quantized for one in plain]
    assert len({tuple(row.after for row in some(one.pruning).dimensions) for one in cached}) > 1
    # a damaged file is measured again, with the same result
    (file,) = (cache / "pruning").glob("*.json")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"0.", b"1.", 1))
    again = sbonnx.quantize(*files, split=1, cache=cache, recipe={"SPARSE": {"BUDGET": {"MACS": BUDGETS[0]}}})
    assert len(measured) == 5
    assert again.quantized == plain[0].quantized
    assert file.read_bytes() == content
    # the same folder without SPARSE, other data and another order of removal
    sbonnx.quantize(*files, split=1, cache=cache)
    sbonnx.prune(*files, split=1, macs=0.7, strategy="output", cache=cache)
    assert len(measured) == 6
    assert len(list((cache / "pruning").glob("*.json"))) == 2


@pytest.mark.slow
def test_a_batch_measures_once_for_three_budgets(files: tuple[Path, Path], tmp_path: Path, measured: list[int]) -> None:
    model, data = map(str, files)
    jobs = [
        Job(
            f"j{number}",
            model,
            data,
            "onnxruntime",
            str(tmp_path / f"o{number}.onnx"),
            split=1,
            overrides=(("SPARSE.BUDGET.MACS", str(share)),),
        )
        for number, share in enumerate(BUDGETS)
    ]
    places = Places(tmp_path)
    steps = steps_of(jobs, places.state)
    assert [step.kind for step in steps] == ["calibrate", "quantize", "quantize", "quantize"]
    outcomes = [run_step(step, places, quiet) for step in steps]
    assert [outcome.status for outcome in outcomes] == ["done"] * 4, outcomes
    assert len(measured) == 1
    for number, share in enumerate(BUDGETS):
        alone = tmp_path / f"alone{number}.onnx"
        sbonnx.quantize(model, data, split=1, output=alone, recipe={"SPARSE": {"BUDGET": {"MACS": share}}})
        assert alone.read_bytes() == (tmp_path / f"o{number}.onnx").read_bytes()
