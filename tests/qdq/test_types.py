"""fp8 and blocks: written, read to the last number, taken out again, and run as `QuantModel` computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.pipeline import quantized_graph
from sbonnx.quant_model import QuantModel
from sbonnx.small_floats import FP8
from sbonnx.spec import Array, QuantSpec
from tests.support.models import model, residual, run

WIDE = """
agraph (float[N,48] x) => (float[N,20] y) {
    h = MatMul (x, w1)
    r = Relu (h)
    y = Gemm <transB = 1> (r, w2, b2)
}"""
"""Sums over 48 and 40 values: whole blocks of 16, and a last one of 8."""


def calibrated(which: str, **wishes: Any) -> tuple[QuantModel, dict[str, Array]]:
    rng = np.random.default_rng(5)
    if which == "residual":
        proto, x = residual(), rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    else:
        proto, x = model(WIDE, w1=(48, 40), w2=(20, 40), b2=20), rng.standard_normal((4, 48)).astype(np.float32)
    quant = QuantModel(proto, backend="virtual", **wishes)
    quant.prepare_calibration()
    quant({"x": x})
    quant.calc_qparams()
    return quant, {"x": x}


WISHES: list[dict[str, Any]] = [
    {"bits": "fp8"},
    {"bits": "fp8", "w_qscheme": "per-tensor-symmetric"},
    {"bits": "fp8", "block_size": 16},
    {"bits": "w4a8", "block_size": 16},
    {"bits": "w3a6", "block_size": 32},
    {"bits": "w8a8", "block_size": 16},
    {"bits": "w6a8", "block_size": 16, "w_qscheme": "per-channel-affine"},
    {"bits": "w12a8", "block_size": 16},
    {"bits": "w4a0", "block_size": 256},
]


@pytest.mark.sampled
@pytest.mark.parametrize("which", ["residual", "wide"])
@pytest.mark.parametrize("form", ["codes", "qdq"])
@pytest.mark.parametrize("wishes", WISHES, ids=lambda wishes: " ".join(map(str, wishes.values())))
def test_files_hold_and_compute_what_was_solved(wishes: dict[str, Any], form: str, which: str) -> None:
    quant, feeds = calibrated(which, weights=form, **wishes)
    with quant:
        assert quant.solution is not None
        proto = graphs.to_proto(quantized_graph(quant.prepared, quant.solution))
        graph = graphs.load(proto)
        found: dict[str, list[Any]] = {}
        for pair in qdq.read(graph):
            found.setdefault(pair.source, []).append(pair.qparams)
        sites = [site for site in quant.prepared.plan.sites if site.role != "bias"]
        assert sum(map(len, found.values())) == len(sites)
        for site in sites:
            stem = {"activation": "", "weight": {"codes": "_quantized", "qdq": "_rounded"}[form]}[site.role]
            (qparams,) = found[site.tensor + stem]
            wanted = quant.solution.qparams[site.key]
            assert qparams.spec == wanted.spec, site.tensor
            np.testing.assert_array_equal(qparams.scale, wanted.scale)
            np.testing.assert_array_equal(qparams.zero_point, wanted.zero_point)
        quant.set_quant(w_quant=True, a_quant=True)
        ours = quant(feeds)["y"]
        scale = float(np.abs(ours).max())
        coarse = int(quant.prepared.recipe.a.quantizer.bit) in range(
            1, 8
        )  # the bias that onnxruntime rounds is coarse too
        for level in ("off", "all"):
            atol = scale * (5e-2 if coarse else 2e-2)
            np.testing.assert_allclose(run(proto, feeds, level=level)["y"], ours, rtol=0, atol=atol)
        np.testing.assert_allclose(run(proto, feeds)["y"], ours, rtol=1e-5, atol=scale * 1e-5)
        exact = sum(held.name.endswith("_mantissa") for held in proto.graph.initializer)  # biases kept bit for bit
        assert qdq.strip(graph) == len(sites) + exact
        quant.set_quant(w_quant=True, a_quant=False)
        np.testing.assert_allclose(run(graphs.to_proto(graph), feeds)["y"], quant(feeds)["y"], rtol=1e-5, atol=1e-4)


def test_blocks_are_asked_of_products_alone() -> None:
    quant, _ = calibrated("residual", bits="w4a8", block_size=16)
    with quant:
        specs = {site.tensor: site.spec for site in quant.prepared.plan.of_role("weight")}
    assert specs["wf"] == QuantSpec(bits=4, axis=1, block_size=16)
    assert specs["w1"] == QuantSpec(bits=4, axis=0)


def test_stored_types() -> None:
    """4 bits as int4; bytes in blocks beside a quantized input as 16 bits, which onnxruntime leaves alone."""
    for wishes, wanted in (
        ({"bits": "w4a8", "block_size": 16}, "int4"),
        ({"bits": "w8a8", "block_size": 16}, "int16"),
        ({"bits": "w8a0", "block_size": 16}, "int8"),
        ({"bits": "w8a8"}, "int8"),
        ({"bits": "fp8"}, FP8),
    ):
        quant, _ = calibrated("wide", **wishes)
        with quant:
            assert quant.solution is not None
            graph = quantized_graph(quant.prepared, quant.solution)
        kinds = {str(t.dtype) for t in graphs.query.tensors_by_name(graph).values() if t.name.endswith("_quantized")}
        assert kinds == {wanted}, wishes
