"""A network inside the branches of an If: quantized where the data reaches, refused with a reason elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.recipe.keywords import BackendForm
from sbonnx.spec import Array
from tests.support.models import run


@pytest.fixture
def feeds(pack: Path) -> list[dict[str, Array]]:
    """Windows of the pack's audio at 16 kHz, with a fresh state each."""
    audio = np.load(pack / "data" / "audio_calib.npz")["X"].astype(np.float32) / 32768
    windows = audio[:, : 576 * 8].reshape(-1, 576)[:32]
    state = np.zeros((2, 1, 128), np.float32)
    return [{"input": window[None], "state": state, "sr": np.array(16000)} for window in windows]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_the_branch_that_ran_is_quantized_and_the_other_refused(
    backend: BackendForm, pack: Path, feeds: list[dict[str, Array]], tmp_path: Path
) -> None:
    path = tmp_path / "vad.onnx"
    report = sbonnx.quantize(pack / "models" / "silero_vad.onnx", feeds, backend=backend, output=path)
    assert report.ok, report.problems
    made = graphs.load(path)
    scopes = {scope: body for scope, body in graphs.query.scopes(made) if scope}
    ops = {scope: [node.op for node in body.nodes] for scope, body in scopes.items()}
    inside = {scope for scope, kinds in ops.items() if "QuantizeLinear" in kinds}
    assert inside, "no pair inside a branch"
    never = [refusal for refusal in report.refusals if "never ran" in refusal.why]
    assert never, "the 8 kHz branch must be refused by name"
    lstm = any("DynamicQuantizeLSTM" in kinds for kinds in ops.values())  # on CPUs with exact 8-bit products
    assert lstm != any(refusal.why.startswith("LSTM") for refusal in report.refusals)
    assert not lstm or backend == "onnxruntime"
    convs = [node for body in scopes.values() for node in body.nodes if node.op == "Conv"]
    assert convs
    assert qdq.read(made)


def test_it_runs_at_every_level_at_both_rates(pack: Path, feeds: list[dict[str, Array]], tmp_path: Path) -> None:
    path = tmp_path / "vad.onnx"
    sbonnx.quantize(pack / "models" / "silero_vad.onnx", feeds, output=path)
    reference = str(pack / "models" / "silero_vad.onnx")
    slow = {**feeds[0], "input": feeds[0]["input"][:, :288], "sr": np.array(8000)}
    for level in ("off", "all"):
        for feed in (feeds[3], slow):
            expected, found = run(reference, feed, level=level), run(str(path), feed, level=level)
            assert np.abs(expected["output"] - found["output"]).max() < 0.2
    assert len(onnx.load(str(path)).graph.input) == 3


@pytest.mark.slow
def test_one_recording_with_its_state(pack: Path, tmp_path: Path) -> None:
    """Windows in a row, the state led back: ranges over real states are wider than over zeros alone."""
    audio = np.load(pack / "data" / "audio_calib.npz")["X"].astype(np.float32) / 32768
    feeds = [{"input": row[None], "sr": np.array(16000)} for row in audio[0, : 576 * 24].reshape(-1, 576)]
    path = pack / "models" / "silero_vad.onnx"
    report = sbonnx.quantize(path, feeds, output=tmp_path / "vad.onnx", feedback={"stateN": "state"})
    assert report.ok, report.problems
    assert report.counts.samples == 24
    by_hand, state = [], np.zeros((2, 1, 128), np.float32)
    for feed in feeds:
        by_hand.append({**feed, "state": state})
        state = run(str(path), by_hand[-1], level="all")["stateN"]
    expected = sbonnx.quantize(path, by_hand, output=tmp_path / "by_hand.onnx")
    found = {row.tensor: row.scale for row in report.layers}
    wanted = {row.tensor: row.scale for row in expected.layers}
    assert found.keys() == wanted.keys()
    assert all(found[name] == pytest.approx(wanted[name], rel=1e-4) for name in wanted)
