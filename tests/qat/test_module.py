"""A calibrated plan as a module, and back: nothing changes on the way but what is trained."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

import sbonnx  # noqa: E402
from sbonnx import pipeline, qat  # noqa: E402
from sbonnx.assets import digits  # noqa: E402
from sbonnx.errors import ModelError, OutputError, RecipeError  # noqa: E402
from sbonnx.planning import Solution  # noqa: E402
from sbonnx.qat.fakequant import FakeQuant  # noqa: E402
from sbonnx.qat.module import keep_source, origin_of, trainable, within_codes  # noqa: E402
from sbonnx.qat.workflow import fixed_batch  # noqa: E402
from sbonnx.quant_model import LifeCycleError  # noqa: E402
from sbonnx.spec import QParams, QuantSpec  # noqa: E402
from sbonnx.stages.state import Prepared, Request, read_recipe  # noqa: E402
from tests.qat.sent_back import assert_same_file, constants  # noqa: E402
from tests.support.models import model, residual  # noqa: E402

MODEL = str(digits().model)
IMAGES = np.load(digits().calib)["image"]
FEEDS = [{"image": IMAGES[at : at + 16]} for at in (0, 16)]


WISHES: dict[str, dict[str, Any]] = {
    "w4a4": {"backend": "virtual", "bits": "w4a4"},
    "w2a2 affine": {"backend": "virtual", "bits": "w2a2", "W.QSCHEME": "per-channel-affine"},
    "weights as floats": {"backend": "virtual", "bits": "w8a8", "WEIGHTS": "qdq"},
    "onnxruntime w8a8": {"backend": "onnxruntime", "bits": "w8a8"},
    "onnxruntime w4a8": {"backend": "onnxruntime", "bits": "w4a8"},
    "tensorrt w8a8": {"backend": "tensorrt", "bits": "w8a8"},
}


@cache
def calibrated(case: str) -> tuple[Prepared, Solution]:
    """A calibration of the bundled network, which is the slow part; it is not changed by what comes after."""
    wishes = dict(WISHES[case])
    recipe, rules = read_recipe(None, wishes.pop("backend"), wishes)
    state = pipeline.solve(Request(MODEL, recipe, rules, data=FEEDS))
    return state.prepared, state.solution


def module_of(case: str, weights: str, activations: str) -> Any:
    module = trainable(*calibrated(case), weights=weights, activations=activations)
    keep_source(module, MODEL)
    return module


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "case"),
    [*(("lsq", case) for case in WISHES), ("lsq+", "w2a2 affine"), ("uniform", "w4a4"), ("dorefa", "w4a4")],
)
def test_untrained_it_goes_back_to_the_file_of_calibration(method: str, case: str, tmp_path: Path) -> None:
    """The same constants bit for bit, codes among them, in a graph of the same nodes."""
    prepared, solution = calibrated(case)
    target = tmp_path / "calibrated.onnx"
    pipeline.write(
        Request(MODEL, prepared.recipe, prepared.backend, output=target, verify=False), prepared, solution, None
    )
    report = qat.export(module_of(case, method, method), tmp_path / "trained.onnx", FEEDS)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    if method != "dorefa":
        assert_same_file(tmp_path / "calibrated.onnx", tmp_path / "trained.onnx")
        return
    expected, found = constants(tmp_path / "calibrated.onnx"), constants(tmp_path / "trained.onnx")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        if value.dtype == np.float32 and value.ndim > 1:
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)  # through tanh and back
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_prepare_and_quantize_calibrate_alike(tmp_path: Path) -> None:
    """From file to file, by the two front doors."""
    wishes = WISHES["onnxruntime w8a8"]
    sbonnx.quantize(MODEL, FEEDS, output=tmp_path / "calibrated.onnx", verify=False, **wishes)
    qat.export(qat.prepare(MODEL, FEEDS, **wishes), tmp_path / "trained.onnx", verify=False)
    assert_same_file(tmp_path / "calibrated.onnx", tmp_path / "trained.onnx")


def spoil(module: Any) -> None:
    """Noise on all weights, a third as large as they are."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if "quantizers." not in name and value.dim() > 1:
                value.add_(0.3 * value.std() * torch.randn(value.shape, generator=random))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("method", "backend"),
    [("lsq", "virtual"), ("lsq+", "virtual"), ("pact", "virtual"), ("dorefa", "virtual"), ("lsq", "onnxruntime")],
)
def test_training_lowers_the_loss_and_the_file_has_what_was_learned(method: str, backend: str, tmp_path: Path) -> None:
    case = "w4a4" if backend == "virtual" else "onnxruntime w4a8"
    module = module_of(case, "dorefa" if method == "pact" else method, method)
    spoil(module)  # calibration leaves nothing to gain in a few steps
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    done = qat.train(module, FEEDS, epochs=12, batch=8, lr=5e-2, quant_lr=2e-3, inner=())
    assert done.losses[-1] < 0.4 * done.losses[0]
    moved = [name for name, value in module.state_dict().items() if not torch.equal(before[name], value)]
    assert any("quantizers." in name for name in moved) or method == "dorefa"
    assert any("quantizers." not in name for name in moved)
    report = qat.export(module, tmp_path / "trained.onnx", FEEDS)
    assert not report.problems
    names = {one.name for one in onnx.load(str(tmp_path / "trained.onnx")).graph.input}
    assert names == {"image"}


def test_copies_share_where_they_come_from() -> None:
    module = qat.prepare(MODEL, FEEDS[:1], bits="w8a8")
    other = copy.deepcopy(module)
    assert origin_of(other) is origin_of(module)
    with torch.no_grad():
        for _, parameter in qat.quant_parameters(other):
            parameter.mul_(2)
    x = torch.from_numpy(FEEDS[0]["image"])
    assert not torch.equal(module(image=x)["scores"], other(image=x)["scores"])


def test_a_scale_that_several_sites_share_is_one_module(tmp_path: Path) -> None:
    """A Concat's inputs have one scale; training moves it for all."""
    text = """agraph (float[n,4,6,6] x) => (float[n,4,6,6] y) {
        a = Relu (x)
        b = Conv <pads = [1,1,1,1]> (a, w1)
        c = Conv <pads = [1,1,1,1]> (a, w2)
        d = Concat <axis = 1> (b, c)
        y = Conv <pads = [1,1,1,1]> (d, w3)
    }"""
    proto = model(text, w1=(4, 4, 3, 3), w2=(4, 4, 3, 3), w3=(4, 8, 3, 3))
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 4, 6, 6)).astype(np.float32)} for _ in range(4)]
    module = qat.prepare(proto, feeds, backend="onnxruntime", bits="w8a8")
    shared = [some for some in origin_of(module).sites.values() if len(some) > 1]
    count = sum(isinstance(one, FakeQuant) for one in module.modules())
    assert count == len(origin_of(module).sites)
    qat.train(module, feeds, epochs=2, batch=4, quant_lr=0.1)
    report = qat.export(module, tmp_path / "q.onnx", feeds)
    assert not report.problems
    for some in shared:
        assert len({site.group for site in some}) == 1


def test_batch_norms_that_were_not_folded(tmp_path: Path) -> None:
    """They are trained and written back, statistics included."""
    text = """agraph (float[n,3,8,8] x) => (float[n,4,8,8] y) {
        a = Conv <pads = [1,1,1,1]> (x, w)
        b = BatchNormalization (a, gamma, beta, mean, var)
        y = Relu (b)
    }"""
    rng = np.random.default_rng(1)
    proto = model(
        text, w=(4, 3, 3, 3), gamma=4, beta=4, mean=4, var=(np.abs(rng.standard_normal(4)) + 0.5).astype(np.float32)
    )
    feeds = [{"x": rng.standard_normal((4, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    module = qat.prepare(proto, feeds, backend="virtual", bits="w4a8", fuse_bn=False)
    qat.train(module, feeds, epochs=3, batch=4, freeze_norms=1.0)
    report = qat.export(module, tmp_path / "q.onnx", feeds)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    before = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    after = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(str(tmp_path / "q.onnx")).graph.initializer}
    for name in ("gamma", "beta", "mean", "var"):
        assert after[name].shape == before[name].shape and not np.array_equal(after[name], before[name]), name


def test_the_float_twin_is_the_float_network() -> None:
    module = module_of("w2a2 affine", "lsq", "lsq")
    twin = qat.float_twin(module)
    assert not twin.training and not any(one.requires_grad for one in twin.parameters())
    from tests.support.models import run

    expected = run(onnx.load(MODEL), FEEDS[0])["scores"]
    found = twin(image=torch.from_numpy(FEEDS[0]["image"]))["scores"].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_begins_within_its_code(symmetric: bool) -> None:
    """Whatever codes a rounding chose: they come back, and weights whose nearest code it is stay as they are."""
    rng = np.random.default_rng(0)
    spec = QuantSpec(bits=4, signed=symmetric, symmetric=symmetric, axis=0)
    zero = np.zeros(3) if symmetric else np.array([3, 7, 12])
    qparams = QParams(np.array([0.1, 0.02, 3.0], np.float32), zero.astype(spec.dtype), spec)
    weight = (rng.standard_normal((3, 50)) * qparams.scale[:, None] * 3).astype(np.float32)
    nearest = qparams.quantize(weight)
    codes = np.clip(nearest.astype(int) + rng.integers(-1, 2, nearest.shape), spec.qmin, spec.qmax).astype(spec.dtype)
    begun = within_codes(weight, codes, qparams)
    np.testing.assert_array_equal(qparams.quantize(begun), codes)
    np.testing.assert_array_equal(begun[codes == nearest], weight[codes == nearest])


@pytest.mark.slow
def test_what_cannot_be_trained_or_written(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="MODE: dynamic has no ranges"):
        qat.prepare(MODEL, FEEDS, mode="dynamic")
    with pytest.raises(RecipeError, match="methods: uniform, lsq"):
        qat.prepare(MODEL, FEEDS, weights="best")
    with pytest.raises(ModelError, match=r"not made by sbonnx\.qat"):
        qat.export(torch.nn.Linear(2, 2), tmp_path / "q.onnx")
    module = qat.prepare(MODEL, FEEDS[:1], bits="w8a8")
    (tmp_path / "there.onnx").write_bytes(b"")
    with pytest.raises(OutputError, match="exists"):
        qat.export(module, tmp_path / "there.onnx")
    assert fixed_batch(origin_of(module).prepared) is None
    assert fixed_batch(
        origin_of(
            qat.prepare(residual(), [{"x": np.linspace(-1, 1, 384, dtype=np.float32).reshape(2, 3, 8, 8)}])
        ).prepared
    ) in (
        None,
        2,
    )


@pytest.mark.slow
def test_the_life_cycle_of_the_ancestor(tmp_path: Path) -> None:
    with sbonnx.QuantModel(MODEL, {"BACKEND": "virtual"}, bits="w4a4", device="cpu") as quant:
        quant.prepare_calibration()
        with pytest.raises(LifeCycleError, match="calc_qparams"):
            quant.init_QAT()
        for feed in FEEDS:
            quant(feed)
        quant.calc_qparams()
        quant.set_quant(w_quant=True, a_quant=True)
        expected = quant(FEEDS[0])["scores"]
        module = quant.init_QAT(activations="pact")
    found = module(image=torch.from_numpy(FEEDS[0]["image"]))["scores"].detach().numpy()
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert not qat.export(module, tmp_path / "q.onnx", FEEDS).problems
