"""What a reimported module is, on small graphs: names, modes, copies, types, sites, errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.errors import ModelError  # noqa: E402
from sbonnx.spec import Array  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.operators import NodeModule  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import parameter_name, reimport, site_of  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.models import batchnorm, residual, run  # noqa: E402

NORMED = """g (float[N,3,6,6] x) => (float[N,4,6,6] y) {
    c = Conv <pads = [1,1,1,1]> (x, w)
    b = BatchNormalization <momentum = 0.7, epsilon = 0.01> (c, n_gamma, n_beta, n_mean, n_var)
    y = Relu (b)
}"""

ATTENTION = """g (int64[N,T] ids) => (float[N,T,8] y) {
    e = Gather (table, ids)
    shape = Shape (ids)
    n = Gather (shape, zero)
    t = Gather (shape, one)
    axis = Constant <value_ints = [0]> ()
    nv = Unsqueeze (n, axis)
    tv = Unsqueeze (t, axis)
    heads = Constant <value_ints = [2, 4]> ()
    split = Concat <axis = 0> (nv, tv, heads)
    q = MatMul (e, wq)
    qs = Reshape (q, split)
    qt = Transpose <perm = [0,2,1,3]> (qs)
    kt = Transpose <perm = [0,2,3,1]> (qs)
    s = MatMul (qt, kt)
    half = Constant <value_float = 0.5> ()
    scaled = Mul (s, half)
    p = Softmax <axis = -1> (scaled)
    o = MatMul (p, qt)
    ot = Transpose <perm = [0,2,1,3]> (o)
    flat = Constant <value_ints = [8]> ()
    joined = Concat <axis = 0> (nv, tv, flat)
    y = Reshape (ot, joined)
}"""
ATTENTION_WEIGHTS: dict[str, Any] = {"table": (11, 8), "wq": (8, 8), "zero": np.array(0), "one": np.array(1)}


def model(text: str, **weights: Any) -> onnx.ModelProto:
    """A model from text; weights as arrays or shapes."""
    return models.model(text, **weights)


def batch(count: int, *shape: int, seed: int = 5) -> Array:
    return np.random.default_rng(seed).standard_normal((count, *shape)).astype(np.float32)


def assert_close(found: Any, want: Array, tolerance: float = 1e-4) -> None:
    have = found.detach().numpy()
    assert have.shape == want.shape
    assert np.abs(have - want).max() <= tolerance * np.abs(want).max()


def normed() -> Any:
    return reimport(graphs.load(model(NORMED, w=(4, 3, 3, 3), **batchnorm("n", 4))))


def test_names_of_parameters_nodes_and_outputs() -> None:
    module = reimport(graphs.load(residual()))
    assert dict(module.named_parameters()).keys() == {"ws", "bs", "w1", "b1", "w2", "b2", "wf", "bf"}
    assert [name for name, _ in module.named_children()][:3] == ["stem", "stem_relu", "conv1"]
    assert all(isinstance(child, NodeModule) for child in module.children())
    assert module.meta["sbonnx"]["parameters"]["ws"] == "ws"
    assert module.meta["sbonnx"]["inputs"] == {"x": "x"}
    x = torch.from_numpy(batch(2, 3, 8, 8))
    assert list(module(x)) == ["y"]
    assert torch.equal(module(x)["y"], module(x=x)["y"])
    assert "stem = self.stem(x, ws, bs)" in module.code


def test_names_that_python_does_not_have() -> None:
    text = """g (float[N,3] x) => (float[N,3] y) {
        a = Mul (x, first)
        b = Mul (a, second)
        c = Mul (b, third)
        y = Mul (c, fourth)
    }"""
    names = {"first": "layer.0/weight", "second": "layer/0.weight", "third": "forward", "fourth": "7::w"}
    proto = model(text, **dict.fromkeys(names, 3))
    for tensor in proto.graph.initializer:
        tensor.name = names[tensor.name]
    for node, name in zip(proto.graph.node, ("class", "a.b", "a/b", "layer_0_weight"), strict=True):
        node.input[1] = names[node.input[1]]
        node.name = name
    module = reimport(graphs.load(proto))
    assert list(dict(module.named_parameters())) == ["layer_0_weight", "layer_0_weight_1", "forward_", "_7__w"]
    assert [name for name, _ in module.named_children()] == ["class_", "a_b", "a_b_1", "layer_0_weight_2"]
    assert parameter_name(module, "layer/0.weight") == "layer_0_weight_1"
    x = batch(2, 3)
    assert_close(module(torch.from_numpy(x))["y"], run(proto, {"x": x})["y"])


@pytest.mark.parametrize("count", [1, 3])
def test_any_batch_computes_what_onnxruntime_does(count: int) -> None:
    proto, x = residual(), batch(count, 3, 8, 8)
    assert_close(reimport(graphs.load(proto))(torch.from_numpy(x))["y"], run(proto, {"x": x})["y"])


def test_batch_and_length_are_computed_when_it_runs() -> None:
    proto = model(ATTENTION, **ATTENTION_WEIGHTS)
    module = reimport(graphs.load(proto))
    assert dict(module.named_parameters()).keys() == {"table", "wq"}
    for shape in ((1, 3), (2, 7), (4, 1)):
        ids = np.random.default_rng(1).integers(0, 11, shape)
        assert_close(module(torch.from_numpy(ids))["y"], run(proto, {"ids": ids})["y"])


def test_sizes_as_outputs_and_as_operands_of_tensors() -> None:
    text = """g (float[N,3] x) => (int64[2] s, float[N,3] y, int64 n) {
        s = Shape (x)
        n = Size (x)
        f = Cast <to = 1> (n)
        y = Div (x, f)
    }"""
    proto, x = model(text), batch(4, 3)
    made, want = reimport(graphs.load(proto))(torch.from_numpy(x)), run(proto, {"x": x})
    assert all(np.array_equal(made[name].numpy(), value) and made[name].numpy().dtype == value.dtype
               for name, value in want.items())  # fmt: skip


def test_batch_normalization_in_train_mode_is_torchs_own() -> None:
    weights = batchnorm("n", 4)
    module = normed().train()
    norm = torch.nn.BatchNorm2d(4, eps=0.01, momentum=0.3)
    parts = {"weight": "gamma", "bias": "beta", "running_mean": "mean", "running_var": "var"}
    norm.load_state_dict({key: torch.from_numpy(weights[f"n_{part}"]) for key, part in parts.items()}, strict=False)
    x = torch.from_numpy(batch(5, 3, 6, 6))
    want = torch.relu(norm(torch.nn.functional.conv2d(x, module.w.detach(), padding=1)))
    made = module(x)["y"]
    torch.testing.assert_close(made, want)
    mean, variance = module.meta["sbonnx"]["statistics"]["BatchNormalization_0"]
    torch.testing.assert_close(module.get_buffer(mean), norm.running_mean)
    torch.testing.assert_close(module.get_buffer(variance), norm.running_var)
    made.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(module.n_gamma.grad, norm.weight.grad)


def test_batch_normalization_in_eval_mode_leaves_its_statistics() -> None:
    proto, x = model(NORMED, w=(4, 3, 3, 3), **batchnorm("n", 4)), batch(3, 3, 6, 6)
    module = reimport(graphs.load(proto)).eval()
    before = copy.deepcopy(module.state_dict())
    assert_close(module(torch.from_numpy(x))["y"], run(proto, {"x": x})["y"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_frozen_norm_trains_its_scale_only() -> None:
    module = normed().train()
    next(child for child in module.children() if hasattr(child, "frozen")).frozen = True
    before = module.n_mean.clone()
    made = module(torch.from_numpy(batch(3, 3, 6, 6)))["y"]
    made.sum().backward()
    assert torch.equal(module.n_mean, before)
    assert module.n_gamma.grad is not None


def test_norms_that_share_statistics_in_the_file_have_their_own() -> None:
    text = """g (float[N,4,2,2] x) => (float[N,4,2,2] y) {
        a = BatchNormalization (x, n_gamma, n_beta, n_mean, n_var)
        r = Relu (a)
        y = BatchNormalization (r, n_gamma, n_beta, n_mean, n_var)
    }"""
    module = reimport(graphs.load(model(text, **batchnorm("n", 4)))).train()
    module(torch.from_numpy(batch(8, 4, 2, 2)))
    (one, _), (two, _) = module.meta["sbonnx"]["statistics"].values()
    assert not torch.equal(module.get_buffer(one), module.get_buffer(two))


def test_one_value_a_channel_cannot_be_normalized() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { y = BatchNormalization (x, n_gamma, n_beta, n_mean, n_var) }"
    module = reimport(graphs.load(model(text, **batchnorm("n", 4)))).train()
    with pytest.raises(
        ModelError, match=r"node 'BatchNormalization_0' .*more than one value per channel in train mode"
    ):
        module(torch.zeros(1, 4))


def test_what_is_a_parameter_and_what_a_buffer() -> None:
    text = """g (float[N,3] x) => (float[N,3] y) {
        a = Add (x, epsilon)
        b = Mul (a, scale)
        m = Where (flags, b, walls)
        c = Add (b, mask)
        d = Mul (c, one)
        e = Add (d, m)
        y = Clip (e, low)
    }"""
    values = {
        "epsilon": np.array(1e-5, np.float32),
        "scale": 3,
        "flags": np.array([True, False, True]),
        "walls": np.array([0, -1, -2], np.float32),
        "mask": np.array([0, -1e38, 0], np.float32),
        "one": np.array([0.5], np.float32),
        "low": np.array(-3, np.float32),
    }
    proto = model(text, **values)
    module = reimport(graphs.load(proto))
    assert list(dict(module.named_parameters())) == ["scale"]
    assert dict(module.named_buffers(recurse=False)).keys() == {"epsilon", "flags", "walls", "mask", "one"}
    x = batch(2, 3)
    assert_close(module(torch.from_numpy(x))["y"], run(proto, {"x": x})["y"])
    with pytest.raises(ModelError, match="'epsilon' is not a parameter of the module: it is a buffer"):
        parameter_name(module, "epsilon")
    with pytest.raises(
        ModelError, match="'low' is not a parameter of the module: it is not read by a node as a tensor"
    ):
        parameter_name(module, "low")


def test_state_copies_and_pickles() -> None:
    module, x = normed().eval(), torch.from_numpy(batch(2, 3, 6, 6))
    with torch.no_grad():
        module.w.mul_(0.5)
    want = module(x)["y"]
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = normed().eval()
    assert not torch.equal(fresh(x)["y"], want)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for other in (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x)["y"], want)
        assert other.meta["sbonnx"] == module.meta["sbonnx"]
        assert other.state_dict().keys() == module.state_dict().keys()
        assert not other.training
        assert site_of(other, "Conv_0", 1).value.target == "w"
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(module))))
    assert again.meta["sbonnx"]["parameters"] == module.meta["sbonnx"]["parameters"]


def test_in_double_precision() -> None:
    text = """g (float[N,3] x) => (float[N,3] y, float[2] k) {
        i = Cast <to = 7> (x)
        f = Cast <to = 1> (i)
        z = Mul (f, scale)
        s = Shape (x)
        o = ConstantOfShape <value = float[1] {0.5}> (s)
        a = Add (z, o)
        y = Add (a, x)
        k = Cast <to = 1> (s)
    }"""
    module = reimport(graphs.load(model(text, scale=3)))
    assert module(torch.ones(2, 3))["y"].dtype == torch.float32
    made = module.double()(torch.ones(2, 3, dtype=torch.float64))
    assert {value.dtype for value in made.values()} == {torch.float64}


def test_site_of_is_the_one_read() -> None:
    """Of a tensor with two readers, one reads something else after a module was put before it."""
    module, x = reimport(graphs.load(residual())), torch.from_numpy(batch(2, 3, 8, 8))
    want = module(x)["y"]
    read = site_of(module, "conv1", 0)
    assert (read.node.target, read.position, read.value.target) == ("conv1", 0, "stem_relu")
    module.add_module("doubled", _Doubled())
    with module.graph.inserting_before(read.node):
        made = module.graph.call_module("doubled", (read.value,))
    read.node.update_arg(read.position, made)
    module.graph.lint()
    module.recompile()
    assert not torch.allclose(module(x)["y"], want)
    assert site_of(module, "conv1", 0).value.target == "doubled"
    assert site_of(module, "add", 1).value.target == "stem_relu"  # the other reader
    with torch.no_grad():
        module.w1.mul_(0.5)
    torch.testing.assert_close(module(x)["y"], want)
    weight = site_of(module, "conv2", 1)
    assert parameter_name(module, "w2") == weight.value.target


class _Doubled(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return x * 2


def test_sites_that_are_not_there() -> None:
    module = reimport(graphs.load(residual()))
    with pytest.raises(ModelError, match="the module has no node 'conv9'"):
        site_of(module, "conv9", 0)
    with pytest.raises(ModelError, match=r"input 5 of node 'conv1' \(Conv\) is not a tensor"):
        site_of(module, "conv1", 5)
    with pytest.raises(ModelError, match=r"not made by sbonnx.qat.reimport"):
        parameter_name(torch.fx.GraphModule({}, torch.fx.Graph()), "w")


def test_an_unknown_op_is_named_with_opset_and_node() -> None:
    text = """g (float[1,5,3,3] x, float[2,5] r) => (float[2,5,2,2] y) {
        n = RandomNormalLike (x)
        y = MaxRoiPool <pooled_shape = [2,2]> (n, r)
    }"""
    proto = models.model(text, opset=16)
    with pytest.raises(
        ModelError,
        match=r"op RandomNormalLike \(opset 16, node 'RandomNormalLike_0'\) is not supported.* nor are MaxRoiPool",
    ):
        reimport(graphs.load(proto, opset=16))


def test_what_leads_nowhere_is_left_out() -> None:
    text = """g (float[N,3] x) => (float[N,3] y) {
        y = Mul (x, w)
        z = Add (x, unread)
        r = RandomNormalLike (z)
    }"""
    module = reimport(graphs.load(model(text, w=3, unread=3)))
    assert list(dict(module.named_parameters())) == ["w"]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_compile_takes_the_whole_graph(dynamic: bool) -> None:
    torch._dynamo.reset()
    proto = model(ATTENTION, **ATTENTION_WEIGHTS)
    compiled = torch.compile(reimport(graphs.load(proto)), backend="aot_eager", fullgraph=True, dynamic=dynamic or None)
    for shape in ((2, 3), (3, 5), (4, 7)):
        ids = np.random.default_rng(1).integers(0, 11, shape)
        assert_close(compiled(torch.from_numpy(ids))["y"], run(proto, {"ids": ids})["y"])


def test_distributed_data_parallel(tmp_path: Any) -> None:
    """Gradients come through the wrapper, and every parameter takes part."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        module, alone = normed().train(), normed().train()
        parallel = torch.nn.parallel.DistributedDataParallel(module)
        x = torch.from_numpy(batch(4, 3, 6, 6))
        for _ in range(2):  # the second step finds parameters that the first left out
            for one in (parallel, alone):
                one.zero_grad()
                one(x)["y"].square().sum().backward()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)
    finally:
        distributed.destroy_process_group()
