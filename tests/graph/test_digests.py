"""Digests of tensors: they change with each thing that changes numbers, and with nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import helper, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Variable, load, save
from sbonnx.graph import digest as graph_digest
from sbonnx.graph.digests import array_digests, outputs_digest, tensor_digests
from sbonnx.graph.query import all_nodes, all_tensors, node_by_name, tensors_by_name
from sbonnx.graph.storage.weights import MappedWeights
from tests.graph.digesting import IF, LOOP, changed, of, set_weight
from tests.support.models import model, residual

ROOT = Path(__file__).resolve().parents[2]
REAL = (
    "cifar_resnet20",
    "fastestdet",
    "minilm_l6",
    "mobilenetv2_tin200",
    "silero_vad",
    "squeezenet11",
    "ultraface_rfb320",
)

F32 = np.arange(1, 5, dtype=np.float32)

# --- what counts ---------------------------------------------------------------------------------------------------

AFTER_CONV1 = {"c1", "r1", "c2", "a", "r2", "g", "f", "y"}


PIECE = 4 << 20
"""Bytes, more than any hash takes in at a time."""


def test_a_weight_changes_itself_and_all_that_follows() -> None:
    proto = residual()
    weight = numpy_helper.to_array(next(one for one in proto.graph.initializer if one.name == "w1")).copy()
    weight[3, 2, 1, 0] = np.nextafter(weight[3, 2, 1, 0], np.float32(10))
    assert changed(proto, set_weight("w1", weight)) == {"w1", *AFTER_CONV1}


def test_an_attribute_changes_all_that_follows() -> None:
    def edit(graph: Graph) -> None:
        node_by_name(graph)["conv1"].attrs["dilations"] = [1, 1]

    assert changed(residual(), edit) == AFTER_CONV1


def test_an_input_changes_all_that_follows() -> None:
    def widen(graph: Graph) -> None:
        graph.inputs[0].shape = ("N", 3, 16, 16)

    def rename(graph: Graph) -> None:
        graph.inputs[0].name = "image"

    everything = {"x", "s", "r", *AFTER_CONV1}
    assert changed(residual(), widen) == everything
    assert changed(residual(), rename) == everything - {"x"}


def test_the_operator_counts_and_its_domain_and_version() -> None:
    def edit(key: str, value: str) -> Callable[[Graph], object]:
        return lambda graph: setattr(node_by_name(graph)["relu1"], key, value)

    assert changed(residual(), edit("op", "Tanh")) == AFTER_CONV1 - {"c1"}
    assert changed(residual(), edit("domain", "com.microsoft")) == AFTER_CONV1 - {"c1"}

    def newer(graph: Graph) -> None:
        graph.opset += 1

    assert changed(residual(), newer) == {"s", "r", *AFTER_CONV1}


def test_the_order_of_inputs_counts_and_which_are_left_out() -> None:
    text = "agraph (float[4] x, float[4] z) => (float[4] y) { a = Relu (x) b = Tanh (z) y = Sub (a, b) }"
    assert of(model(text))["y"] != of(model(text.replace("(a, b)", "(b, a)")))["y"]
    clip = "agraph (float[4] x) => (float[4] y) { y = Clip (x, LIMITS) }"
    limit = np.float32(1)
    low, high = (of(model(clip.replace("LIMITS", at), k=limit))["y"] for at in ("k", ", k"))
    assert low != high


def test_each_output_is_its_own_and_their_number_counts() -> None:
    split = "agraph (float[12] x) => (float[N] y) { OUT = Split (x) y = Relu (a) }"
    two, three = (of(model(split.replace("OUT", names))) for names in ("a, b", "a, b, c"))
    assert two["a"] != two["b"] and two["a"] != three["a"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (F32[:2], F32[1::-1]),
        (F32[:2], F32[None, :2]),
        (F32, F32.astype(np.float64)),
        (F32.astype(np.int32), F32.astype(np.uint32)),
        (np.zeros(1, np.float32), -np.zeros(1, np.float32)),
        (F32.astype(np.float16), F32.astype(np.float16).view(ml_dtypes.bfloat16)),
        (np.array(["ab", "c"], object), np.array(["a", "bc"], object)),
        (np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32)),
        (np.zeros(PIECE + 1, np.uint8), np.zeros(PIECE + 2, np.uint8)),
        (F32.astype(ml_dtypes.int4), F32.astype(ml_dtypes.uint4)),
    ],
)
def test_type_shape_and_bytes_of_a_constant_count(one: Any, other: Any) -> None:
    first, again, second = array_digests([one, one.copy(), other])
    assert first == again != second


@settings(deadline=None, max_examples=50)
@given(npst.arrays(npst.integer_dtypes() | npst.floating_dtypes(), npst.array_shapes(max_side=6)), st.data())
def test_any_byte_counts(values: Any, data: st.DataObject) -> None:
    raw = bytearray(np.ascontiguousarray(values).tobytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    other = np.frombuffer(bytes(raw), values.dtype).reshape(values.shape)
    first, second, swapped = array_digests([values, other, values.astype(values.dtype.newbyteorder())])
    assert first != second and first == swapped
    assert next(array_digests([np.asfortranarray(values)])) == first, "how it lies in memory is nothing to numbers"


# --- what does not -------------------------------------------------------------------------------------------------


def test_names_of_nodes_and_tensors_do_not_count() -> None:
    def rename(graph: Graph) -> None:
        for node in all_nodes(graph):
            node.name = f"other_{node.name}"
        for tensor in all_tensors(graph):
            if tensor not in graph.inputs:
                tensor.name = f"other_{tensor.name}"

    for proto in (residual(), model(IF, k1=(4,), k2=(4,)), model(LOOP, k=(4,))):
        graph = load(proto)
        before = tensor_digests(graph)
        rename(graph)
        after = tensor_digests(graph)
        assert {name: after.get(f"other_{name}", after.get(name)) for name in before} == before


def test_what_is_not_upstream_does_not_count() -> None:
    def edit(graph: Graph) -> None:
        tensors = tensors_by_name(graph)
        observed = Variable("seen", np.float32)
        graph.nodes.append(Node("Relu", "extra", {}, [tensors["c1"]], [observed]))
        graph.outputs.append(observed)
        graph.nodes.reverse()
        graph.name = "renamed"
        graph.info.metadata["author"] = "somebody"
        tensors["c2"].shape = None
        tensors["c2"].dtype = None

    assert changed(residual(), edit) == set()


def test_how_attributes_and_dimensions_are_written_does_not_count() -> None:
    def edit(graph: Graph) -> None:
        for node in all_nodes(graph):
            node.attrs = {name: tuple(v) if isinstance(v, list) else v for name, v in reversed(node.attrs.items())}
        graph.inputs[0].shape = ("batch", 3, 8, 8)

    assert changed(residual(), edit) == set()


def test_the_same_twice_is_the_same() -> None:
    text = "agraph (float[4] x) => (float[4] y) { a = Mul (x, k1) b = Mul (x, k2) c = Mul (x, k3) y = Sum (a, b, c) }"
    found = of(model(text, k1=np.ones(4, np.float32), k2=np.ones(4, np.float32), k3=np.zeros(4, np.float32)))
    assert found["a"] == found["b"] != found["c"]


def test_random_numbers_are_never_the_same() -> None:
    text = """agraph (float[4] x) => (float[4] y) {
        a = RandomNormalLike (x)  b = RandomNormalLike (x)  y = Add (a, b)
    }"""
    found = of(model(text))
    assert found["a"] != found["b"]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "int4", "uint4", "bool"])
def test_where_weights_lie_does_not_count(kind: str, tmp_path: Path) -> None:
    """In a model in memory, in its file, beside it (mapped), loaded as an array."""
    dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
    values = np.random.default_rng(0).integers(0, 2, (33, 67)).astype(dtype)
    text = "agraph (float[N,33] x) => (float[N,67] y) { f = Cast <to = 1> (w) y = MatMul (x, f) }"
    graph = load(model(text, opset=21, w=values))
    first = tensor_digests(graph)
    for name, over in (("inside.onnx", 1 << 30), ("beside.onnx", 0)):
        save(graph, tmp_path / name, external_over=over)
        again = load(tmp_path / name)
        stored = tensors_by_name(again)["w"]._values
        assert tensor_digests(again) == first
        if isinstance(stored, MappedWeights):
            tensors_by_name(again)["w"]._values = stored.load()
            assert tensor_digests(again) == first


# --- attributes ----------------------------------------------------------------------------------------------------


def attribute_digest(value: Any) -> str:
    x, y = Variable("x", np.float32, (4,)), Variable("y", np.float32, (4,))
    return tensor_digests(Graph([Node("Custom", "n", {"a": value}, [x], [y], domain="here")], [x], [y]))["y"]


def test_attributes_of_every_kind_count() -> None:
    tensor = np.arange(3, dtype=np.float32)
    values: list[Any] = [1, 2, 1.5, -1.5, "a", "b", "", [1, 2], [12], [1.0, 2.0], ["1", "2"], ["12"], [[1], [2]], []]
    values += [
        Constant("", tensor),
        Constant("", tensor + 1),
        helper.make_attribute("a", helper.make_tensor_type_proto(1, [2])),
    ]
    found = [attribute_digest(value) for value in values]
    assert len(set(found)) == len(values)
    assert attribute_digest(Constant("named", tensor)) == attribute_digest(tensor)
    assert attribute_digest(0.1) == attribute_digest(float(np.float32(0.1))) == attribute_digest(np.float32(0.1))
    assert attribute_digest(np.int64(1)) == attribute_digest(1) and attribute_digest(b"a") == attribute_digest("a")


def test_an_attribute_onnx_does_not_have() -> None:
    with pytest.raises(ModelError, match="attribute 'a' of node 'n' is a dict"):
        attribute_digest({})


# --- whole models, processes, time ---------------------------------------------------------------------------------


def test_the_digest_of_all_outputs() -> None:
    graph = load(residual())
    before = outputs_digest(graph)
    assert outputs_digest(graph, tensor_digests(graph)) == before
    graph.outputs[0].name = "z"
    assert outputs_digest(graph) != before
    tensors_by_name(graph)["bf"].values = np.zeros(10, np.float32)
    assert outputs_digest(graph) != before


def test_digests_are_what_they_were() -> None:
    """Caches outlive a process and an upgrade of Python: the form of a digest changes on purpose only."""
    text = """agraph (float[N,1,4,4] x, bool c) => (float[N,2,4,4] y) {
        a = Conv <pads = [1,1,1,1]> (x, w)
        y = If (c) < then_branch = p () => (float[N,2,4,4] t) { t = LeakyRelu <alpha = 0.3> (a) },
                     else_branch = q () => (float[N,2,4,4] e) { e = Identity (a) } >
    }"""
    found = of(model(text, w=np.arange(18, dtype=np.float32).reshape(2, 1, 3, 3)))
    total = hashlib.sha256("".join(f"{name} {found[name]}\n" for name in sorted(found)).encode()).hexdigest()
    assert total[:32] == "d8148c844aad7512297bd019878b660d"
    assert all(len(value) == 32 and set(value) <= set("0123456789abcdef") for value in found.values())


def test_another_process_finds_the_same() -> None:
    code = (
        "from sbonnx.graph import load; from sbonnx.graph.digests import outputs_digest;"
        "from tests.support.models import residual; print(outputs_digest(load(residual())))"
    )
    seeds = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seeds == {outputs_digest(load(residual()))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str, pack: Path, tmp_path: Path) -> None:
    """Loaded again, saved and loaded, with weights beside the file: the same; one weight's last bit: its followers."""
    path = pack / "models" / f"{name}.onnx"
    graph = load(path)
    first = tensor_digests(graph)
    assert first.keys() == {tensor.name for tensor in all_tensors(graph)}
    assert tensor_digests(load(path)) == first
    save(graph, tmp_path / "m.onnx", external_over=0)
    assert tensor_digests(load(tmp_path / "m.onnx")) == first
    weight = next(
        one for one in all_tensors(graph) if isinstance(one, Constant) and one.dtype == np.float32 and one.outputs
    )
    value = np.array(weight._values.load() if isinstance(weight._values, MappedWeights) else weight._values)
    value.reshape(-1)[-1] += 1
    weight.values = value
    after = tensor_digests(graph)
    assert after[weight.name] != first[weight.name]
    assert outputs_digest(graph, after) != outputs_digest(load(path))
    assert any(first[one] == after[one] for one in first if one != weight.name)


def test_the_digest_of_a_graph_sees_every_block(tmp_path: Path) -> None:
    values = np.zeros(3 * PIECE // 4 + 5, np.float32)
    text = f"agraph (float[1] x) => (float[{values.size}] y) {{ y = Add (x, w) }}"
    graph = load(model(text, w=values))
    seen = {graph_digest(graph)}
    for place in (0, PIECE // 4, 2 * PIECE // 4 - 1, values.size - 1):
        other = values.copy()
        other[place] = 1
        tensors_by_name(graph)["w"].values = other
        seen.add(graph_digest(graph))
    assert len(seen) == 5


def test_a_branch_depends_on_its_condition_and_on_itself() -> None:
    proto = model(IF, k1=(4,), k2=(4,))
    assert changed(proto, set_weight("k1", np.ones(4, np.float32))) == {"k1", "m", "t", "y"}
    assert changed(proto, set_weight("k2", np.ones(4, np.float32))) == {"k2", "q", "e", "y"}

    def negate(graph: Graph) -> None:
        node = next(one for one in graph.nodes if one.op == "If")
        other = Variable("negated", np.bool_, ())
        graph.nodes.append(Node("Not", "negate", {}, [node.inputs[0]], [other]))
        node.inputs[0] = other

    assert changed(proto, negate) == {"m", "t", "q", "e", "y"}, "the branches run on other samples"


def test_a_branch_is_not_what_always_runs_nor_the_other_branch() -> None:
    text = """agraph (float[N,4] x, bool c) => (float[N,4] y, float[N,4] z) {
        z = Sigmoid (x)
        y = If (c) < then_branch = a () => (float[N,4] t) { t = Sigmoid (x) },
                     else_branch = b () => (float[N,4] e) { e = Sigmoid (x) } >
    }"""
    found = of(model(text))
    assert len({found["z"], found["t"], found["e"]}) == 3


def test_a_loop_counts_as_a_whole() -> None:
    proto = model(LOOP, k=(4,))
    inside = {"i", "c", "s", "c2", "d", "s2"}
    assert inside <= of(proto).keys()
    assert changed(proto, set_weight("k", np.ones(4, np.float32))) == {"k", "y", *inside}
    text = LOOP.replace("d = Mul (s, k)", "d = Mul (k, s)")
    assert of(model(text, k=(4,)))["y"] != of(proto)["y"], "the parameters are told apart"


def test_parameters_of_nested_loops_are_distinct() -> None:
    text = """agraph (float[4] x, int64 n, bool go) => (float[4] y) {
        y = Loop (n, go, x) < body = outer (int64 i, bool c, float[4] s) => (bool c2, float[4] s2) {
            c2 = Identity (c)
            s2 = Loop (n, go, s) < body = inner (int64 j, bool d, float[4] u) => (bool d2, float[4] u2) {
                d2 = Identity (d)  u2 = Sub (u, WHICH)
            } >
        } >
    }"""
    own, enclosing = (of(model(text.replace("WHICH", name))) for name in ("u", "s"))
    assert own["y"] != enclosing["y"] and own["u"] != own["s"]


def test_bodies_in_bodies_take_linear_time() -> None:
    """Twenty deep; a walk that looks into each body twice would look a million times."""
    inner = "r20 = Relu (x)"
    for depth in range(19, -1, -1):
        inner = (
            f"r{depth} = If (c) < then_branch = a{depth} () => (float[4] r{depth + 1}) {{ {inner} }}, "
            f"else_branch = b{depth} () => (float[4] e{depth}) {{ e{depth} = Tanh (x) }} >"
        )
    graph = load(model(f"agraph (float[4] x, bool c) => (float[4] r0) {{ {inner} }}"))
    start = time.perf_counter()
    assert len(set(tensor_digests(graph).values())) >= 42
    assert time.perf_counter() - start < 2
