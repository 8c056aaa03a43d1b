"""Modules of `prepare` as torch treats any other: saved, copied, cast, compiled for another device."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sbonnx import qat  # noqa: E402
from sbonnx.assets import digits  # noqa: E402
from sbonnx.qat.module import origin_of  # noqa: E402
from tests.qat.sent_back import assert_same_file, constants  # noqa: E402
from tests.support.models import batchnorm, model  # noqa: E402

MODEL = str(digits().model)
IMAGES = np.load(digits().calib)["image"]
FEEDS = [{"image": IMAGES[at : at + 16]} for at in (0, 16)]
X = torch.from_numpy(FEEDS[0]["image"])


def prepared(**wishes: Any) -> Any:
    return qat.prepare(MODEL, FEEDS, **{"backend": "onnxruntime", "bits": "w8a8", **wishes})


@pytest.fixture
def changed() -> Any:
    """A module that is no longer as it began."""
    module = prepared()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.01)
    return module


@pytest.mark.slow
def test_a_state_dict_loads_into_a_new_module(changed: Any, tmp_path: Path) -> None:
    """By the plain way of torch, without code in the file; and what is exported is the same file."""
    torch.save(changed.state_dict(), tmp_path / "state.pt")
    fresh = prepared()
    assert not torch.equal(fresh(X)["scores"], changed(X)["scores"])
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    assert torch.equal(fresh(X)["scores"], changed(X)["scores"])
    for name, module in (("fresh", fresh), ("changed", changed)):
        qat.export(module, tmp_path / f"{name}.onnx", verify=False)
    assert (tmp_path / "fresh.onnx").read_bytes() == (tmp_path / "changed.onnx").read_bytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_whole(changed: Any, way: str, tmp_path: Path) -> None:
    """They compute the same, are trained alone, and know the graph that they go back into."""
    if way == "torch.save":
        torch.save(changed, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(changed) if way == "deepcopy" else pickle.loads(pickle.dumps(changed))
    assert torch.equal(other(X)["scores"], changed(X)["scores"])
    assert (origin_of(other) is origin_of(changed)) == (way == "deepcopy")
    for name, module in (("other", other), ("changed", changed)):
        qat.export(module, tmp_path / f"{name}.onnx", FEEDS)
    assert (tmp_path / "other.onnx").read_bytes() == (tmp_path / "changed.onnx").read_bytes()
    before = {name: value.clone() for name, value in changed.state_dict().items()}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert all(torch.equal(value, before[name]) for name, value in changed.state_dict().items())
    assert not torch.equal(other(X)["scores"], changed(X)["scores"])


def grown(module: Any, x: Any) -> None:
    """Every parameter gets a gradient of its own type."""
    module.train()(x)["scores"].float().square().mean().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name
        assert bool(torch.isfinite(parameter.grad).all()), name


def test_in_double_precision_and_back(tmp_path: Path) -> None:
    """All of it is computed in float64; what is written is float32, and untrained what calibration found."""
    module = prepared()
    want = module(X)["scores"]
    qat.export(module, tmp_path / "single.onnx", verify=False)
    wide = copy.deepcopy(module).to("cpu", torch.float64)
    assert {one.dtype for one in wide.parameters()} == {torch.float64}
    made = wide(X.double())["scores"]
    assert made.dtype == torch.float64
    same = torch.isclose(made.float(), want, rtol=1e-4, atol=1e-4)
    assert same.double().mean() > 0.7  # an activation on the edge between two integers moves the scores of its sample
    assert (made.float() - want).abs().max() < 0.02 * want.abs().max()
    grown(wide, X.double())
    report = qat.export(wide, tmp_path / "double.onnx", FEEDS)
    assert not report.problems
    assert_same_file(tmp_path / "single.onnx", tmp_path / "double.onnx")
    assert torch.equal(wide.float().eval()(X)["scores"], want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_in_half_precision(kind: Any, tmp_path: Path) -> None:
    """Scales stay float32, and with them the file's; weights are rounded, and so may come out a code away."""
    module = prepared()
    qat.export(module, tmp_path / "single.onnx", verify=False)
    narrow = copy.deepcopy(module).to("cpu", kind)
    scales = {id(one) for _, one in qat.quant_parameters(narrow)}
    assert {one.dtype for one in narrow.parameters() if id(one) in scales} == {torch.float32}
    assert {one.dtype for one in narrow.parameters() if id(one) not in scales} == {kind}
    grown(narrow, X.to(kind))
    narrow.eval()
    assert not qat.export(narrow, tmp_path / "half.onnx", FEEDS, verify=False).problems
    wanted, found = constants(tmp_path / "single.onnx"), constants(tmp_path / "half.onnx")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        away = np.abs(found[name].astype(np.float64) - value.astype(np.float64))
        if value.dtype == np.int8:
            assert away.max() <= 1, name
        elif "scale" in name:
            assert not away.any(), name


def test_mixed_precision_leaves_parameters_alone() -> None:
    """What autocast is for: products in bfloat16, parameters and codes in float32."""
    module = prepared()
    with torch.autocast("cpu", torch.bfloat16):
        grown(module, X)
    assert {one.dtype for one in module.parameters()} == {torch.float32}


def test_export_is_of_what_eval_mode_computes(tmp_path: Path) -> None:
    """A module left in train mode is compared as the file will run, and stays in train mode, statistics and all."""
    text = """agraph (float[n,3,8,8] x) => (float[n,4,8,8] y) {
        a = Conv <pads = [1,1,1,1]> (x, w)
        b = BatchNormalization (a, n_gamma, n_beta, n_mean, n_var)
        y = Relu (b)
    }"""
    rng = np.random.default_rng(1)
    weights: dict[str, Any] = {"w": (4, 3, 3, 3), **batchnorm("n", 4)}
    proto = model(text, **weights)
    feeds = [{"x": rng.standard_normal((4, 3, 8, 8)).astype(np.float32)} for _ in range(2)]
    module = qat.prepare(proto, feeds, backend="virtual", bits="w8a8", fuse_bn=False).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = qat.export(module, tmp_path / "q.onnx", feeds)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.slow
def test_what_wraps_a_module_is_looked_through(tmp_path: Path) -> None:
    module = prepared()
    averaged = torch.optim.swa_utils.AveragedModel(module)
    compiled = torch.compile(module, backend="eager")
    for name, wrapped in (("alone", module), ("averaged", averaged), ("compiled", compiled)):
        assert origin_of(wrapped) is origin_of(module)
        qat.export(wrapped, tmp_path / f"{name}.onnx", FEEDS)
    contents = {path.read_bytes() for path in tmp_path.glob("*.onnx")}
    assert len(contents) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lsq", "lsq+"])
def test_on_a_gpu_as_on_a_cpu(method: str, tmp_path: Path) -> None:
    """Two steps of the same descent, and both files: weights and scales within a part of a code of each other."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    wishes = {"weights": method, "activations": method}
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # 10 bits of products would be another network
    try:
        modules = {device: prepared(device=device, **wishes) for device in ("cpu", "cuda")}
        for device, module in modules.items():
            assert {one.device.type for one in [*module.parameters(), *module.buffers()]} == {device}
            twin, x = qat.float_twin(module, device=device), X.to(device)
            optimizer = torch.optim.SGD(module.train().parameters(), 1e-3)
            for _ in range(2):
                optimizer.zero_grad()
                qat.distillation(module(x), twin(x)).backward()
                optimizer.step()
            report = qat.export(module.eval(), tmp_path / f"{device}.onnx", FEEDS)
            assert not [one for one in report.problems if "differs from that of the module" in one]
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
    on_cpu, on_gpu = (constants(tmp_path / f"{device}.onnx") for device in modules)
    assert on_cpu.keys() == on_gpu.keys()
    for name, value in on_cpu.items():
        if value.dtype.kind in "iu":  # codes: a weight that lies between two may go to either
            away = np.abs(value.astype(np.int64) - on_gpu[name].astype(np.int64))
            assert away.max(initial=0) <= 1 and (away > 0).mean() < 0.01, name
        else:
            np.testing.assert_allclose(on_gpu[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
