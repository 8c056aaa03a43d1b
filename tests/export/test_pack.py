"""Modes and forms on trained models: numbers of onnxruntime's own tools on the same model, and the pack's metrics."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.spec import Array
from tests.support.models import run
from tests.support.writing import both_forms, kernels, ops, sqnr, without_data

pytestmark = pytest.mark.slow

CONVOLUTIONAL = ("cifar_resnet20", "squeezenet11", "mobilenetv2_tin200", "ultraface_rfb320")
FEEDS = 8
SENTENCES = 200
"""Pairs of sentences of an evaluation: a fifth of all, the same for both files."""


@pytest.fixture(scope="module")
def measure(pack: Path) -> ModuleType:
    """The pack's own `eval.py`."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calibration(measure: ModuleType, name: str) -> list[dict[str, Array]]:
    return list(islice(measure.load_calib(name), FEEDS))


@pytest.fixture(scope="module")
def encoder(measure: ModuleType) -> str:
    return str(measure.model_path("minilm_l6"))


def test_dynamic_is_what_onnxruntimes_own_tool_makes(measure: ModuleType, encoder: str, tmp_path: Path) -> None:
    """The same kernels, as many of each, and no less of the metric."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made, refusals = without_data(encoder, mode="dynamic")
    assert {refusal.why for refusal in refusals} == {"it multiplies two activations"}
    ours, theirs = tmp_path / "ours.onnx", tmp_path / "theirs.onnx"
    onnx.save(made, str(ours))
    wish: dict[str, Any] = {"weight_type": QuantType.QInt8, "per_channel": True, "op_types_to_quantize": ["MatMul"]}
    quantize_dynamic(encoder, str(theirs), **wish)
    mine, other = kernels(made), kernels(onnx.load(str(theirs)))
    for op in ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLinear"):
        assert mine[op] == other[op] > 0
    assert sum(mine.values()) <= sum(other.values())
    found, peer = (measure.evaluate("minilm_l6", str(path), limit=SENTENCES) for path in (ours, theirs))
    assert found["spearman"] >= peer["spearman"] - 0.002
    assert found["mean_cosine_with_float"] >= peer["mean_cosine_with_float"] - 0.001


@pytest.fixture(scope="module")
def blocks(encoder: str) -> onnx.ModelProto:
    """The encoder's products in blocks of four bits."""
    return without_data(encoder, mode="weight_only")[0]


@pytest.fixture(scope="module")
def blocks_file(blocks: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`blocks`, saved."""
    path = tmp_path_factory.mktemp("blocks") / "ours.onnx"
    onnx.save(blocks, str(path))
    return path


@pytest.fixture(scope="module")
def blocks_measured(measure: ModuleType, blocks_file: Path) -> dict[str, float]:
    """Metrics of `blocks`."""
    return dict(measure.evaluate("minilm_l6", str(blocks_file), limit=SENTENCES))


@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_four_bits_are_no_worse(
    symmetric: bool,
    measure: ModuleType,
    encoder: str,
    blocks: onnx.ModelProto,
    blocks_file: Path,
    blocks_measured: dict[str, float],
    tmp_path: Path,
) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    theirs = tmp_path / "theirs.onnx"
    quantizer = MatMulNBitsQuantizer(
        onnx.load(encoder), bits=4, block_size=32, is_symmetric=symmetric, accuracy_level=4
    )
    quantizer.process()
    onnx.save(quantizer.model.model, str(theirs))
    assert ops(blocks)["MatMulNBits"] == ops(quantizer.model.model)["MatMulNBits"] == 36
    assert blocks_file.stat().st_size < theirs.stat().st_size * 1.02
    found, peer = blocks_measured, measure.evaluate("minilm_l6", str(theirs), limit=SENTENCES)
    assert found["mean_cosine_with_float"] > peer["mean_cosine_with_float"]
    assert found["spearman"] >= peer["spearman"] - 0.005


def test_tables_of_4_bits_take_less_than_those_of_8(encoder: str, blocks: onnx.ModelProto) -> None:
    how = {"quantize_inputs_of": {"EMBEDDING": True}, "EMBEDDING_BITS": 4}
    tables, _ = without_data(encoder, mode="weight_only", **how)
    assert ops(tables)["GatherBlockQuantized"] == 2
    assert ops(blocks)["GatherBlockQuantized"] == 0
    saved = len(blocks.SerializeToString()) - len(tables.SerializeToString())
    assert saved > 3090 * 384 / 3  # half a byte for each value of the words, less the scales of blocks


@pytest.fixture(scope="module", params=CONVOLUTIONAL)
def forms(request: pytest.FixtureRequest, measure: ModuleType) -> tuple[Any, Any, Any, list[dict[str, Array]]]:
    """Q/DQ, integer ops, refusals and feeds of one model."""
    data = calibration(measure, request.param)
    pairs, integers, refusals = both_forms(measure.model_path(request.param), data)
    return pairs, integers, refusals, data


Forms = tuple[onnx.ModelProto, onnx.ModelProto, tuple[Any, ...], list[dict[str, Array]]]


def test_integer_ops_give_what_onnxruntime_makes_of_the_pairs(forms: Forms) -> None:
    """Its own rewrite of the Q/DQ file is the same integer network, bit for bit or nearly."""
    pairs, integers, _, data = forms
    for feed in data[:3]:
        expected = run(pairs, feed, level="all")
        for level in ("off", "all"):
            for name, value in run(integers, feed, level=level).items():
                assert sqnr(expected[name], value) > 60


def test_convolutions_are_integer_and_the_rest_is_named(forms: Forms) -> None:
    pairs, integers, refusals, _ = forms
    found = ops(integers)
    left = {refusal.where for refusal in refusals}
    floats = {node.name for node in integers.graph.node if node.op_type == "Conv"}
    quantized = sum(node.op_type == "Conv" for node in pairs.graph.node)
    assert found["QLinearConv"] + len(floats) == quantized and found["QLinearConv"] > 0.8 * quantized
    behind = {name for node in pairs.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    assert all(node.name in left for node in integers.graph.node if set(node.input) & behind and node.op_type == "Conv")


def nodes_alone(
    pairs: onnx.ModelProto, integers: onnx.ModelProto, feed: dict[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Each integer node on the codes that the Q/DQ file has there: op type and difference of its codes, in codes.

    The Q/DQ file runs unoptimised; the integer one's tensors of codes have its names.
    """
    written = [name for node in pairs.graph.node if node.op_type == "QuantizeLinear" for name in node.output]
    probe = onnx.ModelProto.FromString(pairs.SerializeToString())
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in written)
    codes = run(probe, feed)
    stored = {tensor.name: tensor for tensor in integers.graph.initializer}
    for node in integers.graph.node:
        known = [name for name in node.input if name in codes]
        if (
            not known
            or node.output[0] not in codes
            or any(n and n not in codes and n not in stored for n in node.input)
        ):
            continue
        inputs = [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(codes[n].dtype), codes[n].shape)
            for n in dict.fromkeys(known)
        ]
        output = onnx.helper.make_empty_tensor_value_info(node.output[0])
        constants = [stored[name] for name in dict.fromkeys(node.input) if name in stored]
        graph = onnx.helper.make_graph([node], "alone", inputs, [output], constants)
        single = onnx.helper.make_model(graph, opset_imports=integers.opset_import, ir_version=integers.ir_version)
        value = run(single, {name: codes[name] for name in known})[node.output[0]]
        yield node.op_type, np.abs(value.astype(int) - codes[node.output[0]].astype(int))


def test_each_integer_op_is_within_one_code_of_its_pairs(forms: Forms) -> None:
    """On the codes of the unoptimised Q/DQ file, so that what came before cannot add up."""
    pairs, integers, _, data = forms
    seen: dict[str, int] = {}
    for op, difference in nodes_alone(pairs, integers, data[0]):
        seen[op] = seen.get(op, 0) + 1
        assert difference.max() <= 1, op
        assert (difference > 0).mean() < 0.02, op
    assert seen.get("QLinearConv", 0) > 10
