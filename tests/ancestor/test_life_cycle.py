"""The ancestor's steps, in order and out of order."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.errors import DataError, RecipeError
from sbonnx.metrics import sqnr_db
from sbonnx.quant_model import LifeCycleError, QuantModel
from sbonnx.spec import Array
from tests.ancestor.networks import residual_block
from tests.ancestor.qconfigs import virtual, written
from tests.support.models import model, run

IMAGES = np.random.default_rng(3).standard_normal((8, 3, 8, 8)).astype(np.float32)

INPUT_PAIR = "x"
NODES = ["/conv1/Conv", "/conv2/Conv", "/skip/Conv", "/Add", "/gap/GlobalAveragePool", "/fc/Gemm"]


PLAIN: dict[str, Any] = {"rounding": "nearest", "bias_correction": "none"}
"""Each layer for itself: no rounding that makes up for what was lost before it."""


def block(folder: Path, bits: int = 8, **wishes: Any) -> QuantModel:
    return QuantModel(residual_block(), written(folder, virtual(bits, qadd=True)), **wishes)


def calibrated(folder: Path, bits: int = 8, **wishes: Any) -> QuantModel:
    one = block(folder, bits, **wishes)
    one.prepare_calibration()
    one(IMAGES)
    one.calc_qparams()
    return one


def output(one: QuantModel, feeds: Array = IMAGES) -> Array:
    (value,) = one(feeds).values()
    return np.asarray(value)


def range_of(one: QuantModel, tensor: str = INPUT_PAIR) -> tuple[float, float]:
    assert one.solution is not None
    bounds = one.solution.bounds[tensor]
    return float(bounds.lo), float(bounds.hi)


def sessions() -> int:
    """How many onnxruntime sessions live in this process."""
    import onnxruntime as ort

    gc.collect()
    return sum(isinstance(thing, ort.InferenceSession) for thing in gc.get_objects())


# --- order ----------------------------------------------------------------------------------------------

TOO_EARLY: dict[str, tuple[Callable[[QuantModel, Path], Any], str]] = {
    "calc_qparams": (lambda one, _: one.calc_qparams(), "call prepare_calibration() and run some samples before"),
    "set_quant": (lambda one, _: one.set_quant(True, True), "call calc_qparams() before set_quant()"),
    "set_quant w": (lambda one, _: one.set_quant(w_quant=True), "call calc_qparams() before set_quant()"),
    "error": (lambda one, _: one.get_quantization_error([IMAGES]), "call calc_qparams() before get_quantization_error"),
    "export": (lambda one, folder: one.export_onnx(folder / "q.onnx"), "call calc_qparams() before export_onnx()"),
}


@pytest.mark.parametrize("step", TOO_EARLY)
@pytest.mark.parametrize("calibrating", [False, True])
def test_a_step_too_early(step: str, calibrating: bool, tmp_path: Path) -> None:
    """One line that names the step to take first; nothing is written."""
    call, message = TOO_EARLY[step]
    with block(tmp_path) as one:
        if calibrating:
            one.prepare_calibration()
            if step == "calc_qparams":
                with pytest.raises(DataError):
                    call(one, tmp_path)
                return
        with pytest.raises(LifeCycleError, match=re.escape(message)) as caught:
            call(one, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.onnx"))


def test_scales_are_gone_when_calibration_begins_again(tmp_path: Path) -> None:
    with calibrated(tmp_path) as one:
        one.set_quant(w_quant=True, a_quant=True)
        one.prepare_calibration()
        with pytest.raises(LifeCycleError):
            one.export_onnx(tmp_path / "q.onnx")
        (expected,) = run(residual_block(), {"x": IMAGES}).values()
        assert output(one) == pytest.approx(expected, rel=1e-4, abs=1e-4), "float again"


def test_calc_qparams_ends_the_collecting(tmp_path: Path) -> None:
    with calibrated(tmp_path) as one:
        before = range_of(one)
        one(100 * IMAGES)
        with pytest.raises(LifeCycleError, match="prepare_calibration"):
            one.calc_qparams()
        assert range_of(one) == before


def test_off_is_allowed_before_calibration(tmp_path: Path) -> None:
    with block(tmp_path) as one:
        one.set_quant(w_quant=False, a_quant=False)
        (expected,) = run(residual_block(), {"x": IMAGES}).values()
        assert output(one) == pytest.approx(expected, rel=1e-4, abs=1e-4)


# --- collecting -----------------------------------------------------------------------------------------


def test_preparing_again_starts_over(tmp_path: Path) -> None:
    with block(tmp_path) as one:
        one.prepare_calibration()
        one(10 * IMAGES)
        one.prepare_calibration()
        one(IMAGES)
        assert one.calc_qparams().samples == len(IMAGES)
        assert range_of(one) == (float(IMAGES.min()), float(IMAGES.max()))


@pytest.mark.parametrize("memory", ["2 GiB", "1 KB"])
def test_the_callers_buffer_may_be_used_again(memory: str, tmp_path: Path) -> None:
    """In memory, and on disk past the budget."""
    buffer = np.empty((1, 3, 8, 8), np.float32)
    with block(tmp_path, memory=memory) as one:
        one.prepare_calibration()
        for image in IMAGES:
            buffer[:] = image
            one({"x": buffer})
        buffer[:] = 1e6
        assert one.calc_qparams().samples == len(IMAGES)
        assert range_of(one) == (float(IMAGES.min()), float(IMAGES.max()))


def test_what_was_fed_before_preparing_does_not_count(tmp_path: Path) -> None:
    with block(tmp_path) as one:
        one(10 * IMAGES)
        one.prepare_calibration()
        one(IMAGES)
        one.calc_qparams()
        assert range_of(one)[1] == float(IMAGES.max())


def test_many_batches_are_one_calibration(tmp_path: Path) -> None:
    """The same ranges as from all images at once, by the life cycle and when calibrating twice."""
    with calibrated(tmp_path) as one:
        assert one.solution is not None
        whole = {key: (numbers.scale, numbers.zero_point) for key, numbers in one.solution.qparams.items()}
        one.prepare_calibration()
        for batch in np.split(IMAGES, [3, 5]):
            one(batch)
        again = one.calc_qparams().qparams
    assert whole.keys() == again.keys()
    for key, (scale, zero) in whole.items():
        np.testing.assert_allclose(again[key].scale, scale, rtol=1e-5)
        assert np.array_equal(again[key].zero_point, zero)


# --- quantizing -----------------------------------------------------------------------------------------


def test_set_quant_switches_weights_and_activations(tmp_path: Path) -> None:
    """Off is the float model; weights alone, activations alone and both are three errors, the last the largest."""
    (expected,) = run(residual_block(), {"x": IMAGES}).values()
    with calibrated(tmp_path, bits=4, **PLAIN) as one:
        assert output(one) == pytest.approx(expected, rel=1e-4, abs=1e-4), "off until asked for"
        found = {}
        for w_quant, a_quant in ((True, False), (False, True), (True, True), (False, False)):
            one.set_quant(w_quant, a_quant)
            found[w_quant, a_quant] = output(one)
    assert found[False, False] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    weights, activations, both = (
        sqnr_db(expected, found[switches]) for switches in ((True, False), (False, True), (True, True))
    )
    assert 10 < both < min(weights, activations) < 40
    assert np.abs(found[True, False] - found[False, True]).max() > 0.01


def test_weights_alone_are_the_exported_weights(tmp_path: Path) -> None:
    """A model with the exported file's weights, dequantized by onnxruntime, and no pair on activations."""
    with calibrated(tmp_path) as one:
        one.set_quant(w_quant=True)
        alone = output(one)
        path = tmp_path / "q.onnx"
        one.export_onnx(path)
    made = onnx.load(str(path))
    pairs = {node.output[0]: node.input[0] for node in made.graph.node if node.op_type == "QuantizeLinear"}
    floats = {
        node.output[0]: pairs[node.input[0]]
        for node in made.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in pairs
    }
    kept = [node for node in made.graph.node if node.output[0] not in {*pairs, *floats}]
    for node in kept:
        node.input[:] = [floats.get(name, name) for name in node.input]
    del made.graph.node[:]
    made.graph.node.extend(kept)
    (expected,) = run(made, {"x": IMAGES}).values()
    assert alone == pytest.approx(expected, abs=1e-5)


def test_exporting_does_not_change_the_model(tmp_path: Path) -> None:
    with calibrated(tmp_path) as one:
        one.set_quant(w_quant=True, a_quant=True)
        before = output(one)
        one.export_onnx(tmp_path / "one.onnx", extra_info="sparsebit")
        one.export_onnx(tmp_path / "two.onnx")
        assert np.array_equal(output(one), before)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    assert {path.name for path in tmp_path.glob("*.onnx")} == {"one.onnx", "one_extra.onnx", "two.onnx"}


# --- looking --------------------------------------------------------------------------------------------


def test_quantization_error_of_every_node(tmp_path: Path) -> None:
    """Alone: the error of rounding this node's inputs and weight. In sequence: with all that came before."""
    with calibrated(tmp_path, bits=4, **PLAIN) as one:
        alone = one.get_quantization_error([IMAGES], is_async=True)
        gathered = one.get_quantization_error([IMAGES], is_async=False)
        one.set_quant(w_quant=True, a_quant=True)
        (expected,) = run(residual_block(), {"x": IMAGES}).values()
        last = float(np.mean((output(one).astype(np.float64) - expected) ** 2))
    assert sorted(alone) == sorted(gathered) == sorted(NODES)
    assert all(0 < alone[name] <= gathered[name] for name in NODES), "here, though errors may cancel"
    assert alone["/conv1/Conv"] == gathered["/conv1/Conv"], "nothing stands before the first"
    assert alone["/conv2/Conv"] < 0.8 * gathered["/conv2/Conv"]
    assert gathered["/fc/Gemm"] == pytest.approx(last, rel=1e-3), "the last node is the output"


def test_quantization_error_by_a_function_of_the_user(tmp_path: Path) -> None:
    calls = []

    def largest(quantized: Array, reference: Array) -> float:
        calls.append(quantized.shape)
        return float(np.abs(quantized - reference).max())

    with calibrated(tmp_path, bits=4) as one:
        alone = one.get_quantization_error([IMAGES[:4], IMAGES[4:]], checker=largest)
        squared = one.get_quantization_error([IMAGES[:4], IMAGES[4:]])
    assert len(calls) == 2 * len(NODES), "once a batch"
    assert all(alone[name] ** 2 > squared[name] for name in NODES)


def test_quantization_error_by_name_and_part(tmp_path: Path) -> None:
    """Named measures; weights and activations apart: their squared errors add up to both, but for what they share."""
    with calibrated(tmp_path, bits=4, **PLAIN) as one:
        both, weights, activations = (
            one.get_quantization_error([IMAGES[:3], IMAGES[3:]], "mse", part=part)
            for part in ("both", "weights", "activations")
        )
        ratio = one.get_quantization_error([IMAGES], "sqnr")
        assert one.get_quantization_error([IMAGES], "mse", False, part="weights")["/fc/Gemm"] < both["/fc/Gemm"] * 10
        with pytest.raises(RecipeError, match="there is no measure 'psnr'"):
            one.get_quantization_error([IMAGES], "psnr")
    assert set(activations) == set(NODES) and set(weights) < set(NODES)
    for name in weights:
        assert both[name] == pytest.approx(weights[name] + activations[name], rel=0.2)
    assert sorted(both, key=lambda name: ratio[name])[0] in sorted(both, key=lambda name: -both[name])[:3]


def test_the_profile_of_every_node(tmp_path: Path) -> None:
    with calibrated(tmp_path, bits=4, **PLAIN) as one:
        found = one.profile([IMAGES], "mse")
        assert {row.node: row.alone for row in found.layers} == one.get_quantization_error([IMAGES], "mse")
        assert {row.node: row.gathered for row in found.layers} == one.get_quantization_error([IMAGES], "mse", False)
        one.dump_mermaid(tmp_path / "loss.md", found.losses("gathered"))
    chart = (tmp_path / "loss.md").read_text()
    worst = found.worst_first("gathered")[0]
    (box,) = re.findall(rf'^(n\d+)\["{re.escape(worst.node)}<br/>', chart, re.MULTILINE)
    assert f"style {box} fill:#e53935,color:#000000" in chart, "the worst is red"
    assert len(re.findall(r"^style n\d+ fill:#\w{6},", chart, re.MULTILINE)) == len(NODES)


def test_mermaid(tmp_path: Path) -> None:
    """Every node, every edge, inputs and outputs in the ancestor's colour; the pairs too once there are scales."""
    path = tmp_path / "graph.md"
    with block(tmp_path) as one:
        one.dump_mermaid(path)
        plain = path.read_text()
    with calibrated(tmp_path) as one:
        one.dump_mermaid(path)
        one.export_onnx(tmp_path / "q.onnx")
    chart, made = path.read_text(), onnx.load(str(tmp_path / "q.onnx"))
    assert plain.startswith("graph TD\n") and chart.startswith("graph TD\n")
    assert plain.count("fill:#cafe02") == chart.count("fill:#cafe02") == 2
    assert "QuantizeLinear" not in plain
    names = re.findall(r'^n\d+\["(.*?)<br/>\((\w+)\)"\]$', chart, re.MULTILINE)
    assert sorted(names) == sorted((node.name, node.op_type) for node in made.graph.node)
    produced = {name for node in made.graph.node for name in node.output} | {"x"}
    edges = sum(name in produced for node in made.graph.node for name in node.input)
    assert chart.count(" --> ") == edges + 1, "and one to the output"


# --- closing --------------------------------------------------------------------------------------------


def test_the_context_manager_closes(tmp_path: Path) -> None:
    before = sessions()
    with calibrated(tmp_path) as one:
        one.set_quant(w_quant=True, a_quant=True)
        first = output(one)
        assert sessions() > before
    assert sessions() == before
    assert np.array_equal(output(one), first), "opened anew"
    one.close()
    one.close()
    assert sessions() == before


def test_it_closes_when_something_fails(tmp_path: Path) -> None:
    before = sessions()
    with pytest.raises(DataError, match="x"), calibrated(tmp_path) as one:
        one.set_quant(a_quant=True)
        output(one)
        one(np.zeros((1, 4, 8, 8), np.float32))
    assert sessions() == before


def test_feeds_by_name_or_alone(tmp_path: Path) -> None:
    """A model with one input takes the array itself; with two it wants names."""
    with block(tmp_path) as one:
        assert np.array_equal(output(one), next(iter(one({"x": IMAGES}).values())))
    two = model("agraph (float[1,4] a, float[1,4] b) => (float[1,4] y) { y = Add (a, b) }")
    with QuantModel(two, written(tmp_path, virtual())) as one, pytest.raises(DataError):
        one(np.zeros((1, 4), np.float32))
