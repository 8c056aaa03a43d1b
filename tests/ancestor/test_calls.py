"""Every public call of the ancestor, on an ONNX file: what is called, and what it gives.

`CALLS` is the table. Numbers are held against numpy and onnxruntime.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest

from sbonnx.errors import DataError, DeviceError, ModelError, RecipeError
from sbonnx.model import GraphVisitor, LifeCycleError, QuantizationErrorProfiler, QuantModel, SharedData, mse
from sbonnx.recipe import parse_qconfig, update_config
from sbonnx.spec import Array
from tests.ancestor.networks import residual_block
from tests.ancestor.qconfigs import SPARSEBIT_SCALES, virtual, written
from tests.models import run

torch = pytest.importorskip("torch")

IMAGES: Final = np.random.default_rng(3).standard_normal((8, 3, 8, 8)).astype(np.float32)
LO, HI = float(IMAGES.min()), float(IMAGES.max())
PLAIN: dict[str, Any] = {"rounding": "nearest", "bias_correction": "none"}


class Context:
    """A folder, and models at each step of the life cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = written(folder, virtual(8) + SPARSEBIT_SCALES)
        self._open: list[QuantModel] = []

    def model(self, **wishes: Any) -> Any:
        made: Any = QuantModel(residual_block(), parse_qconfig(self.config), **PLAIN, **wishes)
        self._open.append(made)
        return made

    def fed(self, **wishes: Any) -> Any:
        made = self.model(**wishes)
        made.prepare_calibration()
        made(torch.from_numpy(IMAGES))
        return made

    def calibrated(self, **wishes: Any) -> Any:
        made = self.fed(**wishes)
        made.calc_qparams()
        return made

    def quantized(self, **wishes: Any) -> Any:
        made = self.calibrated(**wishes)
        made.set_quant(w_quant=True, a_quant=True)
        return made

    def exported(self, name: str = "q.onnx") -> Array:
        """Outputs of an exported file in onnxruntime."""
        model = onnx.load(str(self.folder / name))
        (output,) = run(str(self.folder / name), {model.graph.input[0].name: IMAGES}).values()
        return np.asarray(output)

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Context]:
    context = Context(tmp_path)
    yield context
    context.close()


FLOAT = np.asarray(next(iter(run(residual_block(), {"x": IMAGES}).values())))
SCALE = (HI - LO) / 255
"""Of the input at 8 bits, affine."""

CALLS: dict[str, Callable[[Context], None]] = {}


def call(name: str) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    def enter(check: Callable[[Context], None]) -> Callable[[Context], None]:
        CALLS[name] = check
        return check

    return enter


# --- the configuration ----------------------------------------------------------------------------------


@call("parse_qconfig(path): upper-case keys, DEVICE")
def _(it: Context) -> None:
    config: Any = parse_qconfig(it.config)
    assert config.BACKEND == "virtual" and config.SCHEDULE.BN_TUNING is False
    assert config.A.QUANTIZER.TYPE == "uniform" and config.W.QUANTIZER.BIT == 8
    assert config.A.OBSERVER.MOVING_AVERAGE.EMA_RATIO == 0.9
    import onnxruntime

    gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    assert config.DEVICE == ("cuda" if gpu else "cpu")
    it.config.write_text(it.config.read_text() + "DEVICE: cpu\n")
    changed: Any = parse_qconfig(it.config)
    assert changed.DEVICE == "cpu"
    with pytest.raises(AttributeError):
        config.NO_SUCH_KEY  # noqa: B018


@call("update_config(config, key, value)")
def _(it: Context) -> None:
    config = parse_qconfig(it.config)
    assert update_config(config, "SCHEDULE.FUSE_BN", False).schedule.fuse_bn is False
    assert config.schedule.fuse_bn is True
    with pytest.raises(RecipeError, match="Did you mean"):
        update_config(config, "SCHEDULE.FUSE_BM", False)


# --- the life cycle -------------------------------------------------------------------------------------


@call("QuantModel(model, config)(tensor)")
def _(it: Context) -> None:
    model = it.model()
    for output in (
        model(torch.from_numpy(IMAGES)),
        model.forward(torch.from_numpy(IMAGES)),
        model(x=torch.from_numpy(IMAGES)),
        model.eval()(torch.from_numpy(IMAGES)),
    ):
        assert isinstance(output, torch.Tensor)
        np.testing.assert_allclose(output.numpy(), FLOAT, atol=1e-5)
    assert isinstance(model(IMAGES), dict), "arrays in, arrays by name out"
    with pytest.raises(DataError, match="the model has 1 inputs"):
        model(torch.zeros(1), torch.zeros(1))


@call(".to(device), .cuda(), .cpu(), .eval(), .train()")
def _(it: Context) -> None:
    model = it.fed()
    assert model.to("cpu") is model.cpu() is model.eval() is model.train() is model
    assert model.to(torch.device("cpu")).prepared.recipe.device == "cpu"
    model.calc_qparams()
    assert model.model.conv1.input_quantizer.scale == pytest.approx(SCALE, rel=1e-6), "what was fed counts"
    with pytest.raises(DeviceError, match="there is no device 'tpu'"):
        model.to("tpu")
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        for wish in (model.cuda, lambda: model.cuda(1), lambda: model.to("cuda")):
            with pytest.raises(DeviceError, match="CUDAExecutionProvider"):
                wish()


@call("prepare_calibration(), calc_qparams()")
def _(it: Context) -> None:
    model = it.calibrated()
    found = model.model.conv1.input_quantizer
    assert float(found.scale) == pytest.approx(SCALE, rel=1e-6)
    assert int(found.zero_point) == round(-LO / SCALE)


@call("calc_qparams(asym=True, w_quant=True, a_quant=True)")
def _(it: Context) -> None:
    plain, model = it.calibrated(w_bit=3, a_bit=3), it.fed(w_bit=3, a_bit=3, asym={"RANGES": True})
    model.calc_qparams(asym=True, w_quant=True, a_quant=True)
    assert model.model.conv1.input_quantizer.scale == plain.model.conv1.input_quantizer.scale
    assert model.model.fc.input_quantizer.scale != plain.model.fc.input_quantizer.scale


@call("set_quant(w_quant, a_quant)")
def _(it: Context) -> None:
    model = it.calibrated(w_bit=4)
    outputs = {}
    for switches in ((False, False), (True, False), (False, True), (True, True)):
        model.set_quant(*switches)
        outputs[switches] = float(np.abs(model(torch.from_numpy(IMAGES)).numpy() - FLOAT).max())
    assert outputs[False, False] < 1e-5 < outputs[False, True] < outputs[True, False]
    with pytest.raises(LifeCycleError):
        it.model().set_quant(w_quant=True)


@call("with batchnorm_tuning()")
def _(it: Context) -> None:
    """Where a batch norm was folded, each channel has its mean and deviation of the float network again."""
    it.config.write_text(it.config.read_text().replace("FUSE_BN: True", "BN_TUNING: True"))
    model = it.calibrated(w_bit=3)

    def statistics() -> Array:
        def hook_wrapper(node: Any, module: Any, storage: SharedData) -> list[Any] | None:
            def after(module: Any, inputs: tuple[Array, ...], output: Array) -> None:
                storage.set_value(node.name, "found", np.stack([output.mean((0, 2, 3)), output.std((0, 2, 3))]))

            return [module.register_forward_hook(after)] if node.name in ("/conv1/Conv", "/conv2/Conv") else None

        with GraphVisitor(model, hook_wrapper) as visitor:
            model(IMAGES)
        return np.asarray(list(visitor.storage.extract_value("found").values()))

    wanted = statistics()
    model.set_quant(w_quant=True, a_quant=True)
    before = np.abs(statistics() - wanted).max()
    with model.batchnorm_tuning():
        model(torch.from_numpy(IMAGES))
    model.set_quant(w_quant=True, a_quant=True)
    assert np.abs(statistics() - wanted).max() < 1e-3 < 0.01 < before


# --- layers and their quantizers ------------------------------------------------------------------------


@call("model.conv1.input_quantizer.set_bit(8), .weight_quantizer.set_bit(bit=8)")
def _(it: Context) -> None:
    model = it.fed(bits="w4a4")
    model.model.conv1.input_quantizer.set_bit(8)
    model.model.conv1.weight_quantizer.set_bit(bit=6)
    model.set_bit("fc", 5)
    model.set_bit("skip", 3, side="weight")
    model.calc_qparams()
    bits = {name: (one.input_quantizer.bit, one.weight_quantizer.bit) for name, one in model.named_modules()}
    assert bits == {"conv1": (8, 6), "conv2": (4, 4), "skip": (4, 3), "gap": (4, 0), "fc": (5, 5)}
    assert float(model.model.conv1.input_quantizer.scale) == pytest.approx(SCALE, rel=1e-6), "observed at 8 bits"
    assert float(model.model.skip.input_quantizer.scale) == pytest.approx((HI - LO) / 15, rel=1e-6)
    with pytest.raises(LifeCycleError, match="before calc_qparams"):
        model.model.conv1.input_quantizer.set_bit(4)
    with pytest.raises(RecipeError, match=r"no layer 'conv9'\. Nearest: "):
        model.set_bit("conv9", 8)
    with pytest.raises(AttributeError, match="no layer 'conv9'"):
        model.model.conv9  # noqa: B018
    model.prepare_calibration()
    with pytest.raises(RecipeError, match="a whole number of bits from 2 to 16, got 99"):
        model.set_bit("conv1", 99)


@call("set_lastmodule_wbit(bit=8)")
def _(it: Context) -> None:
    model = it.fed(bits="w4a4")
    model.set_lastmodule_wbit(bit=8)
    model.calc_qparams()
    assert (model.model.fc.weight_quantizer.bit, model.model.conv2.weight_quantizer.bit) == (8, 4)


@call("quantizer.set_symmetric(), .is_symmetric, .is_perchannel, .ch_axis")
def _(it: Context) -> None:
    model = it.fed()
    quantizer = model.model.conv1.input_quantizer
    assert not quantizer.is_symmetric and not quantizer.is_perchannel and quantizer.ch_axis is None
    assert model.model.conv1.weight_quantizer.is_perchannel and model.model.conv1.weight_quantizer.ch_axis == 0
    quantizer.set_symmetric(True)
    model.calc_qparams()
    assert quantizer.is_symmetric
    assert float(quantizer.scale) == pytest.approx(2 * max(-LO, HI) / 255, rel=1e-6), "the ancestor's rule"
    assert int(quantizer.zero_point) == 0


@call("quantizer.enable_quant(), .disable_quant(), .is_enable")
def _(it: Context) -> None:
    model = it.quantized(bits="w3a3")
    both = model(IMAGES)["y"]
    model.model.conv2.weight_quantizer.disable_quant()
    assert not model.model.conv2.weight_quantizer.is_enable and model.model.conv2.input_quantizer.is_enable
    without = model(IMAGES)["y"]
    assert np.abs(both - without).max() > 1e-3
    model.model.conv2.weight_quantizer.enable_quant()
    np.testing.assert_array_equal(model(IMAGES)["y"], both)
    model.set_quant(False, False)
    model.enable_quant("conv2", "weight")
    alone = model(IMAGES)["y"]
    assert 1e-3 < np.abs(alone - FLOAT).max() < np.abs(both - FLOAT).max()
    model.disable_quant("*")
    np.testing.assert_allclose(model(IMAGES)["y"], FLOAT, atol=1e-5)
    model.export_onnx(it.folder / "q.onnx")
    np.testing.assert_allclose(it.exported(), both, atol=1e-5, err_msg="a file has all quantizers")


@call("layer.set_quant(w_quant, a_quant)")
def _(it: Context) -> None:
    model = it.calibrated(bits="w3a3")
    for name, _ in model.named_modules():
        model.model[name].set_quant(w_quant=True, a_quant=True)
    one_by_one = model(IMAGES)["y"]
    model.set_quant(True, True)
    np.testing.assert_array_equal(model(IMAGES)["y"], one_by_one)


@call("quantizer.set_fake_fused(), layer.set_fake_fused()")
def _(it: Context) -> None:
    model = it.fed()
    model.model.conv2.set_fake_fused()
    model.model.fc.input_quantizer.set_fake_fused()
    model.calc_qparams()
    model.export_onnx(it.folder / "q.onnx")
    readers = {name: node for node in onnx.load(str(it.folder / "q.onnx")).graph.node for name in node.input}
    assert readers["conv2.weight"].name == "/conv2/Conv", "a float weight"
    assert model.model.conv2.input_quantizer.fake_fused and not model.model.conv1.input_quantizer.fake_fused
    with pytest.raises(RecipeError, match="stays float"):
        model.model.fc.input_quantizer.scale  # noqa: B018


@call("custom_fuse_list")
def _(it: Context) -> None:
    ops = [[node.op for node in it.model(custom_fuse_list=names).prepared.graph.nodes] for names in ([], ["fuse_bn"])]
    assert "BatchNormalization" in ops[0] and "BatchNormalization" not in ops[1]
    readers = [
        {reader.node for site in it.model(custom_fuse_list=names).prepared.plan.sites for reader in site.readers}
        for names in (["fuse_bn"], ["fuse_bn", "disable_unnecessary_quant"])
    ]
    assert readers[0] - readers[1] == {"/relu1/Relu", "/relu2/Relu"}, "pairs before activations"
    with pytest.raises(RecipeError, match="there is no fusion 'fuse_nb'"):
        it.model(custom_fuse_list=["fuse_nb"])


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
    from contextlib import redirect_stdout

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


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str, it: Context) -> None:
    CALLS[name](it)
