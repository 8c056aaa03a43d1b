"""The ancestor's calls of configuration, life cycle and single layers, each with what it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
import torch

import sbonnx
from sbonnx import quantization, sparse
from sbonnx.errors import DataError, DeviceError, ModelError, RecipeError
from sbonnx.quant_model import GraphVisitor, LifeCycleError, QuantModel, SharedData
from sbonnx.recipe import parse_qconfig, update_config
from sbonnx.spec import Array
from tests.ancestor.networks import residual_block
from tests.ancestor.qconfigs import SPARSEBIT, virtual, written
from tests.support.models import run

IMAGES: Final = np.random.default_rng(3).standard_normal((8, 3, 8, 8)).astype(np.float32)
LO, HI = float(IMAGES.min()), float(IMAGES.max())
PLAIN: dict[str, Any] = {"rounding": "nearest", "bias_correction": "none"}


class Context:
    """A folder, and models at each step of the life cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = written(folder, virtual(8) + SPARSEBIT)
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
    """Channels of folded batch norms have the mean and deviation of the float network again."""
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


@call("quantizer.calc_qparams_with_minmax(min_val, max_val)")
def _(it: Context) -> None:
    model = it.fed()
    quantizer = model.model.conv2.input_quantizer
    scale, zero_point = quantizer.calc_qparams_with_minmax(torch.tensor(-1.0), torch.tensor(3.0))
    model.calc_qparams()
    assert float(quantizer.scale) == float(scale) == pytest.approx(4 / 255, rel=1e-6)
    assert int(quantizer.zero_point) == int(zero_point) == 64
    with pytest.raises(LifeCycleError, match="before calc_qparams"):
        quantizer.calc_qparams_with_minmax(0.0, 1.0)
    with pytest.raises(RecipeError, match="a scale for each channel"):
        it.fed().model.conv1.weight_quantizer.calc_qparams_with_minmax(0.0, 1.0)


@call("quantizer.update_observer(x), .calc_qparams()")
def _(it: Context) -> None:
    model = it.fed()
    quantizer = model.model.conv2.input_quantizer
    with pytest.raises(LifeCycleError, match="update_observer"):
        quantizer.calc_qparams()
    quantizer.update_observer(torch.tensor([-2.0, 1.0]))
    quantizer.update_observer(np.array([4.0, 0.5], np.float32))
    scale, _ = quantizer.calc_qparams()
    model.calc_qparams()
    assert float(quantizer.scale) == float(scale) == pytest.approx(6 / 255, rel=1e-6)


@call("quantizer.set_backend(backend), .enable_export_onnx(), .disable_export_onnx()")
def _(it: Context) -> None:
    model = it.quantized()
    quantizer = model.model.conv1.input_quantizer
    quantizer.set_backend(model.prepared.backend.name)
    quantizer.enable_export_onnx()
    quantizer.disable_export_onnx()
    with pytest.raises(RecipeError, match="one backend"):
        quantizer.set_backend("tensorrt")


@call("QuantModel(torch module)")
def _(it: Context) -> None:
    with pytest.raises(ModelError, match=r"Linear is a torch module, .* files: torch\.onnx\.export\(model, "):
        QuantModel(torch.nn.Linear(2, 2))


@call("from sparsebit.quantization import ..., from sparsebit.sparse import SparseModel, parse_sconfig")
def _(it: Context) -> None:
    assert quantization.QuantModel is QuantModel and quantization.parse_qconfig is sbonnx.parse_qconfig
    path = it.folder / "sconfig.yaml"
    path.write_text("SPARSER: {TYPE: structed, STRATEGY: l1norm, RATIO: 0.5}\n")
    with sparse.SparseModel(residual_block(), sparse.parse_sconfig(path)).to("cpu") as model:
        model.calc_params()
        assert model(IMAGES)["y"].shape == FLOAT.shape
    path.write_text("W: {QUANTIZER: {BIT: 8}}\n")
    with pytest.raises(RecipeError, match="prunes nothing"):
        sparse.parse_sconfig(path)


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
