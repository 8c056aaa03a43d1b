"""What `insert` writes, `read` finds to the last number, and `strip` takes out again: every width, scheme and form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.graph import query
from sbonnx.pipeline import quantized_graph
from sbonnx.quant_model import QuantModel
from sbonnx.spec import Array
from tests.support.models import model, residual, run


def calibrated(config: dict[str, Any], bits: str) -> tuple[QuantModel, dict[str, Array]]:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    quant = QuantModel(residual(), config, bits=bits)
    quant.prepare_calibration()
    quant(feeds)
    quant.calc_qparams()
    return quant, feeds


@pytest.mark.sampled
@pytest.mark.parametrize("bits", ["w8a8", "w4a4", "w3a2", "w2a3", "w5a7", "w12a9", "w16a16"])
@pytest.mark.parametrize("weights", ["codes", "qdq"])
@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
def test_read_and_strip_are_the_inverses_of_insert(bits: str, weights: str, scheme: str) -> None:
    config = {
        "BACKEND": "virtual",
        "WEIGHTS": weights,
        "W": {"QSCHEME": f"per-channel-{scheme}"},
        "A": {"QSCHEME": f"per-tensor-{scheme}"},
    }
    quant, feeds = calibrated(config, bits)
    with quant:
        assert quant.solution is not None
        graph = graphs.load(graphs.to_proto(quantized_graph(quant.prepared, quant.solution)))
        found: dict[str, list[Any]] = {}
        for pair in qdq.read(graph):
            found.setdefault(pair.source, []).append(pair.qparams)
        sites = [site for site in quant.prepared.plan.sites if site.role != "bias"]
        assert sum(map(len, found.values())) == len(sites)
        for site in sites:
            stem = {"activation": "", "weight": {"codes": "_quantized", "qdq": "_rounded"}[weights]}[site.role]
            (qparams,) = found[site.tensor + stem]
            wanted = quant.solution.qparams[site.key]
            assert qparams.spec == wanted.spec, site.tensor
            np.testing.assert_array_equal(qparams.scale, wanted.scale)
            np.testing.assert_array_equal(qparams.zero_point, wanted.zero_point)
        biases = [n for n in graph.nodes if n.op == "DequantizeLinear" and query.dtype(n.inputs[0]) == np.int32]
        assert qdq.strip(graph) == len(sites) + len(biases)
        assert [node.op for node in graph.nodes] == [node.op for node in quant.prepared.graph.nodes]
        quant.set_quant(w_quant=True, a_quant=False)
        np.testing.assert_allclose(run(graphs.to_proto(graph), feeds)["y"], quant(feeds)["y"], rtol=1e-5, atol=1e-5)


def test_blocks_are_read_with_their_size() -> None:
    proto = model(
        """agraph (float[3,8] x) => (float[3,2] y) {
            w = DequantizeLinear <axis = 0, block_size = 4> (codes, scale)
            y = MatMul (x, w)
        }""",
        opset=21,
        codes=np.arange(-8, 8, dtype=np.int8).reshape(8, 2),
        scale=np.arange(1, 5, dtype=np.float32).reshape(2, 2),
    )
    graph = graphs.load(proto, opset=21)
    (pair,) = qdq.read(graph)
    codes = graphs.query.constant(graphs.query.tensors_by_name(graph)[pair.source])
    assert pair.qparams.spec.block_size == 4
    assert codes is not None
    x = np.eye(3, 8, dtype=np.float32)
    np.testing.assert_array_equal(x @ pair.qparams.dequantize(codes), run(proto, {"x": x})["y"])
