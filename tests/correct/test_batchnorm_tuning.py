"""Batch-norm tuning against onnxruntime, with the exported file and with the model and its batch norms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import sbonnx
from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.qparams.solve import weights_alone
from sbonnx.correct.batchnorm_tuning import RunningVariance, tune_norms
from sbonnx.errors import DataError
from sbonnx.options import RunOptions
from sbonnx.pipeline import prepare, quantized_graph
from sbonnx.planning import Solution
from sbonnx.quant_model import LifeCycleError
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared, read_recipe, round_by_site
from tests.support import calibration as walk
from tests.support.models import model, run
from tests.support.normed import images, inner, put, settled, zoo

TENSORS = ("n1", "s2", "n3", "n4", "n5", "n6")
"""What the normalised tensors of the zoo are called once they are folded."""

X = images(40)

PLAIN: dict[str, Any] = {"W.ROUNDING.TYPE": "nearest", "BIAS_CORRECTION": "none", "VERIFY.HELD_OUT": 0.0}
"""Nothing but tuning, on all samples."""


def prepared_zoo(proto: onnx.ModelProto, **more: Any) -> tuple[Prepared, Solution]:
    wishes = PLAIN | {"bits": "w4a8", "SCHEDULE.BN_TUNING": True}
    prepared = prepare(proto, *read_recipe(None, "virtual", wishes | more))
    if not prepared.plan.of_role("activation"):
        return prepared, weights_alone(prepared.graph, prepared.plan, round_by_site)
    return prepared, walk.calibrate(prepared.graph, prepared.plan, [{"x": X}], solve=round_by_site)


def tuned(prepared: Prepared, solution: Solution, x: Array = X, reference: Any = "float") -> Solution:
    samples = Samples.of([{"x": x}], prepared.graph, RunOptions(threads=1))
    return tune_norms(prepared.graph, prepared.plan, solution, samples, reference=reference)


def exported(prepared: Prepared, solution: Solution) -> onnx.ModelProto:
    return graphs.to_proto(quantized_graph(prepared, solution))


def spread(x: Array) -> tuple[Array, Array]:
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    return x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)


def test_every_tensor_has_the_float_statistics_in_the_exported_file() -> None:
    """Whatever came before was quantized and tuned when it was measured, or later ones would be off."""
    proto = zoo(X)
    prepared, solution = prepared_zoo(proto)
    made = tuned(prepared, solution)
    before, after = exported(prepared, solution), exported(prepared, made)
    for name in TENSORS:
        mean, std = spread(inner(proto, X, name))
        old_mean, old_std = spread(inner(before, X, name))
        new_mean, new_std = spread(inner(after, X, name))
        np.testing.assert_allclose(new_mean, mean, atol=0.01 * std.mean(), err_msg=name)  # codes of biases are whole
        np.testing.assert_allclose(new_std, std, rtol=5e-3, err_msg=name)
        assert np.abs(old_mean - mean).max() > 0.02 * std.mean() or np.abs(old_std / std - 1).max() > 0.01
    assert not [refusal for refusal in made.refusals if "batch norm" in refusal.what]


def test_codes_of_weights_stay() -> None:
    prepared, solution = prepared_zoo(zoo(X))
    made = tuned(prepared, solution)
    for site in prepared.plan.of_role("weight"):
        np.testing.assert_array_equal(made.codes[site.key], solution.codes[site.key])
        np.testing.assert_array_equal(made.qparams[site.key].zero_point, solution.qparams[site.key].zero_point)


def test_the_batch_norms_statistics_are_those_of_the_unfolded_model() -> None:
    """The ancestor's definition: rounded weights before batch norms in training mode, in the model as it was."""
    proto = zoo(X, dead=True)
    prepared, solution = prepared_zoo(proto, bits="w4a0")
    made = tuned(prepared, solution, reference="norm")
    unfolded = onnx.ModelProto()
    unfolded.CopyFrom(proto)
    factors = {}
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for end in "1235":
        factors[end] = values[f"g{end}"] / np.sqrt(values[f"v{end}"] + 1e-5)
    factors["2"] = factors["2"] * values["k2"].reshape(-1)
    factors["6"] = values["g6"] / np.sqrt(values["v6"] + 1e-5)
    for site in prepared.plan.of_role("weight"):
        rounded = solution.qparams[site.key].dequantize(solution.codes[site.key])
        name = site.tensor
        if name[1:] in factors:
            axis = 1 if name == "w5" else 0
            along = factors[name[1:]].reshape([-1 if each == axis else 1 for each in range(rounded.ndim)])
            with np.errstate(divide="ignore", invalid="ignore"):
                rounded = np.where(along == 0, 0, rounded / along)
        put(unfolded, name, rounded)
    settled(unfolded, X)
    expected, found = run(unfolded, {"x": X})["y"], run(exported(prepared, made), {"x": X})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * float(np.abs(expected).max()))
    assert np.abs(run(exported(prepared, solution), {"x": X})["y"] - expected).max() > 0.05 * np.abs(expected).max()


def test_channels_that_say_nothing_stay() -> None:
    prepared, solution = prepared_zoo(zoo(X, dead=True))
    for reference in ("float", "norm"):
        made = tuned(prepared, solution, reference=reference)
        assert all(np.isfinite(values).all() for values in made.constants.values())
        assert np.isfinite(run(exported(prepared, made), {"x": X})["y"]).all()


def test_the_numbers_do_not_depend_on_batches_threads_or_memory() -> None:
    prepared, solution = prepared_zoo(zoo(X))
    first = tuned(prepared, solution)
    options = RunOptions(threads=3, memory="64 KiB")
    pieces = Samples.of([{"x": piece} for piece in np.split(X, 8)], prepared.graph, options)
    other = tune_norms(prepared.graph, prepared.plan, solution, pieces)
    assert first.constants.keys() == other.constants.keys()
    for name, values in first.constants.items():
        np.testing.assert_array_equal(values, other.constants[name])
    for key, qparams in first.qparams.items():
        np.testing.assert_array_equal(qparams.scale, other.qparams[key].scale)


def test_the_output_gets_nearer_to_float() -> None:
    proto = zoo(X)
    x = images(64, seed=9)  # not those that were measured
    reference = run(proto, {"x": x})["y"]
    errors = []
    for tuning in (False, True):
        wishes: dict[str, Any] = PLAIN | {"bits": "w3a8", "SCHEDULE.BN_TUNING": tuning}
        report = sbonnx.quantize(proto, [{"x": X}], backend="virtual", verify=False, **wishes)
        assert report.quantized is not None
        errors.append(float(np.mean((run(report.quantized, {"x": x})["y"] - reference) ** 2)))
    assert errors[1] < 0.5 * errors[0], errors


def test_the_context_manager_does_what_quantize_does(tmp_path: Path) -> None:
    proto = zoo(X)
    wishes = PLAIN | {"bits": "w4a8", "SCHEDULE.BN_TUNING": True}
    report = sbonnx.quantize(proto, [{"x": X}], backend="virtual", verify=False, **wishes)
    with sbonnx.QuantModel(proto, backend="virtual", **wishes) as steps:
        with pytest.raises(LifeCycleError, match="batchnorm_tuning"), steps.batchnorm_tuning():
            pass
        steps.prepare_calibration()
        steps({"x": X})
        steps.calc_qparams()
        steps.set_quant(w_quant=True, a_quant=True)
        with steps.batchnorm_tuning():
            for piece in np.split(X, 4):
                steps({"x": piece})
        simulated = steps({"x": X})["y"]
        steps.export_onnx(tmp_path / "q.onnx")
    assert report.quantized is not None
    expected = run(report.quantized, {"x": X})["y"]
    np.testing.assert_array_equal(run(str(tmp_path / "q.onnx"), {"x": X})["y"], expected)
    np.testing.assert_allclose(simulated, expected, rtol=1e-4, atol=1e-4)
    assert any("6 batch norms were tuned" in note for note in report.notes)


def test_a_block_that_is_left_early_or_fed_nothing_changes_nothing() -> None:
    with sbonnx.QuantModel(zoo(X), backend="virtual", bits="w4a8") as steps:
        steps.prepare_calibration()
        steps({"x": X})
        solution = steps.calc_qparams()
        with pytest.raises(KeyError, match="stop"), steps.batchnorm_tuning():
            steps({"x": X})
            raise KeyError("stop")
        with pytest.raises(DataError), steps.batchnorm_tuning():
            pass
        assert steps.solution is solution
        assert steps({"x": X})["y"].shape == (40, 5)


REFUSED = {
    "one scale": ("c = Conv(x, w)  y = BatchNormalization(c, g, t, m, v)", "one scale for several outputs"),
    "groups": ("c = ConvTranspose<group=2>(x, wt)  y = BatchNormalization(c, g, t, m, v)", "groups of"),
    "before": ("n = BatchNormalization(x, g, t, m, v)  y = Conv(n, w)", "the layer after it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tuned_is_named(name: str) -> None:
    """Where outputs share a scale the mean alone is tuned, and is right."""
    text, why = REFUSED[name]
    weights: dict[str, Any] = {"wt": (4, 2, 1, 1)} if "wt" in text else {"w": (4, 4, 1, 1)}
    for at in "gtmv":
        weights[at] = np.random.default_rng(ord(at)).uniform(0.5, 1.5, 4).astype(np.float32)
    proto = model(f"agraph (float[N,4,6,6] x) => (float[N,4,6,6] y) {{ {text} }}", **weights)
    wishes: dict[str, Any] = {"bits": "w3a8", "SCHEDULE.BN_TUNING": True, "BIAS_CORRECTION": "none"}
    if name == "one scale":
        wishes["W.SPECIFIC"] = [{"*": ["QSCHEME", "per-tensor-symmetric"]}]
    x = np.random.default_rng(3).standard_normal((8, 4, 6, 6)).astype(np.float32)
    report = sbonnx.quantize(proto, [{"x": x}], backend="virtual", verify=False, **wishes)
    assert why in " ".join(str(refusal) for refusal in report.refusals)
    if name != "before":
        assert report.quantized is not None
        mean, std = spread(run(proto, {"x": x})["y"])
        np.testing.assert_allclose(spread(run(report.quantized, {"x": x})["y"])[0], mean, atol=0.02 * std.max())


@pytest.mark.parametrize(
    ("text", "bits", "why"),
    [
        ("y = Relu(c)", "w4a8", "has no batch norm"),
        ("y = BatchNormalization(c, g, t, m, v)", "w0a0", "nothing is quantized"),
    ],
)
def test_nothing_to_tune_is_said(text: str, bits: str, why: str) -> None:
    stats: dict[str, Any] = {at: np.ones(4, np.float32) for at in "gtmv" if "Batch" in text}
    proto = model(
        f"agraph (float[N,4,6,6] x) => (float[N,4,6,6] y) {{ c = Conv(x, w)  {text} }}", w=(4, 4, 1, 1), **stats
    )
    wishes: dict[str, Any] = PLAIN | {"bits": bits, "SCHEDULE.BN_TUNING": True}
    x = np.random.default_rng(3).standard_normal((2, 4, 6, 6)).astype(np.float32)
    report = sbonnx.quantize(proto, [{"x": x}], backend="virtual", verify=False, **wishes)
    assert why in " ".join(refusal.why for refusal in report.refusals)


def logits(quantized: onnx.ModelProto, feeds: list[dict[str, Array]]) -> Array:
    return np.concatenate([next(iter(run(quantized, feed).values())) for feed in feeds])


@pytest.mark.slow
def test_a_trained_network_gets_nearer_to_float(pack: Path) -> None:
    """cifar_resnet20 as exported with its batch norms; measured on other images than those it was tuned on."""
    file = pack / "models" / "cifar_resnet20.onnx"
    feeds = pack_feeds(pack, 64)
    held = feeds[32:]
    reference = logits(onnx.load(str(file)), held)
    sqnr = []
    for tuning in (False, True):
        wishes: dict[str, Any] = PLAIN | {"bits": "w4a8", "SCHEDULE.BN_TUNING": tuning}
        report = sbonnx.quantize(file, feeds[:32], verify=False, **wishes)
        assert report.quantized is not None
        error = logits(report.quantized, held) - reference
        sqnr.append(10 * np.log10(np.sum(reference.astype(np.float64) ** 2) / np.sum(error.astype(np.float64) ** 2)))
    assert sqnr[1] > sqnr[0] + 2.5, sqnr
    assert any("19 batch norms were tuned" in note for note in report.notes)


def pack_feeds(pack: Path, count: int) -> list[dict[str, Array]]:
    """The first calibration feeds of cifar_resnet20, one image each."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[dict[str, Array]] = []
    for feeds in module.load_calib("cifar_resnet20"):
        (name, values), *_ = feeds.items()
        found.extend({name: values[row : row + 1]} for row in range(len(values)))
        if len(found) >= count:
            break
    return found[:count]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([(3,), (3, 4), (3, 2, 5)]), st.floats(-1e4, 1e4))
def test_pieces_give_what_the_whole_gives(seed: int, pieces: int, dims: tuple[int, ...], offset: float) -> None:
    """Far from 0 as well, where the difference of two sums of squares would hold nothing."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((7, *dims)) + offset).astype(np.float32)
    whole = RunningVariance.of(x, 1)
    merged = RunningVariance.of(x[:0], 1)
    for piece in np.array_split(x, pieces):
        merged = merged.merge(RunningVariance.of(piece, 1))
    exact = np.moveaxis(x, 1, 0).reshape(3, -1).astype(np.float64)
    for found in (whole, merged):
        assert found.count == exact.shape[1]
        # a mean may cancel to almost 0: its error is relative to the values
        np.testing.assert_allclose(found.mean, exact.mean(axis=1), rtol=1e-12, atol=1e-12 * float(np.abs(x).max()))
        np.testing.assert_allclose(found.variance, exact.var(axis=1), rtol=1e-7, atol=1e-12)


def test_channels_along_any_axis() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float16)
    for axis in range(3):
        exact = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).astype(np.float64)
        np.testing.assert_allclose(RunningVariance.of(x, axis).variance, exact.var(axis=1), rtol=1e-9)


def test_nothing_seen_is_no_variance() -> None:
    assert RunningVariance.of(np.zeros((0, 2), np.float32), 1).variance.tolist() == [0.0, 0.0]
