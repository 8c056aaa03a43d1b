"""Branches: decided by values and shapes of inputs and trained where they are taken, else refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

import sbonnx  # noqa: E402
from sbonnx import graph as graphs  # noqa: E402
from sbonnx import pipeline, qat  # noqa: E402
from sbonnx.errors import DataError, ModelError  # noqa: E402
from sbonnx.qat.module import keep_source, origin_of, trainable  # noqa: E402
from sbonnx.stages.state import Request, read_recipe  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import reimport, specialize  # noqa: E402
from tests.qat.sent_back import assert_same_file, constants  # noqa: E402
from tests.support.models import model, residual, run  # noqa: E402

TEXT = """g (float[N,4] x, bool flag) => (float[N,4] y) {
    a = MatMul (x, w0)
    b = If (flag) <
        then_branch = t () => (float[N,4] t2) { t1 = MatMul (a, w1)  t2 = Relu (t1) },
        else_branch = e () => (float[N,4] e2) { e1 = MatMul (a, w2)  e2 = Neg (e1) }
    >
    y = MatMul (b, w3)
}"""
WISHES: dict[str, Any] = {"backend": "virtual", "bits": "w4a8"}


def calibrated(source: Any, feeds: list[dict[str, Any]], **wishes: Any) -> tuple[Any, Any]:
    """(prepared, solution)."""
    recipe, rules = read_recipe(None, wishes.pop("backend"), wishes)
    state = pipeline.solve(Request(source, recipe, rules, data=feeds))
    return state.prepared, state.solution


def module_of(source: Any, feeds: list[dict[str, Any]], **settled: Any) -> Any:
    made = trainable(*calibrated(source, feeds, **WISHES), **settled)
    keep_source(made, source)
    return made


def trained(module: Any, feeds: list[dict[str, Any]], rate: float) -> list[float]:
    """A few steps towards the float network, in place; the loss of each."""
    twin, losses = qat.float_twin(module), []
    optimizer = torch.optim.Adam(module.train().parameters(), rate)
    for feed in feeds * 3:
        given = {name: torch.from_numpy(np.array(value)) for name, value in origin_of(module).feed(feed).items()}
        optimizer.zero_grad()
        with torch.no_grad():
            targets = twin(**given)
        made = module(**given)
        loss = torch.stack([(made[name] - target).square().mean() for name, target in targets.items()]).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    return losses


@pytest.fixture
def branches() -> Any:
    return model(TEXT, w0=(4, 4), w1=(4, 4), w2=(4, 4), w3=(4, 4))


def feeds_with(*flags: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((8, 4)).astype(np.float32), "flag": np.array(flag)} for flag in flags]


@pytest.mark.parametrize(("flag", "taken", "left"), [(True, "w1", "w2"), (False, "w2", "w1")])
def test_the_branch_that_is_taken_is_trained(branches: Any, flag: bool, taken: str, left: str, tmp_path: Path) -> None:
    """Untrained, the file of calibration; trained, the other branch is still that of calibration."""
    both = feeds_with(True, False, True, False)
    feeds = [feed for feed in both if bool(feed["flag"]) == flag]
    sbonnx.quantize(branches, both, output=tmp_path / "calibrated.onnx", verify=False, **WISHES)
    module = module_of(branches, both, fixed={"flag": flag})
    weights = {site.tensor for some in origin_of(module).sites.values() for site in some if site.role == "weight"}
    assert weights == {"w0", taken, "w3"}
    assert not qat.export(module, tmp_path / "begun.onnx", feeds).problems
    assert_same_file(tmp_path / "calibrated.onnx", tmp_path / "begun.onnx")
    trained(module, feeds, 0.01)
    assert not qat.export(module, tmp_path / "trained.onnx", feeds).problems
    before, after = constants(tmp_path / "calibrated.onnx"), constants(tmp_path / "trained.onnx")
    moved = {name for name, value in after.items() if not np.array_equal(value, before[name])}
    assert any(name.startswith(taken) for name in moved), moved
    assert not any(name.startswith(left) for name in moved), moved


def test_the_twin_and_copies_are_settled_likewise(branches: Any) -> None:
    feeds = feeds_with(True, True)
    module = module_of(branches, feeds, fixed={"flag": True}, shapes={"x": ("N", 4)})
    assert origin_of(module).inputs == {"x": "x"}
    x = torch.from_numpy(feeds[0]["x"])
    assert set(qat.float_twin(module)(x=x)) == {"y"}
    assert origin_of(module).feed(feeds[0]).keys() == {"x"}


def test_what_is_not_decided_or_decided_otherwise(branches: Any, tmp_path: Path) -> None:
    feeds = feeds_with(True, False)
    with pytest.raises(ModelError, match=r"the condition 'flag' of node 'If_0' \(If\) is not constant.*fixed="):
        module_of(branches, feeds)
    with pytest.raises(ModelError, match="the model has no input 'mode' to fix; its inputs are x, flag"):
        module_of(branches, feeds, fixed={"mode": True})
    module = module_of(branches, feeds, fixed={"flag": True})
    with pytest.raises(DataError, match="'flag' is fixed to True, but a feed has False: leave such feeds out"):
        qat.export(module, tmp_path / "trained.onnx", feeds)


@pytest.mark.slow
def test_a_voice_detector(pack: Path, tmp_path: Path) -> None:
    """Two rates in one file: the one that is trained goes on from calibration, the other stays float."""
    audio = np.load(pack / "data" / "audio_calib.npz")["X"].astype(np.float32) / 32768
    state = np.zeros((2, 1, 128), np.float32)
    windows = audio[:, : 576 * 8].reshape(-1, 576)[:8, None]
    feeds = [{"input": window, "state": state, "sr": np.array(16000)} for window in windows]
    path = pack / "models" / "silero_vad.onnx"
    sbonnx.quantize(path, feeds, output=tmp_path / "calibrated.onnx", verify=False, **WISHES)
    module = module_of(path, feeds, fixed={"sr": 16000}, shapes={"input": (None, 576)})
    assert len(origin_of(module).sites) >= 10
    assert not qat.export(module, tmp_path / "begun.onnx", feeds).problems
    assert_same_file(tmp_path / "calibrated.onnx", tmp_path / "begun.onnx")
    losses = trained(module, feeds, 1e-4)
    assert sum(losses[-8:]) < sum(losses[:8])
    qat.export(module, tmp_path / "trained.onnx", feeds, verify=False)
    before, after = constants(tmp_path / "calibrated.onnx"), constants(tmp_path / "trained.onnx")
    assert before.keys() == after.keys()
    assert sum(not np.array_equal(value, before[name]) for name, value in after.items()) > 10


NESTED = """g (float[N,T] x, int64 rate) => (float[N,T] y) {
    fast = Equal (rate, limit)
    y = If (fast) <
        then_branch = t () => (float[N,T] a) {
            s = Shape (x)
            t = Gather (s, one)
            long = Equal (t, four)
            a = If (long) <
                then_branch = tt () => (float[N,T] b) { b = Mul (x, w) },
                else_branch = te () => (float[N,T] c) { c = Neg (x) }
            >
        },
        else_branch = e () => (float[N,T] d) { d = Add (x, v) }
    >
}"""


def nested() -> onnx.ModelProto:
    values: dict[str, Any] = {"limit": np.array(16000), "one": np.array(1), "four": np.array(4), "w": 4}
    return model(NESTED, v=np.array([0.5, 1, 2, 3], np.float32), **values)


@pytest.mark.parametrize(("rate", "weights"), [(16000, ["w"]), (8000, ["v"])])
def test_branches_are_decided_by_fixed_inputs(rate: int, weights: list[str]) -> None:
    proto, x = nested(), np.random.default_rng(5).standard_normal((3, 4)).astype(np.float32)
    graph = graphs.load(proto)
    module = reimport(graph, fixed={"rate": rate}, shapes={"x": ("N", 4)})
    assert list(dict(module.named_parameters())) == weights
    assert list(module.meta["sbonnx"]["inputs"].values()) == ["x"]
    want = run(proto, {"x": x, "rate": np.array(rate)})["y"]
    np.testing.assert_allclose(module(torch.from_numpy(x))["y"].detach().numpy(), want, rtol=1e-6)
    assert [tensor.name for tensor in graph.inputs] == ["x", "rate"]  # the graph is as it was


def test_a_branch_that_is_not_decided_is_named() -> None:
    graph = graphs.load(nested())
    with pytest.raises(ModelError, match=r"the condition 'fast' of node 'If_\d' \(If\) is not constant"):
        reimport(graph)
    with pytest.raises(ModelError, match=r"the condition 'long' of node 'If_\d' \(If\) is not constant"):
        reimport(graph, fixed={"rate": 16000})


def test_what_cannot_be_settled() -> None:
    graph = graphs.load(nested())
    with pytest.raises(ModelError, match="the model has no input 'speed' to fix; its inputs are x, rate"):
        specialize(graph, fixed={"speed": 1})
    with pytest.raises(ModelError, match=r"input 'rate' has shape \[\], which does not match \[2\]"):
        specialize(graph, fixed={"rate": [1, 2]})
    plain = graphs.load(residual())
    assert specialize(plain) is plain
