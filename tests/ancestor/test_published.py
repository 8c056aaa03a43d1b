"""The recipes of the ancestor's examples, rebuilt on ONNX: each runs to a file that onnxruntime runs.

Values are those of its YAML files on the main branch; networks have the module names that those files use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
import yaml

from sbonnx import quantize
from sbonnx.metrics import sqnr_db
from sbonnx.quant_model import QuantModel
from sbonnx.recipe import parse_qconfig
from sbonnx.spec import Array
from tests.ancestor import examples
from tests.ancestor.networks import residual_block
from tests.ancestor.qconfigs import placed, random_feeds
from tests.support.models import run

Recipe = dict[str, Any]


def ptq(backend: str = "tensorrt", *, observer: str = "MINMAX", layout: str = "NCHW", **parts: Any) -> Recipe:
    """8 bits on both sides; `parts`: SPECIFIC of both sides, and of SCHEDULE."""
    scheme = "symmetric" if backend == "tensorrt" else "affine"
    return {
        "BACKEND": backend,
        "SCHEDULE": {"FUSE_BN": True, **parts.get("schedule", {})},
        "W": {
            "QSCHEME": "per-channel-symmetric",
            "QUANTIZER": {"TYPE": "uniform", "BIT": 8},
            "OBSERVER": {"TYPE": "MINMAX"},
            **({"SPECIFIC": [parts["w"]]} if "w" in parts else {}),
        },
        "A": {
            "QSCHEME": f"per-tensor-{scheme}",
            "QUANTIZER": {"TYPE": "uniform", "BIT": 8},
            "OBSERVER": {"TYPE": observer, "LAYOUT": layout},
            **({"SPECIFIC": [parts["a"]]} if "a" in parts else {}),
        },
    }


def qat(weights: str, activations: str, bit: int = 4, **parts: Any) -> Recipe:
    """Both sides learned; `parts`: SPECIFIC of both sides, observer of activations, modules that are skipped."""
    found: Recipe = {
        "BACKEND": "virtual",
        "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": weights, "BIT": bit}},
        "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": activations, "BIT": bit}},
    }
    for side in "wa":
        if side in parts:
            found[side.upper()]["SPECIFIC"] = [parts[side]]
    if "observer" in parts:
        found["A"]["OBSERVER"] = {"TYPE": parts["observer"], "LAYOUT": "NCHW"}
    if "skip" in parts:
        found["SKIP_TRACE_MODULES"] = parts["skip"]
    return found


OFF, ZERO = ["QUANTIZER.DISABLE", True], ["QUANTIZER.BIT", 0]
EIGHT = ["QUANTIZER.BIT", 8]
LAPLACE = ["OBSERVER.TYPE", "aciq", "OBSERVER.ACIQ.DISTRIBUTION", "laplace"]
DEIT_NORMS = ("*norm1", "*norm2", "norm", "*norm")
TEXT_OFF = {"*layer_norm": OFF, "softmax*": OFF}

PTQ: Final[dict[str, tuple[Recipe, Callable[[], onnx.ModelProto]]]] = {
    "imagenet1k/basecase": (ptq(), residual_block),
    "imagenet1k/basecase, bn_tuning": (ptq(schedule={"BN_TUNING": True}), residual_block),
    "imagenet1k/deit": (
        ptq(
            layout="NLC",
            a={"patch_embed_proj": ["OBSERVER.LAYOUT", "NCHW"], "head": ["OBSERVER.LAYOUT", "NCHW"]},
        ),
        lambda: examples.transformer(examples.DEIT),
    ),
    "coco2017/yolo": (ptq("virtual"), residual_block),
    "coco2017/DETR": (ptq(w={"bbox_embed_layers_1": LAPLACE, "bbox_embed_layers_2": LAPLACE}), examples.detection_head),
    "GLUE/CoLA": (ptq(a=TEXT_OFF), lambda: examples.transformer(examples.BERT)),
    "SQuAD": (ptq(observer="MSE", a=TEXT_OFF), lambda: examples.transformer(examples.BERT)),
    "wikitext": (
        ptq(
            observer="MSE",
            layout="NLC",
            a={"*ln*": OFF, "softmax*": OFF, "lm_head": ["OBSERVER.TYPE", "ACIQ", *LAPLACE[2:]]},
        ),
        lambda: examples.transformer(examples.GPT2),
    ),
}


def bev(stem: str, *quants: str, encoders: tuple[str, ...] = ()) -> Recipe:
    """4 bits; 8 for the first layer, behind the view transformer, in front of the encoders and in the heads' last."""
    names = [
        f"{encoder}_layers_0_0_{part}"
        for encoder in (*encoders, "bev_encoder_backbone")
        for part in ("conv1", "downsample")
    ]
    heads = "head_task_heads_*_1"
    skip = ["img_view_transformer", *(["shift_feature"] if encoders else [])]
    activations = dict.fromkeys((stem, *quants, *names, heads), EIGHT)
    return qat("lsq", "lsq", w={stem: EIGHT, heads: EIGHT}, a=activations, skip=skip)


R50, VOV = "img_backbone_conv1", "img_backbone_stem_stem_1_conv"
DEPTH_QUANTS = ("img_view_transformer_featnet_quant", "img_view_transformer_depth_quant")
DET_QUANT = "img_view_transformer_quant"

QAT: Final[dict[str, tuple[Recipe, Callable[[], onnx.ModelProto]]]] = {
    "cifar10, imagenet1k: lsq": (qat("lsq", "lsq"), residual_block),
    "cifar10: pact": (qat("dorefa", "pact"), residual_block),
    "imagenet1k: lsq+": (qat("lsq", "lsq+", observer="MSE"), residual_block),
    "efficientnet-lite: dorefa": (qat("dorefa", "dorefa"), residual_block),
    "DETR: lsq, 8 bits": (qat("lsq", "lsq", 8), examples.detection_head),
    "deit": (
        qat(
            "lsq",
            "lsq",
            a={**dict.fromkeys(DEIT_NORMS, ZERO), "softmax": ZERO},
            skip=[f"blocks.{number}.drop_path" for number in range(12)],
        ),
        lambda: examples.transformer(examples.DEIT),
    ),
    "deit: lsq": (
        qat("lsq", "lsq", a={**dict.fromkeys(DEIT_NORMS, ZERO), "*softmax*": ZERO}, skip=["blocks.*.drop_path"]),
        lambda: examples.transformer(examples.DEIT),
    ),
    "deit: gelu_lsqplus": (
        qat(
            "lsq",
            "lsq",
            a={"*mlp_fc2": ["QUANTIZER.TYPE", "lsq+"], **dict.fromkeys(DEIT_NORMS, OFF), "*softmax*": OFF},
            skip=["blocks.*.drop_path"],
        ),
        lambda: examples.transformer(examples.DEIT),
    ),
    "bevdepth: r50, 4 bits": (bev(R50, *DEPTH_QUANTS), lambda: examples.birds_eye("img_backbone.conv1", DEPTH_QUANTS)),
    "bevdepth: r50, 8 bits": (
        qat("lsq", "lsq", 8, skip=["img_view_transformer"]),
        lambda: examples.birds_eye("img_backbone.conv1", DEPTH_QUANTS),
    ),
    "bevdepth: vov": (
        bev(VOV, *DEPTH_QUANTS),
        lambda: examples.birds_eye("img_backbone.stem.stem_1/conv", DEPTH_QUANTS),
    ),
    "bevdet: r50": (bev(R50, DET_QUANT), lambda: examples.birds_eye("img_backbone.conv1", [DET_QUANT])),
    "bevdet: vov": (bev(VOV, DET_QUANT), lambda: examples.birds_eye("img_backbone.stem.stem_1/conv", [DET_QUANT])),
    "bevdet4d: r50": (
        bev(R50, DET_QUANT, encoders=("pre_process_net",)),
        lambda: examples.birds_eye("img_backbone.conv1", [DET_QUANT], ["pre_process_net"]),
    ),
}


def file_of(folder: Path, recipe: Mapping[str, Any]) -> Path:
    """The recipe as a YAML file."""
    path = folder / "qconfig.yaml"
    path.write_text(yaml.safe_dump(dict(recipe)))
    return path


def decibels(model: onnx.ModelProto, path: Path, feeds: Mapping[str, Array]) -> float:
    """Signal to noise of the file against the float model, the worst output."""
    expected, found = run(model, dict(feeds)), run(str(path), dict(feeds))
    return min(sqnr_db(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("name", PTQ)
def test_post_training(name: str, tmp_path: Path) -> None:
    recipe, network = PTQ[name]
    model, path = network(), tmp_path / "q.onnx"
    feeds = random_feeds(model)
    report = quantize(model, feeds, recipe=file_of(tmp_path, recipe), output=path, verify=False)
    assert decibels(model, path, feeds) > 20
    assert placed(onnx.load(str(path))).weights
    assert not [refusal for refusal in report.refusals if refusal.what == "skip"]


QUICK: Final = {"cifar10: pact", "imagenet1k: lsq+", "deit: gelu_lsqplus", "bevdet4d: r50"}
"""One of each kind; the others are run with the slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in QAT]
)
def test_training(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from sbonnx import qat as training

    recipe, network = QAT[name]
    model, path = network(), tmp_path / "q.onnx"
    feeds = random_feeds(model)
    module = training.prepare(model, feeds, file_of(tmp_path, recipe), rounding="nearest")
    training.train(module, feeds, epochs=1, batch=2, lr=0.01)
    training.export(module, path, verify=False)
    assert decibels(model, path, feeds) > 3
    found = {node.name: node for node in onnx.load(str(path)).graph.node}
    for skipped in ("/img_view_transformer/depthnet/Conv", "/blocks/blocks.0/norm1/LayerNormalization"):
        if skipped in found:
            producers = {name: node.op_type for node in found.values() for name in node.output}
            assert "DequantizeLinear" not in {producers.get(name) for name in found[skipped].input}


def test_widths_reach_the_layers(tmp_path: Path) -> None:
    """Width of inputs and weight by layer, of a recipe that names layers as torch.fx does."""
    recipe, network = QAT["bevdet4d: r50"]
    with QuantModel(network(), parse_qconfig(file_of(tmp_path, recipe))) as model:
        bits = {name: (one.input_quantizer.bit, one.weight_quantizer.bit) for name, one in model.named_modules()}
    encoders = ("pre_process_net", "bev_encoder_backbone")
    heads = ("head_task_heads_0_reg", "head_task_heads_1_heatmap")
    expected = {"img_backbone_conv1": (8, 8)}
    for encoder in encoders:
        expected |= {
            f"{encoder}_layers_0_0_conv1": (8, 4),
            f"{encoder}_layers_0_0_conv2": (4, 4),
            f"{encoder}_layers_0_0_downsample": (8, 4),
        }
    for head in heads:
        expected |= {f"{head}_0_conv": (4, 4), f"{head}_1": (8, 8)}
    assert bits == expected


def test_the_script_of_imagenet(tmp_path: Path) -> None:
    """Its steps in their order: parse, convert, calibrate by a loader, tune batch norms, evaluate, export."""
    torch = pytest.importorskip("torch")
    recipe, network = PTQ["imagenet1k/basecase, bn_tuning"]
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, torch.arange(16) % 10), batch_size=4)
    qconfig: Any = parse_qconfig(file_of(tmp_path, recipe))
    qmodel: Any = QuantModel(network(), config=qconfig)
    if qconfig.DEVICE == "cuda":
        qmodel.cuda()

    def forward() -> None:
        with torch.no_grad():
            for batch, _ in loader:
                qmodel(batch)

    qmodel.prepare_calibration()
    qmodel.eval()
    forward()
    qmodel.calc_qparams()
    assert qconfig.SCHEDULE.BN_TUNING
    with qmodel.batchnorm_tuning():
        forward()
    qmodel.set_quant(w_quant=True, a_quant=True)
    classes = torch.cat([qmodel(batch).argmax(1) for batch, _ in loader])
    qmodel.export_onnx(torch.randn(1, 3, 8, 8), name=str(tmp_path / "q.onnx"), dynamic_axes={"x": [0]})
    (scores,) = run(str(tmp_path / "q.onnx"), {"x": images.numpy()}).values()
    assert np.array_equal(np.asarray(scores).argmax(1), classes.numpy())
    assert qconfig.DEVICE in ("cpu", "cuda")
    qmodel.close()
