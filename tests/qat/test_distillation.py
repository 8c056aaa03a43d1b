"""Inner tensors: which are chosen, that they are the graph's own values, and that training brings them nearer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("torch")

import onnxruntime as ort
import torch

from sbonnx import graph as graphs
from sbonnx import qat
from sbonnx.assets import digits
from sbonnx.errors import DataError, RecipeError
from sbonnx.qat.module import float_twin, origin_of
from sbonnx.torchnet.onnx_to_torch.reimport import reimport
from sbonnx.training.distillation import Taps, distillation, inner_tensors, relative_error, with_inner
from sbonnx.training.loop import Settings

RNG = np.random.default_rng(0)


def conv(name: str, x: str, out: str) -> onnx.NodeProto:
    return helper.make_node("Conv", [x, f"{name}_w", f"{name}_b"], [out], name=name, pads=[1, 1, 1, 1])


def residual() -> onnx.ModelProto:
    """Two blocks: one with a Relu behind its sum, one whose sum is read twice; and a constant that is added."""
    nodes = [
        conv("stem", "x", "s"),
        conv("a", "s", "a_out"),
        helper.make_node("Add", ["a_out", "s"], ["a_sum"], name="a_add"),
        helper.make_node("Relu", ["a_sum"], ["a_end"], name="a_relu"),
        conv("b", "a_end", "b_out"),
        helper.make_node("Add", ["a_end", "b_out"], ["b_sum"], name="b_add"),
        helper.make_node("Relu", ["b_sum"], ["b_relu"], name="b_relu"),
        helper.make_node("Add", ["b_relu", "c"], ["shifted"], name="shift"),
        helper.make_node("Mul", ["shifted", "b_sum"], ["gated"], name="gate"),
        helper.make_node("GlobalAveragePool", ["gated"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["y"], name="flat"),
    ]
    weights = [
        numpy_helper.from_array((RNG.standard_normal((4, into, 3, 3)) * 0.3).astype(np.float32), f"{name}_w")
        for name, into in (("stem", 2), ("a", 4), ("b", 4))
    ]
    weights += [numpy_helper.from_array(np.zeros(4, np.float32), f"{name}_b") for name in ("stem", "a", "b")]
    weights.append(numpy_helper.from_array(np.full((1, 4, 1, 1), 0.5, np.float32), "c"))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 8, 8])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "residual", [given], [made], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def test_blocks_end_behind_their_activation() -> None:
    graph = graphs.load(residual())
    assert inner_tensors(graph, "blocks") == ("a_end", "b_sum")
    assert inner_tensors(graph, ["b_out", "s", "b_out"]) == ("s", "b_out")
    assert inner_tensors(graph, ()) == ()


def chain(count: int) -> onnx.ModelProto:
    """Convolutions one after another, a Relu behind each but the last."""
    nodes, weights, x = [], [], "x"
    for at in range(count):
        nodes.append(conv(f"conv{at}", x, f"made{at}"))
        nodes.append(helper.make_node("Relu", [f"made{at}"], [f"end{at}"], name=f"relu{at}"))
        weights.append(numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), f"conv{at}_w"))
        weights.append(numpy_helper.from_array(np.zeros(2, np.float32), f"conv{at}_b"))
        x = f"end{at}"
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 8, 8])
    made = helper.make_tensor_value_info(f"made{count - 1}", TensorProto.FLOAT, ["n", 2, 8, 8])
    graph = helper.make_graph(nodes[:-1], "chain", [given], [made], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_without_blocks_the_layers() -> None:
    """All but the last, whose output the loss has anyway; of many, eight that are spread evenly."""
    assert inner_tensors(graphs.load(chain(1)), "blocks") == ()
    assert inner_tensors(graphs.load(chain(4)), "blocks") == ("end0", "end1", "end2")
    assert inner_tensors(graphs.load(chain(17)), "blocks") == tuple(f"end{at}" for at in range(1, 17, 2))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("everything", "inner: 'everything' is not supported: use 'blocks'"),
        (["s", "none"], "inner: 'none' is not a tensor of the graph"),
        (["x"], "inner: 'x' is not computed in floating point"),
    ],
)
def test_tensors_that_there_are_not(wanted: str | list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        inner_tensors(graphs.load(residual()), wanted)


def test_taps_give_what_onnxruntime_computes() -> None:
    model = residual()
    graph, names = graphs.load(model), ["s", "a_end", "b_sum", "gated"]
    module = reimport(graph).eval()
    x = RNG.standard_normal((3, 2, 8, 8)).astype(np.float32)
    with Taps(module, graph, names) as tapped, torch.no_grad():
        found = tapped(x=torch.from_numpy(x))
        assert list(found) == [*names, "y"]
    shown = onnx.ModelProto.FromString(model.SerializeToString())
    shown.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = ort.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, expected in zip(found, session.run(list(found), {"x": x}), strict=True):
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-4, atol=1e-5)
    assert not any(part._forward_hooks for part in module.modules())
    assert set(module(x=torch.from_numpy(x))) == {"y"}


def test_the_loss_of_both() -> None:
    targets = {"y": torch.randn(6, 5), "inside": torch.randn(6, 3, 4, 4), "deeper": torch.randn(6, 2)}
    outputs = {name: value + 0.2 * torch.randn_like(value) for name, value in targets.items()}
    inner = [relative_error(outputs[name], targets[name]) for name in ("inside", "deeper")]
    alone = distillation({"y": outputs["y"]}, {"y": targets["y"]})
    found = with_inner(distillation, ["inside", "deeper"], 3.0)(outputs, targets)
    assert float(found) == pytest.approx(float(alone + 3.0 * (inner[0] + inner[1]) / 2), rel=1e-5)


def feeds(count: int = 128) -> list[dict[str, np.ndarray]]:
    images = np.load(digits().calib)["image"][:count]
    return [{"image": images[at : at + 32]} for at in range(0, count, 32)]


def apart(module: torch.nn.Module, names: tuple[str, ...]) -> float:
    """How far the inner tensors are from those of the float network, on images that training did not see."""
    graph, twin = origin_of(module).prepared.graph, float_twin(module)
    x = torch.from_numpy(np.load(digits().eval)["image"])
    with torch.no_grad(), Taps(module, graph, names) as tapped, Taps(twin, graph, names) as teacher:
        found, wanted = tapped(image=x), teacher(image=x)
        return float(torch.stack([relative_error(found[name], wanted[name]) for name in names]).mean())


@pytest.mark.slow
def test_training_brings_inner_tensors_nearer(tmp_path: Path) -> None:
    """With their loss more than without; a checkpoint of the one is refused by the other."""
    found, path, settings = {}, tmp_path / "run.pt", Settings(epochs=60, batch=32)
    for weight in (0.0, 1.0):
        module = qat.prepare(str(digits().model), feeds(), backend="virtual", bits="w3a3")
        names = inner_tensors(origin_of(module).prepared.graph, "blocks")
        before = apart(module, names)
        qat.train(module, feeds(), settings, inner_weight=weight, checkpoint=path if weight else None)
        found[weight] = apart(module, names)
    assert found[1.0] < 0.9 * before and found[1.0] < found[0.0]
    with pytest.raises(DataError, match="checkpoint of other inner tensors"):
        qat.train(module, feeds(), settings, inner=(), inner_weight=1.0, checkpoint=path)
    with pytest.raises(DataError, match="checkpoint of other augmentations"):
        qat.train(module, feeds(), settings, inner_weight=1.0, augment="shift", checkpoint=path)
