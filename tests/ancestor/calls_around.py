"""The ancestor's calls that look at a model, export it and train it, each with what it gives."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.quant_model import GraphVisitor, LifeCycleError, QuantizationErrorProfiler, SharedData, mse
from sbonnx.spec import Array
from tests.ancestor.calls_steps import FLOAT, IMAGES, Context, call

# --- looking --------------------------------------------------------------------------------------------


@call("get_quantization_error(data, checker, is_async), QuantizationErrorProfiler(model).apply(...)")
def _(it: Context) -> None:
    model = it.quantized(bits="w4a4")
    data = torch.from_numpy(IMAGES)
    alone, gathered = model.get_quantization_error(data), model.get_quantization_error(data, is_async=False)
    assert alone["/conv1/Conv"] == gathered["/conv1/Conv"] and alone["/fc/Gemm"] < gathered["/fc/Gemm"]
    assert gathered["/fc/Gemm"] == pytest.approx(mse(model(IMAGES)["y"], FLOAT), rel=1e-3)
    profiler = QuantizationErrorProfiler(model)
    assert profiler.apply(data) == alone and profiler.apply(data, is_async=False) == gathered
    largest = profiler.apply(data, checker=lambda quantized, reference: float(np.abs(quantized - reference).max()))
    assert largest["/fc/Gemm"] ** 2 >= alone["/fc/Gemm"]


@call("get_quantization_error(data, checker=torch.nn.functional.mse_loss), the ancestor's default")
def _(it: Context) -> None:
    model, data = it.quantized(bits="w4a4"), torch.from_numpy(IMAGES)
    own = model.get_quantization_error(data)
    for checker in (torch.nn.functional.mse_loss, torch.nn.MSELoss()):
        assert model.get_quantization_error(data, checker=checker) == pytest.approx(own, rel=1e-4)
    largest = QuantizationErrorProfiler(model).apply(data, checker=torch.dist)
    assert largest.keys() == own.keys()
    with pytest.raises(TypeError, match="0 positional arguments"):
        model.get_quantization_error(data, checker=lambda: 0.0)


@call("dump_mermaid(file), export_mermaid(file)")
def _(it: Context) -> None:
    model, chart = it.model(), io.StringIO()
    model.dump_mermaid(chart)
    model.export_mermaid(it.folder / "graph.md")
    assert chart.getvalue() == (it.folder / "graph.md").read_text()
    assert chart.getvalue().startswith("graph TD\n") and chart.getvalue().count("fill:#cafe02") == 2
    assert len(re.findall(r'^n\d+\["/conv[12]/Conv<br/>\(Conv\)"\]$', chart.getvalue(), re.MULTILINE)) == 2


@call("GraphVisitor(model, hook_wrapper): hooks and named values")
def _(it: Context) -> None:
    model, order = it.quantized(), []

    def hook_wrapper(node: Any, module: Any, storage: SharedData) -> list[Any]:
        def before(module: Any, inputs: tuple[Array, ...]) -> None:
            order.append(module.node.name)

        def after(module: Any, inputs: tuple[Array, ...], output: Array) -> None:
            storage.set_output(node.target, output)
            assert all(known is not None for known in storage.extract_node_args(node.args, inputs))
            if node.op == "Relu":
                np.testing.assert_array_equal(output, np.maximum(inputs[0], 0))
            storage.set_value(node.name, "largest", float(output.max()))
            storage.finish_node(node.name)

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    with GraphVisitor(model, hook_wrapper) as visitor:
        output = model(torch.from_numpy(IMAGES))
        largest = visitor.storage.extract_value("largest")
    names = [node.name for node in model.prepared.graph.nodes]
    assert order == names and list(largest) == names
    assert largest["/fc/Gemm"] == pytest.approx(float(output.max()))
    assert not visitor.storage.outputs and not visitor.storage.output_degrees, "all were finished"
    model(torch.from_numpy(IMAGES))
    assert len(order) == len(names), "the hooks are gone"


@call("SharedData: outputs, edges, degrees, values")
def _(it: Context) -> None:
    data = SharedData()
    data.add_node("a", [])
    data.add_node("b", ["a"])
    data.add_node("c", ["a", None, "b"])
    assert data.output_degrees == {"a": 2, "b": 1, "c": 0} and data.edges["c"] == ["a", "b"]
    data.set_output("a", [1, 2])
    data.finish_node("b")
    assert data.get_output("a") == [1, 2] and data.output_degrees["a"] == 1
    assert data.extract_node_args(("a", ["x", 3], {"k": "a"}), (None, [7, None], {}), batch=None) == (
        [1, 2],
        [7, 3],
        {"k": [1, 2]},
    )
    assert data.extract_node_args("a", batch=1) == 2
    data.finish_node("c")
    assert data.get_output("a") is None and not data.output_degrees
    data.set_value("a", "diff", 0.5)
    assert data.get_value("a", "diff") == 0.5 and data.get_value("b", "diff") is None
    assert data.extract_value("diff") == {"a": 0.5} and data.extract_value("diff") == {}
    with pytest.raises(ValueError, match="set_output"):
        data.set_value("a", "output", 1)


# --- export ---------------------------------------------------------------------------------------------


def interface(path: Path) -> dict[str, list[Any]]:
    """Names and sizes of inputs and outputs, and the opset."""
    model = onnx.load(str(path))
    onnx.checker.check_model(model, full_check=True)
    values = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    return values | {"opset": [model.opset_import[0].version]}


@call("export_onnx(dummy_data, name=...)")
def _(it: Context) -> None:
    model = it.quantized()
    model.export_onnx(it.folder / "ours.onnx")
    model.export_onnx(torch.from_numpy(IMAGES), name=str(it.folder / "q.onnx"))
    np.testing.assert_allclose(it.exported(), model(IMAGES)["y"], atol=1e-5)
    assert interface(it.folder / "ours.onnx")["x"] == ["batch", 3, 8, 8]
    assert interface(it.folder / "q.onnx")["x"] == [8, 3, 8, 8], "sizes of the feed"
    with pytest.raises(DataError):
        model.export_onnx(torch.zeros(1, 3, 9, 8, 8), name=str(it.folder / "r.onnx"))
    with pytest.raises(DataError, match="needs a path"):
        model.export_onnx(torch.from_numpy(IMAGES))
    assert sorted(path.name for path in it.folder.glob("*.onnx")) == ["ours.onnx", "q.onnx"]


@call("export_onnx(input_names, output_names, dynamic_axes, opset_version)")
def _(it: Context) -> None:
    model, path = it.quantized(), it.folder / "q.onnx"
    names: dict[str, Any] = {"input_names": ["image"], "output_names": ["logits"], "force": True}
    for opset in (13, 17, 21):
        axes = {"image": {0: "n"}, "logits": [0]} if opset == 17 else {"image": {0: "batch"}, "logits": {0: "batch"}}
        model.export_onnx(torch.from_numpy(IMAGES[:1]), str(path), dynamic_axes=axes, opset_version=opset, **names)
        sizes = ("n", "logits_dynamic_axes_0") if opset == 17 else ("batch", "batch")
        assert interface(path) == {"image": [sizes[0], 3, 8, 8], "logits": [sizes[1], 10], "opset": [opset]}
        np.testing.assert_allclose(it.exported(), model(IMAGES)["y"], atol=1e-5)


@call("export_onnx: wrong names, axes and opsets")
def _(it: Context) -> None:
    model, path = it.calibrated(bits="w4a4"), it.folder / "q.onnx"
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"input_names": ["a", "b"]}, RecipeError, "input_names has 2 names, and the model 1 inputs"),
        ({"output_names": ["x"]}, RecipeError, "'x' is the name of another input or output"),
        ({"dynamic_axes": {"z": [0]}}, RecipeError, "the model has no input or output 'z'; it has x, y"),
        ({"dynamic_axes": {"x": {4: "n"}}}, RecipeError, "'x' has 4 axes, and there is no axis 4"),
        ({"dynamic_axes": {"x": {1: "channels"}}}, ModelError, "does not run at other sizes of x [1]"),
        ({"opset_version": 13}, ModelError, "the quantized model needs opset 21"),
        ({"opset_version": 99}, ModelError, "opset 99"),
    ]
    for wish, kind, said in wrong:
        with pytest.raises(kind, match=re.escape(said)) as caught:
            model.export_onnx(path, **wish)
        assert "\n" not in str(caught.value) and not path.exists()


@call("export_onnx(verbose=True, extra_info=True)")
def _(it: Context) -> None:
    with redirect_stdout(io.StringIO()) as said:
        extra = it.quantized(bits="w4a4").export_onnx(it.folder / "q.onnx", verbose=True, extra_info=True)
    assert "QuantizeLinear" in said.getvalue() and extra == it.folder / "q_extra.onnx"
    tagged = onnx.load(str(extra)).graph.node
    assert {one.i for node in tagged for one in node.attribute if one.name == "bits"} == {4}


# --- training -------------------------------------------------------------------------------------------


@call("init_QAT(): calibrates by itself; then parameters, train, eval, state_dict, export_onnx")
def _(it: Context) -> None:
    model = it.fed(bits="w4a4", w_quantizer="lsq", a_quantizer="lsq")
    with pytest.raises(AttributeError, match="init_QAT"):
        model.parameters()
    model.init_QAT()
    calibrated = model(torch.from_numpy(IMAGES)).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target, losses = torch.from_numpy(FLOAT), []
    model.train()
    for _ in range(6):
        loss = torch.nn.functional.mse_loss(model(torch.from_numpy(IMAGES)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        trained = model(torch.from_numpy(IMAGES))
    assert not trained.requires_grad and not torch.equal(trained, calibrated)
    model.export_onnx(torch.from_numpy(IMAGES), name=str(it.folder / "q.onnx"), extra_info=True)
    np.testing.assert_allclose(it.exported(), trained.numpy(), atol=2e-3 * float(trained.abs().max()))
    np.testing.assert_array_equal(model(IMAGES)["y"], trained.numpy())
    model.load_state_dict(state)
    with pytest.raises(LifeCycleError, match="call calc_qparams"):
        it.model().init_QAT()


@call("PACT: the clipping bounds are parameters called alpha")
def _(it: Context) -> None:
    model = it.fed(bits="w4a4", w_quantizer="dorefa", a_quantizer="pact")
    model.set_lastmodule_wbit(bit=8)
    model.init_QAT()
    alphas = [parameter for name, parameter in model.named_parameters() if "alpha" in name]
    assert alphas and all(float(alpha.detach().min()) > 0 for alpha in alphas)
    sum((alpha**2).sum() for alpha in alphas).backward()
    assert all(alpha.grad is not None for alpha in alphas)
