"""Where each backend puts pairs, on graphs small enough to count by hand."""

from __future__ import annotations

import json
from typing import Any

import onnx
import pytest

from sbonnx import planning
from sbonnx.errors import RecipeError
from sbonnx.pipeline import prepare
from sbonnx.planning import Plan
from sbonnx.stages.state import read_recipe
from tests.support.models import model, residual


def planned(proto: onnx.ModelProto, backend: str, recipe: Any = None, **overrides: Any) -> Plan:
    wishes, rules = read_recipe(recipe, backend, overrides)
    return prepare(proto, wishes, rules).plan


def activations(plan: Plan) -> dict[str, list[str]]:
    """Readers by quantized activation."""
    return {site.tensor: sorted(reader.node for reader in site.readers) for site in plan.of_role("activation")}


def test_virtual_places_as_the_ancestor_did() -> None:
    """Both convs, the pool's and the classifier's input; nothing between conv and relu, nothing at the add."""
    plan = planned(residual(), "virtual")
    assert activations(plan) == {"x": ["stem"], "r": ["conv1"], "r1": ["conv2"], "r2": ["gap"], "f": ["fc"]}
    assert {site.tensor for site in plan.of_role("weight")} == {"ws", "w1", "w2", "wf"}
    assert not plan.of_role("bias")


def test_virtual_with_qadd_quantizes_both_inputs_of_the_add() -> None:
    plan = planned(residual(), "virtual", {"BACKEND": "virtual", "A": {"QADD": {"ENABLE_QUANT": True}}})
    assert activations(plan) == {
        "x": ["stem"],
        "r": ["add", "conv1"],
        "r1": ["conv2"],
        "c2": ["add"],
        "r2": ["gap"],
        "f": ["fc"],
    }


def test_tensorrt_quantizes_the_skip_branch_of_an_add_alone() -> None:
    plan = planned(residual(), "tensorrt")
    placed = activations(plan)
    assert placed["r"] == ["add", "conv1"]
    assert "c2" not in placed, "the conv branch fuses with the add"
    assert all(site.spec.symmetric and site.spec.signed for site in plan.sites)
    assert not plan.of_role("bias")


def test_tensorrt_leaves_stems_and_odd_groups_float() -> None:
    proto = model(
        """agraph (float[1,3,8,8] x) => (float[1,16,6,6] y) {
            s = Conv (x, ws)
            d = Conv <group = 16, pads = [1,1,1,1]> (s, wd)
            g = Conv <group = 4, pads = [1,1,1,1]> (d, wg)
            y = Conv (g, wp)
        }""",
        ws=(16, 3, 3, 3),
        wd=(16, 1, 3, 3),
        wg=(16, 4, 3, 3),
        wp=(16, 16, 1, 1),
    )
    plan = planned(proto, "tensorrt")
    assert activations(plan) == {"d": ["Conv_2"], "g": ["Conv_3"]}
    assert {refusal.where for refusal in plan.refusals} == {"Conv_0", "Conv_1"}


def test_a_skip_is_quantized_only_beside_a_conv_in_integers() -> None:
    plan = planned(residual(), "tensorrt", {"BACKEND": "tensorrt", "EXCLUDE": ["conv2"]})
    assert activations(plan)["r"] == ["conv1"]


def test_onnxruntime_writes_integers_from_conv_to_conv() -> None:
    plan = planned(residual(), "onnxruntime")
    placed = activations(plan)
    assert placed["c2"] == ["add"], "the add reads integers on both sides"
    assert placed["r"] == ["add", "conv1"], "one pair a tensor, for every reader"
    assert {"x", "r1", "r2", "g"} <= set(placed)
    assert "y" not in placed, "graph outputs stay float"
    assert all(not site.spec.signed for site in plan.of_role("activation"))
    assert all(site.spec.signed for site in plan.of_role("weight"))
    assert {site.tensor for site in plan.of_role("bias")} == {"bs", "b1", "b2", "bf"}


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "tensorrt"])
def test_weights_have_a_scale_an_output_channel(backend: str) -> None:
    plan = planned(residual(), backend)
    axes = {site.tensor: site.spec.axis for site in plan.of_role("weight")}
    if backend == "tensorrt":
        assert axes.keys() == {"w1", "w2"}, "a stem of 3 channels and a product of few columns stay float there"
        axes |= {"ws": 0, "wf": 0}
    assert axes == {"ws": 0, "w1": 0, "w2": 0, "wf": 0}, "Gemm with transB has its outputs on axis 0"


def test_the_axis_of_every_kind_of_weight() -> None:
    proto = model(
        """agraph (float[2,4,6,6] x, int64[2] ids) => (float[2,5] y, float[2,6,13,13] t, float[2,8] e) {
            t = ConvTranspose <strides = [2,2], group = 2> (x, wt)
            p = GlobalAveragePool (x)
            f = Flatten (p)
            m = MatMul (f, wm)
            y = Gemm (m, wg, bg)
            e = Gather (table, ids)
        }""",
        wt=(4, 3, 3, 3),
        wm=(4, 7),
        wg=(7, 5),
        bg=5,
        table=(20, 8),
    )
    axes = {site.tensor: site.spec.axis for site in planned(proto, "virtual").of_role("weight")}
    assert axes == {"wt": 1, "wm": 1, "wg": 1, "table": 0}


def test_a_weight_used_along_two_axes_gets_a_site_each() -> None:
    proto = model(
        """agraph (float[3,16] x) => (float[3,16] y) {
            a = Gemm <transB = 1> (x, w, b)
            y = Gemm <transB = 0> (a, w, b)
        }""",
        w=(16, 16),
        b=16,
    )
    sites = planned(proto, "tensorrt").of_role("weight")
    assert [(site.tensor, site.spec.axis, len(site.readers)) for site in sites] == [("w", 0, 1), ("w", 1, 1)]
    assert len({site.key for site in sites}) == 2


def test_data_movement_shares_the_scale_of_its_input() -> None:
    proto = model(
        """agraph (float[1,8,8,8] x) => (float[1,16] y) {
            c = Conv (x, w)
            r = Relu (c)
            d = Conv (r, w)
            m = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
            t = Transpose <perm = [0,2,3,1]> (m)
            f = Flatten (t)
            z = Flatten (d)
            u = MatMul (f, v)
            k = MatMul (z, v2)
            y = Add (u, k)
        }""",
        w=(8, 8, 1, 1),
        v=(128, 16),
        v2=(512, 16),
    )
    for backend in ("virtual", "tensorrt", "onnxruntime"):
        sites = {site.tensor: site for site in planned(proto, backend).of_role("activation")}
        assert sites["f"].group == sites["r"].group, backend
        assert sites["r"].group != sites["x"].group, backend


def test_tensorrt_gives_a_concat_one_scale() -> None:
    proto = model(
        """agraph (float[1,8,8,8] x) => (float[1,8,8,8] y) {
            a = Conv (x, w)
            ra = Relu (a)
            b = Conv (ra, w)
            rb = Relu (b)
            c = Concat <axis = 1> (ra, rb)
            y = Conv (c, w2)
        }""",
        w=(8, 8, 1, 1),
        w2=(8, 16, 1, 1),
    )
    sites = {site.tensor: site for site in planned(proto, "tensorrt").of_role("activation")}
    assert sites["c"].group == sites["ra"].group
    assert sites["x"].group != sites["c"].group


def test_bits_zero_and_disable_mean_float() -> None:
    bits0 = planned(residual(), "virtual", {"BACKEND": "virtual", "A": {"QUANTIZER": {"BIT": 0}}})
    assert not bits0.of_role("activation")
    assert bits0.of_role("weight")
    disabled = planned(residual(), "virtual", {"BACKEND": "virtual", "W": {"QUANTIZER": {"DISABLE": True}}})
    assert not disabled.of_role("weight")
    assert any(refusal.what == "quantize weight" and "W" in refusal.why for refusal in disabled.refusals)


def test_specific_matches_original_names_even_after_fusion() -> None:
    recipe = {
        "BACKEND": "virtual",
        "W": {"SPECIFIC": [{"conv1": ["QUANTIZER.BIT", 4]}, {"op:Gemm": ["QUANTIZER.DISABLE", True]}]},
    }
    plan = planned(residual(), "virtual", recipe)
    bits = {site.tensor: site.spec.bits for site in plan.of_role("weight")}
    assert bits == {"ws": 8, "w1": 4, "w2": 8}


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="conv1"):
        planned(residual(), "virtual", {"BACKEND": "virtual", "EXCLUDE": ["conv11"]})


def test_first_and_last_layers_have_their_own_width() -> None:
    recipe = {"BACKEND": "virtual", "FIRST_BITS": "w8a8", "LAST_BITS": "w16a16"}
    plan = planned(residual(), "virtual", recipe, bits="w4a4")
    bits = {site.tensor: site.spec.bits for site in plan.sites}
    assert (bits["x"], bits["ws"], bits["w1"], bits["r1"], bits["f"], bits["wf"]) == (8, 8, 4, 4, 16, 16)


def test_blocks_are_not_entered() -> None:
    """SiLU between two convs: onnxruntime gets a pair before and after, none inside."""
    proto = model(
        """agraph (float[1,8,8,8] x) => (float[1,4,1,1] y) {
            c = Conv (x, w)
            s = Sigmoid (c)
            m = Mul (c, s)
            d = Conv (m, w)
            y = GlobalAveragePool (d)
        }""",
        w=(8, 8, 1, 1),
    )
    for backend in ("virtual", "tensorrt", "onnxruntime"):
        assert "s" not in activations(planned(proto, backend)), backend
    assert {"x", "c", "m", "d"} == set(activations(planned(proto, "onnxruntime")))
    assert {"x", "m"} == set(activations(planned(proto, "tensorrt")))


def test_a_plan_survives_the_trip_through_json() -> None:
    for backend in ("virtual", "onnxruntime", "tensorrt"):
        plan = planned(residual(), backend)
        assert planning.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_every_site_says_why() -> None:
    for backend in ("virtual", "onnxruntime", "tensorrt"):
        assert all(site.why for site in planned(residual(), backend).sites)


def test_a_fixed_range_and_shared_scales_come_from_the_recipe() -> None:
    recipe = {"BACKEND": "virtual", "RANGES": {"x": [-2, 2]}, "SHARED_SCALES": [["r", "r1"]]}
    sites = {site.tensor: site for site in planned(residual(), "virtual", recipe).of_role("activation")}
    assert sites["x"].fixed == (-2.0, 2.0)
    assert sites["r"].group == sites["r1"].group


def test_channels_are_not_tied_across_data_movement_or_by_wish() -> None:
    """One scale a channel: behind a Transpose the channels are others, and another tensor may have more of them."""
    proto = model(
        """agraph (float[1,4,6,6] x) => (float[1,6,6,4] y, float[1,4,6,6] z) {
            c = Conv (x, w)
            r = Relu (c)
            z = Conv (r, w)
            t = Transpose <perm = [0,2,3,1]> (r)
            y = Tanh (t)
        }""",
        w=(4, 4, 1, 1),
    )
    recipe = {"BACKEND": "virtual", "A": {"QSCHEME": "per-channel-affine", "QADD": {"ENABLE_QUANT": True}}}
    sites = {site.tensor: site for site in planned(proto, "virtual", recipe).of_role("activation")}
    assert sites["t"].spec.axis == 1
    assert sites["t"].group == "t"
    plan = planned(residual(), "virtual", {**recipe, "SHARED_SCALES": [["x", "r"]]})
    assert len({site.group for site in plan.of_role("activation")}) == len(plan.of_role("activation"))
    assert any(refusal.what == "share scale" for refusal in plan.refusals)


def test_what_the_recipe_leaves_float_reads_no_integers() -> None:
    """onnxruntime's convs write integers; an excluded reader gets none, and no pair stands for it alone."""
    plan = planned(residual(), "onnxruntime", {"BACKEND": "onnxruntime", "EXCLUDE": ["conv2"]})
    assert "conv2" not in {reader.node for site in plan.sites for reader in site.readers}
    assert "r1" not in activations(plan), "nobody else reads it"
    plan = planned(residual(), "onnxruntime", {"BACKEND": "onnxruntime", "SKIP_TRACE_MODULES": ["add"]})
    assert activations(plan)["r"] == ["conv1"]
    plan = planned(residual(), "onnxruntime", {"BACKEND": "onnxruntime", "INCLUDE": ["conv1"]})
    assert activations(plan) == {"r": ["conv1"]}


def test_ranges_and_shared_scales_without_effect_are_refused() -> None:
    """'s' lies between a conv and its relu: it exists in the file, and no pair stands there."""
    recipe = {"BACKEND": "virtual", "RANGES": {"s": [0, 1], "x": [-1, 1]}, "SHARED_SCALES": [["r", "s"]]}
    refusals = {(refusal.what, refusal.where) for refusal in planned(residual(), "virtual", recipe).refusals}
    assert refusals == {("fix range", "s"), ("share scale", "r, s")}


def test_onnxruntime_leaves_in_float_what_the_model_ends_with() -> None:
    """After the last linear op no integer kernel is left to gain: the conv writes integers, and that is all."""
    proto = model(
        """agraph (float[N,4,8,8] x) => (float[N,4,4,4] y) {
            c = Conv (x, w)  d = Conv (c, w)  s = Sigmoid (d)
            p = AveragePool <kernel_shape = [2,2], strides = [2,2]> (s)
            y = Mul (p, p)
        }""",
        w=(4, 4, 1, 1),
    )
    assert activations(planned(proto, "onnxruntime")).keys() == {"x", "c", "d"}


def test_onnxruntime_leaves_a_conv_in_float_whose_output_is_one_of_the_graph() -> None:
    """It would run in float behind a DequantizeLinear, for nothing; the refusal says so."""
    proto = model(
        """agraph (float[N,4,8,8] x) => (float[N,4,8,8] r, float[N,4,8,8] y) {
            c = Conv (x, w)  r = Relu (c)  d = Conv (r, w)  e = Conv (d, w)  y = Relu (e)
        }""",
        w=(4, 4, 1, 1),
    )
    plan = planned(proto, "onnxruntime")
    assert activations(plan) == {"r": ["Conv_1"], "d": ["Conv_2"]}
    assert {refusal.where for refusal in plan.refusals if "output of the graph" in refusal.why} == {"Conv_0", "Conv_2"}


def test_onnxruntime_adds_in_integers_only_what_is_integer_already() -> None:
    """A residual stream of a transformer stays float beside the one that a conv wrote."""
    proto = model(
        """agraph (float[N,4,4] x) => (float[N,4,4] y) {
            c = Conv (x, k)  l = Tanh (c)  m = MatMul (l, w)  a = Add (c, m)  n = Tanh (a)  y = MatMul (n, w)
        }""",
        k=(4, 4, 1),
        w=(4, 4),
    )
    assert activations(planned(proto, "onnxruntime")).keys() == {"x", "c", "l", "n"}


@pytest.mark.parametrize("batch", ["2", "N"])
def test_onnxruntime_takes_the_bias_of_a_static_matmul_in_int32(batch: str) -> None:
    """onnxruntime makes a MatMul and Add of static shape a Gemm, whose integer kernel wants the bias so."""
    text = "agraph (float[BATCH,6,4] x) => (float[BATCH,6,4] y) { m = MatMul (x, w)  y = Add (b, m) }"
    plan = planned(model(text.replace("BATCH", batch), w=(4, 4), b=4), "onnxruntime")
    assert [site.tensor for site in plan.of_role("bias")] == (["b"] if batch == "2" else [])


def test_matrix_products_take_one_scale_for_their_data() -> None:
    """They sum over the channels, and onnxruntime's kernels refuse the file otherwise."""
    proto = model("agraph (float[2,3,4] x) => (float[2,3,5] y) { y = MatMul (x, v) }", v=(4, 5))
    plan = planned(proto, "virtual", {"BACKEND": "virtual", "A": {"QSCHEME": "per-channel-affine"}})
    (site,) = plan.of_role("activation")
    assert site.spec.axis is None
    assert [refusal.what for refusal in plan.refusals] == ["quantize input per channel"]


def test_a_switch_overrules_what_the_backend_would_leave_float() -> None:
    proto = model(
        """agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) {
            a = Add (x, z)
            s = Sub (a, z)
            y = Exp (s)
        }"""
    )
    assert not planned(proto, "onnxruntime").sites
    wish = {"QUANTIZE_INPUTS_OF": {"ADD": True, "ELEMENTWISE": True}}
    placed = activations(planned(proto, "onnxruntime", {"BACKEND": "onnxruntime", **wish}))
    assert {"x", "z", "a"} == set(placed)


def test_a_reader_with_another_scheme_is_reported() -> None:
    recipe = {
        "BACKEND": "onnxruntime",
        "A": {"SPECIFIC": [{"conv2": ["QSCHEME", "per-tensor-symmetric"]}]},
        "SCHEDULE": {"DISABLE_UNNECESSARY_QUANT": False},
    }
    refusals = {(refusal.what, refusal.where) for refusal in planned(residual(), "onnxruntime", recipe).refusals}
    assert ("quantize input as uint8 sym", "conv2") in refusals
    assert ("quantize before activations", "SCHEDULE.DISABLE_UNNECESSARY_QUANT") in refusals


@pytest.mark.parametrize(
    ("rows", "columns", "small"), [(16, 16, False), (64, 15, True), (15, 64, True), (512, 1000, False)]
)
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_small_products_stay_float_on_tensorrt(op: str, rows: int, columns: int, small: bool) -> None:
    proto = model(
        f"agraph (float[3,{rows}] x) => (float[3,{columns}] y) {{ y = {op} (x, w) }}",
        w=(rows, columns),
    )
    plan = planned(proto, "tensorrt")
    assert (plan.of_role("weight") == ()) == small
    assert any("mostly empty" in refusal.why for refusal in plan.refusals) == small
