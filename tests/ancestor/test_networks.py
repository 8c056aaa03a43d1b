"""The networks of the ancestor's tests, with its configurations, and numbers asserted.

The ancestor compared the converted network with quantization off, and let everything else pass that did not raise.
Here each is also quantized: the error has a bound (some decibels below what was measured), the exported file
gives in onnxruntime what `QuantModel` gives, at every level of optimisation it is close, and the pairs are where
they belong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.metrics import sqnr_db
from sbonnx.quant_model import QuantModel
from sbonnx.spec import Array
from tests.ancestor import networks
from tests.ancestor.networks import DEIT_BLOCKS
from tests.ancestor.qconfigs import TENSORRT_8_8, Placed, placed, random_feeds, virtual, written
from tests.support.models import run

TOLERANCE = 1e-4
"""Of the ancestor's tests, absolute and relative, with quantization off."""

ROUNDING = 1e-6
"""Of float sums that are taken in another order, relative to the largest output; far below one code."""


def quantized(
    model: onnx.ModelProto, text: str, feeds: dict[str, Array], folder: Path, *, decibels: float
) -> tuple[onnx.ModelProto, Placed]:
    """Calibrate on `feeds`, check the numbers on every way to run the model, and give the exported file.

    Args:
        decibels: what the signal to noise must reach.
    """
    path = folder / "quantized.onnx"
    (expected,) = run(model, feeds).values()
    with QuantModel(model, written(folder, text), device="cpu") as one:
        one.prepare_calibration()
        (off,) = one(feeds).values()
        np.testing.assert_allclose(off, expected, rtol=TOLERANCE, atol=TOLERANCE)
        one.calc_qparams()
        one.set_quant(w_quant=True, a_quant=True)
        (on,) = one(feeds).values()
        one.export_onnx(path)
    onnx.checker.check_model(str(path), full_check=True)
    assert sqnr_db(expected, on) > decibels
    (exported,) = run(str(path), feeds).values()
    np.testing.assert_allclose(exported, on, rtol=0, atol=ROUNDING * float(np.abs(on).max()))
    (optimised,) = run(str(path), feeds, level="all").values()
    assert sqnr_db(expected, optimised) > decibels
    made = onnx.load(str(path))
    return made, placed(made)


EVERY_LAYER = TENSORRT_8_8 + "HEADS: none\n"
"""Outputs of networks with random weights hardly differ between samples: layers would stay float to keep that."""

# --- attention ------------------------------------------------------------------------------------------

MHSA = {"x": ["/qkv/MatMul"], "/Reshape_1_output_0": ["/proj/MatMul"]}


def test_mhsa(tmp_path: Path) -> None:
    """TensorRT: the two Linears; products of two activations stay float."""
    model = networks.mhsa()
    _, found = quantized(model, TENSORRT_8_8, random_feeds(model), tmp_path, decibels=33)
    assert found.activations == MHSA
    assert sorted(found.weights.values()) == [["/proj/MatMul"], ["/qkv/MatMul"]]


@pytest.mark.parametrize(
    "text", [TENSORRT_8_8 + "QUANTIZE_INPUTS_OF: {MATMUL: True}\n", virtual()], ids=["wish", "virtual"]
)
def test_mhsa_with_quantized_products(text: str, tmp_path: Path) -> None:
    """Both inputs of both products, each with a scale of its own; scale and softmax between them stay float."""
    model = networks.mhsa()
    made, found = quantized(model, text, random_feeds(model), tmp_path, decibels=32)
    products = {
        "/Gather_3_output_0": ["/MatMul"],
        "/Transpose_1_output_0": ["/MatMul"],
        "/Softmax_output_0": ["/MatMul_1"],
        "/Gather_5_output_0": ["/MatMul_1"],
    }
    assert found.activations == MHSA | products
    assert len({tuple(numbers.input[1:]) for numbers in made.graph.node if numbers.op_type == "QuantizeLinear"}) == 6


@pytest.mark.slow
def test_deit_tiny(tmp_path: Path) -> None:
    """A patch embedding, 12 blocks and a head, two images of 224 pixels: every Linear, nothing inside a norm."""
    model = networks.deit_tiny()
    _, found = quantized(model, EVERY_LAYER, random_feeds(model), tmp_path, decibels=25)
    expected = {"/Gather_1_output_0": ["/head/Gemm"]}  # the embedding reads 3 channels: it stays float
    for index in range(DEIT_BLOCKS):
        at = f"/blocks/blocks.{index}"
        expected |= {
            f"{at}/norm1/Add_1_output_0": [f"{at}/attn/qkv/MatMul"],
            f"{at}/attn/Reshape_1_output_0": [f"{at}/attn/proj/MatMul"],
            f"{at}/norm2/Add_1_output_0": [f"{at}/mlp/fc1/MatMul"],
            f"{at}/mlp/act/Mul_1_output_0": [f"{at}/mlp/fc2/MatMul"],
        }
    assert found.activations == expected
    assert len(found.weights) == len(expected)


# --- add ------------------------------------------------------------------------------------------------

ADD_INPUTS = {"/conv1/Conv_output_0": ["/Add"], "/conv2/Conv_output_0": ["/Add"]}


@pytest.mark.parametrize("qadd", [True, False])
def test_qadd(qadd: bool, tmp_path: Path) -> None:
    """Both inputs of the add when it is asked for, neither when not."""
    model = networks.qadd()
    _, found = quantized(model, virtual(qadd=qadd), random_feeds(model), tmp_path, decibels=33)
    assert found.activations == {"x": ["/conv1/Conv", "/conv2/Conv"]} | (ADD_INPUTS if qadd else {})


def test_qadd_for_tensorrt(tmp_path: Path) -> None:
    """One of the two convolutions fuses with the add, which wants it float: the other input alone has a pair."""
    model = networks.qadd()
    text = TENSORRT_8_8 + "  QADD:\n    ENABLE_QUANT: True\n"
    _, found = quantized(model, text, random_feeds(model), tmp_path, decibels=33)
    assert found.activations == {"x": ["/conv1/Conv", "/conv2/Conv"], "/conv2/Conv_output_0": ["/Add"]}


# --- calibration ----------------------------------------------------------------------------------------

WAYS = {
    "plain": {},
    "asym with w": {"asym": True, "w_quant": True},
    "asym with a": {"asym": True, "a_quant": True},
    "asym with both": {"asym": True, "w_quant": True, "a_quant": True},
}


@pytest.mark.slow
def test_calibration_on_resnet18(tmp_path: Path) -> None:
    """Four random images, four ways; with asym only ranges behind the first quantized layer move, and by little."""
    model = networks.resnet18()
    feeds = {"input": np.random.default_rng(0).standard_normal((4, 3, 64, 64)).astype(np.float32)}
    (expected,) = run(model, feeds).values()
    found = {}
    with QuantModel(model, written(tmp_path, EVERY_LAYER + "EFFORT: fast\n")) as one:
        for way, flags in WAYS.items():
            one.prepare_calibration()
            (off,) = one(feeds).values()
            np.testing.assert_allclose(off, expected, rtol=TOLERANCE, atol=TOLERANCE)
            found[way] = one.calc_qparams(**flags)
            path = tmp_path / f"{way}.onnx"
            one.export_onnx(path)
            (output,) = run(str(path), feeds, level="all").values()
            assert sqnr_db(expected, output) > 24, way
    plain = found["plain"]
    assert len(plain.codes) == 20 and len(plain.qparams) == 41, "all but the stem, which reads 3 channels"
    for way, other in found.items():
        assert other.qparams.keys() == plain.qparams.keys()
        moved = set()
        for key, numbers in plain.qparams.items():
            np.testing.assert_allclose(numbers.scale, other.qparams[key].scale, rtol=0.1, err_msg=f"{way}, {key}")
            if not np.array_equal(numbers.scale, other.qparams[key].scale):
                moved.add(key)
        assert bool(moved) == (way != "plain") and not moved & plain.codes.keys(), way
        for key, codes in plain.codes.items():
            assert np.array_equal(codes, other.codes[key]), (way, key)


@pytest.mark.slow
def test_placement_on_resnet18(tmp_path: Path) -> None:
    """All weighted layers but the stem read pairs; the skip branch of each add reads the pair of the block's input."""
    model = networks.resnet18()
    feeds = {"input": np.random.default_rng(0).standard_normal((4, 3, 64, 64)).astype(np.float32)}
    nearest = EVERY_LAYER.replace("W:\n", "W:\n  ROUNDING: nearest\n")  # codes do not move pairs
    made, found = quantized(model, nearest, feeds, tmp_path, decibels=24)
    ops = [node.op_type for node in made.graph.node]
    assert not {"BatchNormalization", "Identity", "Constant"} & set(ops), "folded"
    assert ops.count("Conv") + ops.count("Gemm") == len(found.weights) + 1 == 21
    adds = sorted(name for readers in found.activations.values() for name in readers if name.endswith("/Add"))
    assert len(adds) == len(set(adds)) == 8, "one input of each add"
    assert found.activations["/maxpool/MaxPool_output_0"] == ["/layer1/layer1.0/Add", "/layer1/layer1.0/conv1/Conv"]
    assert found.activations["/layer2/layer2.0/downsample/downsample.1/BatchNormalization_output_0"] == [
        "/layer2/layer2.0/Add"
    ]


# --- extra info -----------------------------------------------------------------------------------------


def check_extra_info(model: onnx.ModelProto, feeds: dict[str, Array], folder: Path, pairs: int) -> None:
    """4 bits throughout, adds too: in `__bits` in the file that runs, in `bits` in the one beside it."""
    import onnxruntime as ort

    path = folder / "resnet20.onnx"
    with QuantModel(model, written(folder, virtual(4, qadd=True))) as one:
        one.prepare_calibration()
        one(feeds)
        one.calc_qparams()
        one.set_quant(w_quant=True, a_quant=True)
        (expected,) = one(feeds).values()
        extra = one.export_onnx(path, extra_info=True)
    assert extra == folder / "resnet20_extra.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    (output,) = run(str(path), feeds).values()
    np.testing.assert_allclose(output, expected, rtol=0, atol=ROUNDING * float(np.abs(expected).max()))
    found = placed(onnx.load(str(path)))
    assert found.bits == {"QuantizeLinear": {4}, "DequantizeLinear": {4}}
    assert (len(found.activations), len(found.weights)) == (pairs, 20)
    tagged = onnx.load(str(extra))
    kinds = ("QuantizeLinear", "DequantizeLinear")
    pair = [node for node in tagged.graph.node if node.op_type in kinds and not node.input[0].endswith("_mantissa")]
    values = [[a.i for a in node.attribute if a.name == "bits"] for node in pair]
    assert values == [[4]] * (2 * pairs + 20), "both nodes of a pair, and the one of a weight"
    with pytest.raises(onnx.checker.ValidationError, match="bits"):
        onnx.checker.check_model(str(extra))
    with pytest.raises(Exception, match="Unrecognized attribute: bits"):
        ort.InferenceSession(str(extra), providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_extra_info(tmp_path: Path) -> None:
    """A hand-built ResNet-20: 20 inputs of weighted layers, one pool, and what the adds read beside."""
    model = networks.resnet20()
    feeds = {"input": np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)}
    check_extra_info(model, feeds, tmp_path, pairs=32)


@pytest.mark.slow
def test_extra_info_of_a_trained_network(pack: Path, tmp_path: Path) -> None:
    model = onnx.load(str(pack / "models" / "cifar_resnet20.onnx"))
    (value,) = model.graph.input
    images = np.load(pack / "data" / "cifar_calib.npz")["X"][:8].astype(np.float32) / 255
    normal = (images - np.asarray([0.485, 0.456, 0.406])) / np.asarray([0.229, 0.224, 0.225])
    feeds = {value.name: np.ascontiguousarray(normal.transpose(0, 3, 1, 2), np.float32)}
    check_extra_info(model, feeds, tmp_path, pairs=32)


# --- embeddings -----------------------------------------------------------------------------------------

TABLES = ("word_embeddings", "token_type_embeddings", "position_embeddings")


def ids() -> dict[str, Array]:
    """(1, 32) of words and token types."""
    rng = np.random.default_rng(0)
    return {"input_ids": rng.integers(0, 1000, (1, 32)), "token_type_ids": rng.integers(0, 2, (1, 32))}


def test_bert_embeddings(tmp_path: Path) -> None:
    """TensorRT gathers float rows, and runs LayerNorm in float: nothing is quantized, and the output is the same."""
    model = networks.bert_embeddings()
    made, found = quantized(model, TENSORRT_8_8, ids(), tmp_path, decibels=100)
    assert found == Placed({}, {}, {})
    (expected,), (output,) = run(model, ids()).values(), run(made, ids()).values()
    assert np.array_equal(expected, output)


@pytest.mark.parametrize("wish", ["", "QUANTIZE_INPUTS_OF: {EMBEDDING: True}\n"], ids=["virtual", "tensorrt"])
def test_bert_embeddings_by_row(wish: str, tmp_path: Path) -> None:
    """The ancestor's rule: one symmetric scale a row, on every table, read by the Gather; ids are left alone."""
    model = networks.bert_embeddings("sequence")
    text = TENSORRT_8_8 + wish if wish else virtual()
    made, found = quantized(model, text, ids(), tmp_path, decibels=38)
    norm = {"/embeddings/Add_1_output_0": ["/embeddings/LayerNorm/ReduceMean", "/embeddings/LayerNorm/Sub"]}
    assert found.activations == ({} if wish else norm)
    assert found.weights == {
        f"embeddings.{table}.weight_quantized": [f"/embeddings/{table}/Gather"] for table in TABLES
    }
    values = {one.name: numpy_helper.to_array(one) for one in made.graph.initializer}
    originals = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    for table in TABLES:
        name = f"embeddings.{table}.weight"
        rows = originals[name]
        scale = np.maximum(rows.max(1) / 127, -rows.min(1) / 128)
        assert values[f"{name}_scale"] == pytest.approx(scale, rel=1e-6)
        codes = np.rint(rows / values[f"{name}_scale"][:, None])
        assert np.array_equal(values[f"{name}_quantized"], codes.astype(np.int8))


@pytest.mark.parametrize(("simplify", "tables"), [(True, TABLES[:2]), (False, TABLES)])
def test_bert_embeddings_of_fixed_length(simplify: bool, tables: tuple[str, ...], tmp_path: Path) -> None:
    """With the length fixed, the positions are a constant: folded and added in float, unless nothing is simplified."""
    model = networks.bert_embeddings()
    _, found = quantized(model, f"{virtual()}SIMPLIFY: {simplify}\n", ids(), tmp_path, decibels=38)
    assert sorted(found.weights) == sorted(f"embeddings.{table}.weight_quantized" for table in tables)


def test_norms_are_disabled_by_name(tmp_path: Path) -> None:
    """As the ancestor's examples do; a norm of nine nodes is found by any of their names."""
    model = networks.bert_embeddings("sequence")
    text = virtual().rstrip() + '\n  SPECIFIC: [{"*LayerNorm*": ["QUANTIZER.DISABLE", True]}]\n'
    _, found = quantized(model, text, ids(), tmp_path, decibels=38)
    assert not found.activations
    assert len(found.weights) == len(TABLES)
