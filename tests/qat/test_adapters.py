"""Low-rank adapters: what is trained, what it computes, and what of it reaches the file."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")

from sbonnx import qat  # noqa: E402
from sbonnx.assets import digits  # noqa: E402
from sbonnx.errors import ModelError, RecipeError  # noqa: E402
from sbonnx.qat.lora import LowRank, low_ranks  # noqa: E402
from sbonnx.qat.module import float_twin, origin_of, weight_parameter  # noqa: E402
from sbonnx.qat.workflow import learned  # noqa: E402
from sbonnx.spec import Array  # noqa: E402
from sbonnx.training.loop import _optimizer  # noqa: E402
from tests.support.models import model, run  # noqa: E402

MODEL = str(digits().model)
IMAGES = np.load(digits().calib)["image"]
FEEDS = [{"image": IMAGES[at : at + 16]} for at in (0, 16)]

LAYERS = """agraph (float[n,6,9,8] x) => (float[n,5] y) {
    a = Conv <strides = [2,1], pads = [1,0,1,1]> (x, w3, b3)
    b = Relu (a)
    c = Conv (b, w1)
    d = Conv <group = 3, pads = [1,1,1,1]> (c, wg)
    e = Relu (d)
    f = GlobalAveragePool (e)
    g = Flatten (f)
    h = MatMul (g, wm)
    i = Relu (h)
    j = Gemm <transB = 1, alpha = 0.5> (i, wt, bt)
    k = Relu (j)
    y = Gemm (k, wn)
}"""
"""Each kind of layer; a group of 4 channels in the third convolution."""

WEIGHTS: dict[str, Any] = {
    "w3": (12, 6, 3, 3),
    "b3": 12,
    "w1": (12, 12, 1, 1),
    "wg": (12, 4, 3, 3),
    "wm": (12, 10),
    "wt": (9, 10),
    "bt": 9,
    "wn": (9, 5),
}
PLAIN: dict[str, Any] = {"backend": "virtual", "BIAS_CORRECTION": "none"}  # the network has no other constants then
GEMM_ALPHA = 0.5
MATRICES = ("w3", "w1", "wg", "wm", "wt", "wn")
UNGROUPED = ("w3", "w1", "wm", "wt", "wn")


def layers() -> tuple[onnx.ModelProto, list[dict[str, Array]]]:
    """The model, and data for it."""
    rng = np.random.default_rng(3)
    proto = model(LAYERS, **WEIGHTS)
    return proto, [{"x": rng.standard_normal((4, 6, 9, 8)).astype(np.float32)} for _ in range(4)]


def prepared(bits: str = "w4a8", **wishes: Any) -> tuple[Any, Any, list[dict[str, Array]]]:
    """Module, model and data."""
    proto, feeds = layers()
    adapters = qat.Adapters(**{"rank": 2, **wishes})
    return qat.prepare(proto, feeds, bits=bits, adapters=adapters, **PLAIN), proto, feeds


def outputs(module: Any, feed: dict[str, Array]) -> Array:
    """What the module gives for its first output."""
    with torch.no_grad():
        found: Array = next(iter(module(**{name: torch.from_numpy(value) for name, value in feed.items()}).values()))
    return np.asarray(found)


def stirred(module: Any, size: float = 3e-4) -> None:
    """In place. Products that change the codes."""
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for adapter in low_ranks(module).values():
            adapter.B.copy_(size * torch.randn(adapter.B.shape, generator=chance))


def weights_of(path: Path) -> dict[str, Array]:
    """Initializers of a file."""
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(str(path)).graph.initializer}


@pytest.mark.parametrize("mode", ["inside", "outside"])
def test_it_begins_where_calibration_ended(mode: Any) -> None:
    module, proto, feeds = prepared(mode=mode)
    plain = qat.prepare(proto, feeds, bits="w4a8", **PLAIN)
    assert set(low_ranks(module)) == set(MATRICES if mode == "inside" else UNGROUPED)
    np.testing.assert_array_equal(outputs(module, feeds[0]), outputs(plain, feeds[0]))


@pytest.mark.slow
def test_the_untrained_file_is_that_of_calibration(tmp_path: Path) -> None:
    for name, adapters in (("plain", None), ("adapted", 4)):
        module = qat.prepare(MODEL, FEEDS, backend="onnxruntime", bits="w4a8", adapters=adapters)
        qat.export(module, tmp_path / f"{name}.onnx", verify=False)
    assert (tmp_path / "plain.onnx").read_bytes() == (tmp_path / "adapted.onnx").read_bytes()


@pytest.mark.parametrize("name", MATRICES)
def test_inside_is_the_layer_with_the_sum_as_its_weight(name: str) -> None:
    """Against torch: the product, folded by hand into the float model's weight, in the layout of each layer."""
    module, _, _ = prepared(targets=name)
    stirred(module)
    (adapter,) = low_ranks(module).values()
    weight = module.get_parameter(name)
    rows = torch.einsum("or,ri->oi", adapter.unit * adapter.B, adapter.A).detach().numpy()
    outputs_last = name in ("wm", "wn")
    expected = weight.detach().numpy() + (rows.T if outputs_last else rows.reshape(weight.shape))
    np.testing.assert_allclose(adapter(weight).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    magnitude = weight.detach().abs().numpy()
    per_output = magnitude.mean(axis=0) if outputs_last else magnitude.reshape(len(magnitude), -1).mean(axis=1)
    np.testing.assert_allclose(adapter.unit.numpy()[:, 0], 1000 * per_output, rtol=1e-5)  # alpha is the rank


@pytest.mark.parametrize("name", UNGROUPED)
def test_outside_is_the_layer_with_a_branch(name: str) -> None:
    """With all rounding off, the network is the float network with the product added to one weight: onnxruntime's."""
    module, proto, feeds = prepared(targets=name, mode="outside", alpha=1.0)
    stirred(module)
    for part in module.modules():
        if hasattr(part, "enabled"):
            part.enabled = False
    (adapter,) = low_ranks(module).values()
    for one in proto.graph.initializer:
        values = module.get_parameter(one.name).detach()
        if one.name == name:
            values = values + adapter.product(values).detach()
        values = values / GEMM_ALPHA if one.name == "wt" else values  # preparation has folded it into the weight
        one.CopyFrom(numpy_helper.from_array(values.numpy(), one.name))
    expected = run(proto, feeds[0])["y"]
    np.testing.assert_allclose(outputs(module, feeds[0]), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "bits", "falls"), [("virtual", "w2a8", 0.8), ("onnxruntime", "w4a8", 2.0)])
def test_training_moves_adapters_and_the_file_has_the_codes_of_the_module(
    backend: str, bits: str, falls: float, tmp_path: Path
) -> None:
    """At 2 bits there is much to learn; at 4 nearly nothing, and nothing is broken."""
    feeds = [{"image": IMAGES}]
    module = qat.prepare(MODEL, feeds, backend=backend, bits=bits, rounding="nearest", adapters=4)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    done = qat.train(module, feeds, epochs=5, batch=16)
    assert done.losses[-1] < falls * done.losses[0]
    moved = {name for name, value in module.named_parameters() if not torch.equal(before[name], value)}
    assert moved <= trained and any(name.endswith(".B") for name in moved)
    report = qat.export(module, tmp_path / "inside.onnx", FEEDS)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    given = outputs(module, FEEDS[0])
    assert all(one.changed == 0.0 for one in qat.merge(module))
    np.testing.assert_array_equal(outputs(module, FEEDS[0]), given)
    assert not low_ranks(module) and "adapters" not in module.code
    assert all(one.requires_grad for one in module.parameters())
    qat.export(module, tmp_path / "merged.onnx", verify=False)
    assert (tmp_path / "inside.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()


@pytest.mark.slow
def test_the_file_is_of_the_structure_of_calibration(tmp_path: Path) -> None:
    module = qat.prepare(MODEL, FEEDS, bits="w4a8", adapters=4)
    qat.export(module, tmp_path / "start.onnx", verify=False)
    stirred(module, 1e-3)
    qat.export(module, tmp_path / "end.onnx", verify=False)
    start, end = (onnx.load(str(tmp_path / name)).graph for name in ("start.onnx", "end.onnx"))
    assert list(start.node) == list(end.node)
    first, last = weights_of(tmp_path / "start.onnx"), weights_of(tmp_path / "end.onnx")
    assert {name: (one.shape, one.dtype) for name, one in first.items()} == {
        name: (one.shape, one.dtype) for name, one in last.items()
    }
    assert any(not np.array_equal(first[name], last[name]) for name in first)


def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    """The optimizer holds two numbers for each one that is trained, and for no other."""
    module, _, feeds = prepared(scales=False, norms=False)
    factors = {id(one) for _, one in qat.adapter_parameters(module)}
    optimizer = _optimizer(module, qat.Settings(), set())
    given = module(x=torch.from_numpy(feeds[0]["x"]))["y"]
    given.square().sum().backward()
    optimizer.step()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in factors) == (id(parameter) in map(id, optimizer.state))
        assert parameter.requires_grad == (id(parameter) in factors), name
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    assert held == 2 * sum(one.numel() for _, one in qat.adapter_parameters(module))


def test_what_is_trained_beside() -> None:
    for mode, scales, norms in (("inside", True, False), ("outside", True, True), ("inside", False, True)):
        module, _, _ = prepared(mode=mode, scales=scales, norms=norms)
        roles = {
            part.role for _, part in module.named_modules() if getattr(getattr(part, "scale", None), "requires_grad", 0)
        }
        assert roles == ({"activation"} | ({"weight"} if mode == "inside" else set()) if scales else set())
        for name in ("b3", "bt"):
            assert module.get_parameter(name).requires_grad == norms
        assert not any(module.get_parameter(name).requires_grad for name in MATRICES)


def test_outside_is_merged_and_the_change_is_said(tmp_path: Path) -> None:
    module, proto, feeds = prepared(mode="outside", bits="w8a8")
    stirred(module)
    with pytest.raises(ModelError, match=r"5 adapters are outside the rounding, the first of 'w3'.*merge"):
        qat.export(module, tmp_path / "q.onnx", feeds)
    other = copy.deepcopy(module)
    wanted = {
        name: adapter.product(weight) + _dequantized(module, name)
        for name, adapter in low_ranks(module).items()
        for weight in (module.get_parameter(name),)
    }
    before = outputs(module, feeds[0])
    changed = {one.weight: one.changed for one in qat.merge(module)}
    assert list(changed) == list(UNGROUPED)
    for name, value in wanted.items():
        lost = torch.linalg.vector_norm(_dequantized(module, name) - value) / torch.linalg.vector_norm(value)
        assert changed[name] == pytest.approx(lost.item(), rel=1e-3) and changed[name] > 0
    after = outputs(module, feeds[0])
    assert np.abs(after - before).max() < 0.2 * np.abs(before).max()
    report = qat.export(module, tmp_path / "q.onnx", feeds)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    on_data = {one.weight: one.changed for one in qat.merge(other, feeds)}
    assert on_data.keys() == changed.keys() and on_data != changed
    assert all(0 < on_data[name] < 5 * changed[name] for name in changed)
    np.testing.assert_array_equal(outputs(other, feeds[0]), after)
    assert run(proto, feeds[0])["y"].shape == after.shape


def _dequantized(module: Any, name: str) -> Any:
    """A weight as the layer reads it, without an adapter outside."""
    for path, sites in origin_of(module).sites.items():
        for site in sites:
            if site.tensor == name:
                return module.get_submodule(path)(weight_parameter(module, site)).detach()
    raise AssertionError(name)


@pytest.mark.slow
def test_the_state_goes_from_module_to_module(tmp_path: Path) -> None:
    first, second = (
        qat.prepare(MODEL, FEEDS, bits="w4a8", rounding="nearest", adapters=qat.Adapters(4, seed=seed))
        for seed in (0, 1)
    )
    qat.train(first, FEEDS, epochs=2, batch=8)
    torch.save(qat.adapter_state(first), tmp_path / "adapters.pt")
    state = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert sum(one.numel() for one in state.values()) < 0.5 * sum(one.numel() for one in first.parameters())
    qat.load_adapters(second, state)
    np.testing.assert_array_equal(outputs(second, FEEDS[0]), outputs(first, FEEDS[0]))
    alone = qat.adapter_state(first, beside=False)
    assert set(alone) < set(state) and all(name.startswith("adapters.") for name in alone)
    third = qat.prepare(MODEL, FEEDS, bits="w4a8", rounding="nearest", adapters=4)
    qat.load_adapters(third, alone)
    for (_, one), (_, other) in zip(qat.adapter_parameters(third), qat.adapter_parameters(first), strict=True):
        assert torch.equal(one, other)
    assert not np.array_equal(outputs(third, FEEDS[0]), outputs(first, FEEDS[0]))  # without its scales


def test_a_state_of_another_module_is_refused_and_nothing_changes() -> None:
    module, _, feeds = prepared()
    before = outputs(module, feeds[0])
    stirred(other := prepared(rank=1)[0])
    with pytest.raises(ModelError, match=r"another module: 'adapters\.w3\.A' is \(1, 54\), and \(2, 54\) in the"):
        qat.load_adapters(module, qat.adapter_state(other))
    state = qat.adapter_state(module)
    del state["adapters.wm.B"]
    with pytest.raises(ModelError, match=r"'adapters\.wm\.B' is missing"):
        qat.load_adapters(module, {**state, "adapters.w9.A": torch.ones(1)})
    np.testing.assert_array_equal(outputs(module, feeds[0]), before)
    plain = qat.prepare(MODEL, FEEDS[:1], bits="w8a8")
    with pytest.raises(ModelError, match="has no adapters: make it"):
        qat.load_adapters(plain, state)
    with pytest.raises(ModelError, match="no adapters to merge"):
        qat.merge(plain)
    assert qat.adapter_parameters(plain) == []


def test_targets() -> None:
    assert list(low_ranks(prepared(targets="w?")[0])) == list(MATRICES)
    assert list(low_ranks(prepared(targets=("wm", "w[13]"))[0])) == ["w3", "w1", "wm"]
    with pytest.raises(RecipeError, match=r"'q' can have .*: no quantized weight has such a name"):
        prepared(targets=("w3", "q"))
    with pytest.raises(RecipeError, match="'wn' has 5 x 9 elements, no more than the two factors"):
        prepared(targets="wn", rank=4)
    with pytest.raises(RecipeError, match="'wg' is of a Conv with 3 groups"):
        prepared(targets="wg", mode="outside")


@pytest.mark.parametrize(
    ("wishes", "said"),
    [({"rank": 0}, "'rank' .* got 0"), ({"alpha": -1.0}, "'alpha' .* got -1"), ({"mode": "beside"}, "got 'beside'")],
)
def test_settings_that_make_no_sense(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        qat.Adapters(**wishes)


def test_a_second_set_is_refused_and_a_merged_module_takes_one() -> None:
    module, _, feeds = prepared()
    with pytest.raises(ModelError, match="has adapters already"):
        qat.add_adapters(module, 2)
    stirred(module)
    given = outputs(module, feeds[0])
    qat.merge(module)
    assert qat.add_adapters(module, 1) == MATRICES
    np.testing.assert_array_equal(outputs(module, feeds[0]), given)


def test_a_weight_of_two_layers_has_one_adapter() -> None:
    """Both read the sum; outside, where a branch belongs to a layer, it is refused."""
    text = """agraph (float[n,12] x) => (float[n,12] y) {
        a = MatMul (x, w)
        b = Relu (a)
        y = MatMul (b, w)
    }"""
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((8, 12)).astype(np.float32)}]
    proto = model(text, w=(12, 12))
    module = qat.prepare(proto, feeds, backend="virtual", bits="w8a8", adapters=2)
    stirred(module)
    for part in module.modules():
        if hasattr(part, "enabled"):
            part.enabled = False
    (adapter,) = low_ranks(module).values()
    summed = adapter(module.get_parameter("w")).detach().numpy()
    expected = np.maximum(feeds[0]["x"] @ summed, 0) @ summed
    np.testing.assert_allclose(outputs(module, feeds[0]), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(RecipeError, match="is read by 2 layers"):
        qat.prepare(proto, feeds, backend="virtual", bits="w8a8", adapters=qat.Adapters(2, mode="outside"))


def test_copies_and_pickles_keep_their_adapters() -> None:
    module, _, feeds = prepared()
    stirred(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        np.testing.assert_array_equal(outputs(other, feeds[0]), outputs(module, feeds[0]))
        assert list(low_ranks(other)) == list(MATRICES)
        qat.merge(other)
    assert isinstance(module.get_submodule("adapters.w3"), LowRank)
    assert float_twin(module) is not None


@pytest.mark.parametrize("method", ["lsq", "lsq+", "dorefa", "uniform"])
def test_every_method_of_weights(method: str, tmp_path: Path) -> None:
    """The codes of the file are those of the module, merged or not."""
    proto, feeds = layers()
    module = qat.prepare(proto, feeds, backend="virtual", bits="w4a8", weights=method, adapters=2)
    stirred(module)
    qat.export(module, tmp_path / "inside.onnx", verify=False)
    _, solution = learned(module)
    for name, adapter in low_ranks(module).items():
        path, site = next(
            (path, one) for path, some in origin_of(module).sites.items() for one in some if one.tensor == name
        )
        expected = module.get_submodule(path)(adapter(module.get_parameter(name))).detach().numpy()
        found = solution.qparams[site.key].dequantize(solution.codes[site.key])
        np.testing.assert_array_equal(found, expected)
    qat.merge(module)
    qat.export(module, tmp_path / "merged.onnx", verify=False)
    assert (tmp_path / "inside.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()
