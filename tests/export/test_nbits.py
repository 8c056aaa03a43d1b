"""MODE: weight_only on onnxruntime: MatMulNBits and GatherBlockQuantized, against numpy and onnxruntime's quantizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import sbonnx
from sbonnx.backends import BACKENDS
from sbonnx.backends.onnxruntime import backend as ort
from sbonnx.errors import DataError
from sbonnx.export.nbits import blocked, pack
from sbonnx.recipe.keywords import BackendForm
from sbonnx.spec import Array
from tests.support.models import model, run
from tests.support.writing import kernels, ops, prepared, solved, sqnr, without_data, written

RNG = np.random.default_rng(0)
PRODUCT = "agraph (float[N,K] x) => (float[N,M] y) { y = MatMul (x, w) }"


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products count as large: what pays is another test."""
    for name in BACKENDS:
        modes = {mode: replace(limits, smallest=1) for mode, limits in BACKENDS[name].modes.items()}
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], modes=modes))


def fields(proto: onnx.ModelProto) -> tuple[dict[str, Any], list[Array | None]]:
    """Attributes and constant inputs (B, scales, zero points, ...) of the only MatMulNBits."""
    (node,) = (node for node in proto.graph.node if node.op_type == "MatMulNBits")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}, [stored.get(n) for n in node.input[1:]]


def dequantized(proto: onnx.ModelProto) -> Array:
    """The (K, N) weight that a MatMulNBits holds, by a loop over its layout as onnxruntime documents it."""
    attributes, (packed, scales, *more) = fields(proto)
    zeros = more[0] if more else None
    bits, block, length = attributes["bits"], attributes["block_size"], attributes["K"]
    assert packed is not None and scales is not None
    rows = []
    for n in range(attributes["N"]):
        row = []
        for k in range(length):
            b, i = divmod(k, block)
            code = packed[n, b, i * bits // 8] >> (i * bits % 8) & ((1 << bits) - 1)
            zero = 1 << (bits - 1)
            if zeros is not None:
                zero = zeros[n, b * bits // 8] >> (b * bits % 8) & ((1 << bits) - 1)
            row.append((int(code) - int(zero)) * scales[n, b])
        rows.append(row)
    return np.asarray(np.array(rows, np.float32).T)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    length=st.integers(1, 100),
    width=st.integers(1, 6),
    block=st.sampled_from([16, 32, 64, 128]),
    bits=st.sampled_from([2, 3, 4, 6, 8]),
    scheme=st.sampled_from(["per-channel-symmetric", "per-channel-affine"]),
)
def test_the_kernel_computes_what_the_codes_say(length: int, width: int, block: int, bits: int, scheme: str) -> None:
    weight = (RNG.standard_normal((length, width)) + 0.3).astype(np.float32)
    text = PRODUCT.replace("K", str(length)).replace("M]", f"{width}]")
    proto = model(text, w=weight)
    settings = {"w_qscheme": scheme, "w_bit": bits, "block_size": block, "accuracy_level": 1}
    settings["w.rounding.type"] = "nearest"
    ready = prepared(proto, mode="weight_only", **settings)
    solution = solved(ready, None)
    made, refusals = written(ready, solution)
    assert not refusals and {refusal.what for refusal in ready.refusals} <= {"take a fast kernel"}
    (site,) = ready.plan.sites
    expected = solution.qparams[site.key].dequantize(solution.codes[site.key])
    np.testing.assert_array_equal(dequantized(made), expected)
    assert fields(made)[0]["bits"] == {2: 2 if ort.has_two_bits() else 4, 3: 4, 6: 8}.get(bits, bits)
    x = RNG.standard_normal((3, length)).astype(np.float32)
    for level in ("off", "all"):
        np.testing.assert_allclose(run(made, {"x": x}, level=level)["y"], x @ expected, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 9), st.integers(0, 999))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_packing_puts_the_first_code_in_the_low_half(length: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (2, length)).astype(np.uint8)
    packed = pack(codes, 4)
    assert packed.shape == (2, (length + 1) // 2)
    for i in range(length):
        assert ((packed[:, i // 2] >> (4 * (i % 2))) & 15 == codes[:, i]).all()
    assert pack(codes, 8) is codes


def test_padding_of_a_block_has_the_code_of_zero() -> None:
    codes = np.full((5, 1), 3, ml_dtypes.int4)
    packed, scales, zeros = blocked(codes, np.ones((1, 1), np.float32), np.full((1, 1), -2, ml_dtypes.int4), block=16)
    assert packed.tolist() == [[[0xBB, 0xBB, 0x6B, 0x66, 0x66, 0x66, 0x66, 0x66]]]
    assert zeros is not None and zeros.tolist() == [[6]]
    assert scales.shape == (1, 1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_no_worse_than_onnxruntimes_own_quantizer(symmetric: bool) -> None:
    """The same blocks, the same bits: our default against what its Python package writes, by each file's own codes."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    weight = RNG.standard_t(4, (128, 64)).astype(np.float32)
    proto = model(PRODUCT.replace("K", "128").replace("M]", "64]"), w=weight)
    copy = onnx.ModelProto.FromString(proto.SerializeToString())  # it writes into its input
    quantizer = MatMulNBitsQuantizer(copy, bits=4, block_size=32, is_symmetric=symmetric, accuracy_level=4)
    quantizer.process()
    theirs = quantizer.model.model
    ours, _ = without_data(proto, mode="weight_only")
    attributes, mine = fields(ours)
    other, their = fields(theirs)
    assert attributes == other
    for one, two in zip(mine[:2], their[:2], strict=True):
        assert one is not None and two is not None and (one.shape, one.dtype) == (two.shape, two.dtype)
    assert sqnr(weight, dequantized(ours)) > sqnr(weight, dequantized(theirs))


@pytest.mark.parametrize("gemm", ["", "<transB = 1>", "<transB = 1, alpha = 0.5, beta = 2.0>"])
def test_a_gemm_gives_its_bias_to_the_kernel(gemm: str) -> None:
    shape = (24, 80) if "transB" in gemm else (80, 24)
    proto = model(f"agraph (float[4,80] x) => (float[4,24] y) {{ y = Gemm {gemm} (x, w, b) }}", w=shape, b=24)
    made, _ = without_data(proto, mode="weight_only", w_bit=8, accuracy_level=1)
    assert ops(made) == {"MatMulNBits": 1}
    assert len(made.graph.node[0].input) == 6
    x = {"x": RNG.standard_normal((4, 80)).astype(np.float32)}
    assert sqnr(run(proto, x)["y"], run(made, x)["y"]) > 40


def test_an_addend_that_is_no_vector_is_added_behind() -> None:
    proto = model("agraph (float[4,80] x) => (float[4,24] y) { y = Gemm (x, w, c) }", w=(80, 24), c=(4, 24))
    made, _ = without_data(proto, mode="weight_only", w_bit=8, accuracy_level=1)
    assert ops(made) == {"MatMulNBits": 1, "Add": 1}
    x = {"x": RNG.standard_normal((4, 80)).astype(np.float32)}
    assert sqnr(run(proto, x)["y"], run(made, x)["y"]) > 40


def test_half_precision_stays_half() -> None:
    weight = RNG.standard_normal((64, 32)).astype(np.float16)
    proto = model("agraph (float16[N,64] x) => (float16[N,32] y) { y = MatMul (x, w) }", w=weight)
    made, _ = without_data(proto, mode="weight_only", w_bit=8)
    _, (_, scales, *_) = fields(made)
    assert scales is not None and scales.dtype == np.float16
    x = RNG.standard_normal((3, 64)).astype(np.float16)
    assert sqnr(x.astype(np.float32) @ weight.astype(np.float32), run(made, {"x": x})["y"]) > 35


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_table_where_asked_for(bits: int) -> None:
    text = "agraph (int64[N] i) => (float[N,48] y) { y = Gather (t, i) }"
    proto = model(text, t=(10, 48))
    plain, _ = without_data(proto, mode="weight_only")
    assert ops(plain) == {"Gather": 1}
    wish = {"mode": "weight_only", "w_bit": bits, "quantize_inputs_of": {"EMBEDDING": True}}
    ready = prepared(proto, **wish)
    solution = solved(ready, None)
    made, refusals = written(ready, solution)
    assert not refusals and ops(made) == {"GatherBlockQuantized": 1}
    (site,) = ready.plan.sites
    rows = np.array([3, 0, 9])
    expected = solution.qparams[site.key].dequantize(solution.codes[site.key])[rows]
    np.testing.assert_array_equal(run(made, {"i": rows})["y"], expected)


def test_levels_of_accuracy_reach_the_kernel() -> None:
    proto = model(PRODUCT.replace("K", "64").replace("M]", "32]"), w=(64, 32))
    made = {level: without_data(proto, mode="weight_only", accuracy_level=level)[0] for level in (1, 4)}
    assert {level: fields(proto)[0]["accuracy_level"] for level, proto in made.items()} == {1: 1, 4: 4}
    x = {"x": RNG.standard_normal((2, 64)).astype(np.float32)}
    assert 20 < sqnr(run(made[1], x)["y"], run(made[4], x)["y"]) < 80
    assert kernels(made[4]) == {"MatMulNBits": 1}


@pytest.mark.parametrize("backend", ["virtual", "tensorrt"])
def test_other_runtimes_get_blocks_behind_a_dequantize(backend: BackendForm, tmp_path: Path) -> None:
    proto = model(PRODUCT.replace("K", "256").replace("M]", "64]"), w=(256, 64))
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, None, backend=backend, mode="weight_only", output=path)
    assert report.ok, report.problems
    made = onnx.load(str(path))
    assert ops(made) == {"DequantizeLinear": 1, "MatMul": 1}
    with sbonnx.QuantModel(proto, backend=backend, mode="weight_only") as simulated:
        simulated.calc_qparams()
        simulated.set_quant(w_quant=True)
        x = RNG.standard_normal((2, 256)).astype(np.float32)
        np.testing.assert_allclose(run(made, {"x": x})["y"], simulated({"x": x})["y"], rtol=1e-5, atol=1e-5)


def test_static_still_asks_for_data() -> None:
    with pytest.raises(DataError, match="calibration data is missing"):
        sbonnx.quantize(model(PRODUCT.replace("K", "8").replace("M]", "8]"), w=(8, 8)), None)
