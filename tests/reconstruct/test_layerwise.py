"""Weights rounded by what their layers meet: held against explicit rows, and against onnxruntime on what came out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.calib.qparams.solve import weights_alone
from sbonnx.calib.quantized.forward import Forward
from sbonnx.calib.quantized.stream import QuantizedInputs
from sbonnx.graph.query import constant, tensors_by_name
from sbonnx.moments import MomentSums
from sbonnx.pipeline import prepare
from sbonnx.planning import Solution
from sbonnx.recipe.keywords import BackendForm
from sbonnx.reconstruct import layerwise_rounding as reconstruct
from sbonnx.reconstruct.layerwise_rounding import Reconstruction
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared, read_recipe, reconstruction_of, round_by_site, rounding_of
from tests.support.calibration import calibrate
from tests.support.models import model, run

CHAIN = """agraph (float[N,6,12,12] x) => (float[N,5] y) {
    c1 = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (x, w1, b1)
    r1 = Relu(c1)
    c2 = Conv <group = 12, kernel_shape = [3, 3]> (r1, w2)
    r2 = Relu(c2)
    c3 = Conv <kernel_shape = [1, 1], strides = [2, 2]> (r2, w3, b3)
    s = Add(c3, c3)
    p = GlobalAveragePool(s)
    f = Flatten(p)
    y = Gemm(f, w4, b4)
}"""
WEIGHTS: dict[str, Any] = {
    "w1": (12, 6, 3, 3), "b1": 12, "w2": (12, 1, 3, 3), "w3": (8, 12, 1, 1), "b3": 8, "w4": (8, 5), "b4": 5,
}  # fmt: skip


def chain() -> onnx.ModelProto:
    return model(CHAIN, **WEIGHTS)


def images(count: int = 24, seed: int = 0) -> list[dict[str, Array]]:
    """Smooth ones, so that inputs of a layer hang together."""
    rng = np.random.default_rng(seed)
    x = np.tanh(rng.standard_normal((count, 6, 12, 12)).astype(np.float32).cumsum(axis=3).cumsum(axis=2) / 4)
    return [{"x": one[None]} for one in x]


def prepared(bits: int = 4, **wishes: Any) -> Prepared:
    recipe, backend = read_recipe(None, "virtual", {"w_bit": bits, **wishes})
    return prepare(chain(), recipe, backend)


def solved(ready: Prepared, data: Any, rounding: Reconstruction | None = None, **options: Any) -> Solution:
    rounding = rounding or reconstruction_of(ready)
    return calibrate(ready.graph, ready.plan, data, rounding=rounding, solve=round_by_site, **options)


def error(ready: Prepared, solution: Solution, data: list[dict[str, Array]]) -> float:
    """Mean squared error of the output, simulated."""
    with (
        Forward(ready.graph, ready.plan, solution) as quantized,
        Forward(ready.graph, ready.plan, solution, w_quant=False, a_quant=False) as floats,
    ):
        return float(np.mean([np.square(quantized(feed)["y"] - floats(feed)["y"]).mean() for feed in data]))


@pytest.mark.parametrize("inputs", ["quantized", "float"])
@pytest.mark.parametrize("correct", ["none", "empirical"])
def test_better_than_nearest_on_other_data(inputs: str, correct: str) -> None:
    wishes: dict[str, Any] = {"CALIBRATION.MOMENTS": inputs, "bias_correction": correct}
    ready, plain = prepared(**wishes), prepared(rounding="nearest", bias_correction="none")
    assert reconstruction_of(plain) is None
    found, nearest = solved(ready, images()), solved(plain, images())
    fresh = images(16, seed=1)
    assert error(ready, found, fresh) < 0.5 * error(plain, nearest, fresh)
    assert len(found.gains) == 4
    assert all(gain.loss <= gain.nearest for gain in found.gains.values())
    assert bool(found.constants) is (correct == "empirical")


def test_stacked_samples_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed batch axis: each sample runs alone, and several are added to the moments together."""
    recipe, backend = read_recipe(None, "virtual", {"w_bit": 4})
    ready = prepare(model(CHAIN.replace("N,", "1,"), **WEIGHTS), recipe, backend)
    adds: list[int] = []
    add = MomentSums.add

    def counted(sums: MomentSums, *streams: Any, sample: Any, **options: Any) -> None:
        adds.append(len(sample))
        add(sums, *streams, sample=sample, **options)

    monkeypatch.setattr(MomentSums, "add", counted)
    stacked = solved(ready, images())
    assert max(adds) > 1
    monkeypatch.setattr(reconstruct, "STACK", 0)
    for key, codes in solved(ready, images()).codes.items():
        np.testing.assert_array_equal(stacked.codes[key], codes)


def _weight(solution: Solution, key: str, plain: Array, fed: Array) -> float:
    """The weight of a sample in the fit of a layer, by hand: see `sample_weights`."""
    limits = solution.qparams[key].limits
    return float(1 / (np.square(plain - fed).mean() + (float(limits.hi - limits.lo) / 256) ** 2))


def _rows(ready: Prepared, solution: Solution, data: list[dict[str, Array]]) -> Mapping[str, float]:
    """Weighted squared error of each layer's output, summed over channels, by running it alone on both streams."""
    layers = {node.name: node for node in ready.graph.nodes if node.op in ("Conv", "Gemm")}
    reads = [node.inputs[0].name for node in layers.values() if node.inputs[0].name != "x"]
    sites = {reader.node: site for site in ready.plan.of_role("weight") for reader in site.readers}
    through = {(r.node, r.index): s for s in ready.plan.of_role("activation") for r in s.readers}
    found, weights = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    with (
        Forward(ready.graph, ready.plan, solution, tensors=reads) as quantized,
        Forward(ready.graph, ready.plan, solution, w_quant=False, a_quant=False, tensors=reads) as floats,
    ):
        for feed in data:
            plain, rounded = {**feed, **floats(feed)}, {**feed, **quantized(feed)}
            for name, node in layers.items():
                source, site = node.inputs[0].name, sites[name]
                weight = constant(node.inputs[1])
                assert weight is not None
                meaning = solution.qparams[site.key].dequantize(solution.codes[site.key])
                fed = solution.qparams[through[name, 0].key].fake_quant(rounded[source])
                difference = _output(node, plain[source], weight) - _output(node, fed, meaning)
                counts = _weight(solution, through[name, 0].key, plain[source], fed)
                found[name] += counts * float(np.square(difference).sum()) / _positions(difference)
                weights[name] += counts
    return {sites[name].key: value / weights[name] for name, value in found.items()}


def _positions(output: Array) -> int:
    return int(output.size // output.shape[1])


def _output(node: Any, x: Array, weight: Array) -> Array:
    """The node alone, without its bias, in onnxruntime."""
    ins = [
        onnx.helper.make_tensor_value_info("a", 1, x.shape),
        onnx.helper.make_tensor_value_info("w", 1, weight.shape),
    ]
    out = onnx.helper.make_tensor_value_info("o", 1, None)
    made = onnx.helper.make_node(node.op, ["a", "w"], ["o"], **{k: v for k, v in node.attrs.items() if k != "beta"})
    graph = onnx.helper.make_graph([made], "one", ins, [out])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return run(proto, {"a": x, "w": weight})["o"]


def test_the_loss_is_the_error_of_the_layers_output() -> None:
    """All rows, no correction: what the solver says of each layer is what onnxruntime computes for it."""
    ready, data = prepared(bias_correction="none"), images(8)
    found = solved(ready, data, Reconstruction(rows=0, share=1.0, correct=False))
    measured = _rows(ready, found, data)
    for key, gain in found.gains.items():
        assert gain.loss == pytest.approx(measured[key], rel=1e-3), key


def test_a_corrected_bias_leaves_no_mean_error() -> None:
    """The mean over the samples is weighted, as their squared errors are in the fit. No sample is held out."""
    ready, data = prepared(3), images(16)
    found = solved(ready, data, Reconstruction(rows=0, share=1.0))
    layers = [node for node in ready.graph.nodes if node.op in ("Conv", "Gemm")]
    through = {(r.node, r.index): s for s in ready.plan.of_role("activation") for r in s.readers}
    names = [tensor.name for node in layers for tensor in (node.inputs[0], node.outputs[0]) if tensor.name != "x"]
    with (
        Forward(ready.graph, ready.plan, found, tensors=names) as quantized,
        Forward(ready.graph, ready.plan, found, w_quant=False, a_quant=False, tensors=names) as floats,
    ):
        pairs = [({**feed, **quantized(feed)}, {**feed, **floats(feed)}) for feed in data]
    for node in layers:
        name, source, site = node.outputs[0].name, node.inputs[0].name, through[node.name, 0]
        fake_quant = found.qparams[site.key].fake_quant
        weights = [_weight(found, site.key, b[source], fake_quant(a[source])) for a, b in pairs]
        difference = np.concatenate([a[name] - b[name] for a, b in pairs])
        means = difference.reshape(*difference.shape[:2], -1).mean(axis=2)
        assert np.abs(np.average(means, axis=0, weights=weights)).max() < 1e-3 * difference.std() + 1e-6, name


@pytest.mark.parametrize("asym", [None, QuantizedInputs()])
def test_batches_threads_and_memory_do_not_matter(asym: QuantizedInputs | None) -> None:
    """Bit for bit."""
    ready, data = prepared(), images(12)
    alone = solved(ready, data, asym=asym, threads=1)
    x = np.concatenate([feed["x"] for feed in data])
    for size, threads, memory in ((1, 3, "1 GiB"), (4, 2, 200_000), (12, 1, 200_000)):
        batches = [{"x": x[i : i + size]} for i in range(0, len(x), size)]
        other = solved(ready, batches, asym=asym, threads=threads, memory=memory)
        assert other.codes.keys() == alone.codes.keys()
        for key, codes in alone.codes.items():
            np.testing.assert_array_equal(other.codes[key], codes)
        for name, values in alone.constants.items():
            np.testing.assert_array_equal(other.constants[name], values)


def test_moments_past_the_memory_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruct, "LEAST_MEMORY", 0)
    ready = prepared()
    found = solved(ready, images(4), memory=30_000)
    refused = [refusal for refusal in found.refusals if refusal.what == "round by inputs"]
    assert refused
    assert all(re.search(r"\d [kM]?B\b", refusal.why) for refusal in refused), refused
    tensors = tensors_by_name(ready.graph)
    names = {refusal.where for refusal in refused}
    for site in ready.plan.of_role("weight"):
        if site.readers[0].node in names:
            weight = constant(tensors[site.tensor])
            assert weight is not None
            np.testing.assert_array_equal(found.codes[site.key], found.qparams[site.key].quantize(weight))


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
def test_the_file_computes_what_was_solved(backend: BackendForm) -> None:
    """The exported file in onnxruntime, nothing optimised, against the simulation; corrected biases included."""
    bits: dict[str, Any] = {"w_bit": 4 if backend == "virtual" else 8, "CALIBRATION.MOMENTS.SHARE": 1}
    recipe, rules = read_recipe(None, backend, bits)
    ready = prepare(chain(), recipe, rules)
    rounding = rounding_of(ready)
    found = solved(ready, images(12), rounding.reconstruction, asym=rounding.inputs)
    assert found.constants
    report = sbonnx.quantize(chain(), images(12), backend=backend, **bits)
    assert report.ok, report.problems
    assert report.quantized is not None
    with Forward(ready.graph, ready.plan, found) as simulated:
        for feed in images(4, seed=3):
            expected = simulated(feed)["y"]
            np.testing.assert_allclose(
                run(report.quantized, feed)["y"], expected, rtol=0, atol=1e-3 * np.abs(expected).max()
            )


def test_model_and_function_agree() -> None:
    recipe = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 4}}, "SCHEDULE": {"FUSE_BN": True}}
    report = sbonnx.quantize(chain(), images(12), recipe=recipe, verify=False)
    assert report.quantized is not None
    with sbonnx.QuantModel(chain(), recipe) as made:
        made.prepare_calibration()
        for feed in images(12):
            made(feed)
        made.calc_qparams()
        made.set_quant(w_quant=True, a_quant=True)
        for feed in images(3, seed=5):
            expected = run(report.quantized, feed)["y"]
            np.testing.assert_allclose(made(feed)["y"], expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_weights_alone_are_rounded_by_second_moments() -> None:
    """No activation is quantized: nothing is observed, and the moments are gathered all the same."""
    ready = prepared(a_bit=0)
    assert not ready.plan.of_role("activation")
    found = solved(ready, images())
    plain = prepared(a_bit=0, rounding="nearest", bias_correction="none")
    nearest = weights_alone(plain.graph, plain.plan)
    fresh = images(8, seed=2)
    assert error(ready, found, fresh) < 0.5 * error(plain, nearest, fresh)


BRANCHES = """agraph (float[N,1,8] x, float[N,1,8] z) => (float[N,1,6] y, float[N,1,6] v) {
    a = MatMul(x, w)
    y = Add(a, b)
    c = MatMul(z, w)
    v = Add(c, b)
}"""
"""A weight and its bias that two nodes read, of inputs that have little in common."""

JOINED = """agraph (float[N,1,8] x) => (float[N,1,6] y) {
    a = MatMul(x, w)
    y = Add(a, b)
}"""


def two_inputs(count: int = 24, seed: int = 0) -> tuple[Array, Array]:
    """Small inputs along one direction, and large ones along the others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 1)) * np.linspace(0.5, 1.5, 8) + 0.01 * rng.standard_normal((count, 8))
    z = (rng.standard_normal((count, 8)) + 0.5) @ np.random.default_rng(7).standard_normal((8, 8)) * 2
    return x[:, None].astype(np.float32), z[:, None].astype(np.float32)


def test_a_shared_weight_is_fitted_to_the_inputs_of_all_its_nodes() -> None:
    """As one layer that reads the inputs of both; its bias too. Sums of integers do not depend on the order."""
    x, z = (np.round(4 * values) for values in two_inputs())
    settings: dict[str, Any] = {"w_bit": 3, "CALIBRATION.MOMENTS": "float", "bias_correction": "empirical"}
    recipe, backend = read_recipe(None, "virtual", settings)
    solutions = []
    for text, feeds in ((BRANCHES, [{"x": x, "z": z}]), (JOINED, [{"x": np.concatenate([x, z])}])):
        ready = prepare(model(text, w=(8, 6), b=6), recipe, backend)
        solutions.append(solved(ready, feeds, Reconstruction.of(reconstruction_of(ready) or Reconstruction(), rows=0)))
    shared, joined = solutions
    np.testing.assert_array_equal(shared.codes["w"], joined.codes["w"])
    np.testing.assert_array_equal(shared.qparams["w"].scale, joined.qparams["w"].scale)
    np.testing.assert_allclose(shared.constants["b"], joined.constants["b"], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(shared.constants["b"], tensors_by_name(ready.graph)["b"].values)


@pytest.mark.parametrize("inputs", ["quantized", "float"])
def test_the_outputs_of_a_shared_weight_are_closer_than_with_the_nearest_codes(inputs: str, tmp_path: Path) -> None:
    x, z = two_inputs(64)
    float_model, path = model(BRANCHES, w=(8, 6), b=6), tmp_path / "q.onnx"
    errors = []
    for wishes in ({"CALIBRATION.MOMENTS": inputs}, {"rounding": "nearest"}):
        settings: dict[str, Any] = {"w_bit": 3, "bias_correction": "none", **wishes}
        feeds = [{"x": x, "z": z}]
        sbonnx.quantize(float_model, feeds, backend="virtual", output=path, verify=False, force=True, **settings)
        fresh = dict(zip("xz", two_inputs(64, seed=1), strict=True))
        floats, found = run(float_model, fresh), run(str(path), fresh)
        errors.append([float(np.square(found[name] - floats[name]).mean()) for name in ("y", "v")])
    assert sum(errors[0]) < 0.9 * sum(errors[1])


def test_a_shared_weight_without_a_shared_bias() -> None:
    """Correct each node's bias by the mean of that node's inputs; skip a node that reads the weight transposed."""
    text = """agraph (float[N,8] x) => (float[N,8] y) {
        a = Gemm(x, w, b1)
        r = Relu(a)
        c = Gemm(r, w, b2)
        d = Gemm <transB = 1> (c, w)
        y = MatMul(d, w)
    }"""
    x = two_inputs()[1][:, 0]
    wishes: dict[str, Any] = {"w_bit": 4, "bias_correction": "empirical", "W.QSCHEME": "per-tensor-symmetric"}
    recipe, backend = read_recipe(None, "virtual", {**wishes, "CALIBRATION.MOMENTS": "float"})
    float_model = model(text, w=(8, 8), b1=8, b2=8)
    ready = prepare(float_model, recipe, backend)
    found = solved(ready, [{"x": x}], Reconstruction.of(reconstruction_of(ready) or Reconstruction(), rows=2))
    assert set(found.gains) == {"w"}
    w, b1, b2 = (onnx.numpy_helper.to_array(one) for one in float_model.graph.initializer)
    error = w - found.qparams["w"].dequantize(found.codes["w"])
    np.testing.assert_allclose(found.constants["b1"], b1 + x.mean(0) @ error, atol=1e-4)
    np.testing.assert_allclose(found.constants["b2"], b2 + np.maximum(x @ w + b1, 0).mean(0) @ error, atol=1e-3)
    assert [refusal.why for refusal in found.refusals if "layout" in refusal.why] == [
        f"reads the weight of '{ready.graph.nodes[0].name}' in another layout: fitted to the inputs of that alone"
    ]


def test_a_model_that_needs_no_data_is_rounded_by_what_it_was_fed() -> None:
    """MODE: weight_only, step by step: with feeds as `quantize` does it, without any to the nearest codes."""
    text = """agraph (float[N,64] x) => (float[N,32] y) {
        a = MatMul(x, w1)
        r = Relu(a)
        y = MatMul(r, w2)
    }"""
    proto = model(text, w1=(64, 64), w2=(64, 32))
    mix = np.random.default_rng(7).standard_normal((8, 64)).astype(np.float32)
    feeds = [{"x": np.random.default_rng(i).standard_normal((16, 8)).astype(np.float32) @ mix} for i in range(6)]
    recipe = {"BACKEND": "virtual", "MODE": "weight_only"}
    found = {}
    for fed in (feeds, []):
        with sbonnx.QuantModel(proto, recipe) as made:
            made.prepare_calibration()
            for feed in fed:
                made(feed)
            solution = made.calc_qparams()
            made.set_quant(w_quant=True)
            outputs = [made(feed)["y"] for feed in feeds]
            found[len(fed)] = (
                solution,
                float(np.square(np.subtract(outputs, [run(proto, f)["y"] for f in feeds])).mean()),
            )
    assert set(found[6][0].gains) == {"w1", "w2"}
    assert not found[0][0].gains
    assert found[6][1] < 0.3 * found[0][1]
