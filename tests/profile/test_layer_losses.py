"""Losses against onnxruntime running files in which only what is asked for has Q/DQ pairs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError
from sbonnx.graph import load
from sbonnx.pipeline import prepare
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.profiling import WalkOptions, losses, node_errors
from sbonnx.profiling.layer_losses import losses_alone
from sbonnx.profiling.walk import Walk
from sbonnx.report.details import Column
from sbonnx.spec import Array, QuantSpec
from sbonnx.stages.state import read_recipe
from tests.calib.engine.branching import nested
from tests.calib.quantized.test_forward import with_qdq
from tests.support.calibration import calibrate
from tests.support.models import model, residual, run
from tests.support.naive import plan_linear

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(3)
X = RNG.standard_normal((6, 3, 8, 8)).astype(np.float32)
FEEDS = [{"x": X[:2]}, {"x": X[2:5]}, {"x": X[5:]}]
W4 = QuantSpec(bits=4, axis=0)
A8 = QuantSpec(signed=False, symmetric=False)
LAYERS = ("stem", "conv1", "conv2", "fc")
ROLES: dict[Column, tuple[str, ...]] = {
    "alone": ("weight", "activation", "bias"),
    "weights": ("weight",),
    "activations": ("activation",),
}


def solved(
    proto: onnx.ModelProto, feeds: list[Any], *, weight: QuantSpec = W4, bias: bool = True
) -> tuple[Any, Plan, Solution]:
    """The graph, a plan of its linear ops, and its solution."""
    graph = load(proto)
    plan = plan_linear(graph, activation=A8, weight=weight, bias=bias)
    return graph, plan, calibrate(graph, plan, feeds)


def only(plan: Plan, node: str, roles: tuple[str, ...]) -> Plan:
    """The sites of some roles that one node reads, for it alone."""
    sites = []
    for site in plan.sites:
        readers = tuple(reader for reader in site.readers if reader.node == node)
        if readers and site.role in roles:
            sites.append(replace(site, readers=readers))
    return replace(plan, sites=tuple(sites))


def shown(proto: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """The model with an inner tensor as its only output."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    del made.graph.output[:]
    made.graph.output.append(onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, None))
    return made


def squared(values: list[Array], references: list[Array]) -> float:
    """Mean squared difference over all feeds."""
    diff = np.concatenate([(v.astype(np.float64) - r).ravel() for v, r in zip(values, references, strict=True)])
    return float((diff**2).mean())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("column", [*ROLES, "gathered"])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_layer_as_a_file_of_its_own(column: Column, threads: int) -> None:
    proto = residual(opset=21)
    graph, plan, solution = solved(proto, FEEDS)
    found = losses(graph, plan, solution, FEEDS, checker="mse", columns=(column,), options=WalkOptions(threads=threads))
    assert [row.node for row in found.layers] == list(LAYERS)
    tensors = {node.name: node.output[0] for node in proto.graph.node}
    for row in found.layers:
        part = plan if column == "gathered" else only(plan, row.node, ROLES[column])
        made, plain = shown(with_qdq(proto, part, solution), tensors[row.node]), shown(proto, tensors[row.node])
        values = [run(made, feed)[tensors[row.node]] for feed in FEEDS]
        references = [run(plain, feed)[tensors[row.node]] for feed in FEEDS]
        assert row.value(column) == pytest.approx(squared(values, references), rel=1e-3), row.node
        assert all(
            row.value(other) is None for other in ("alone", "weights", "activations", "gathered") if other != column
        )
        assert row.feeds == found.feeds == len(FEEDS)
    assert not found.notes


def test_outputs_are_those_of_the_whole_network() -> None:
    proto = residual(opset=21)
    graph, plan, solution = solved(proto, FEEDS)
    found = losses(graph, plan, solution, FEEDS, checker="mse")
    made = with_qdq(proto, plan, solution)
    expected = squared([run(made, feed)["y"] for feed in FEEDS], [run(proto, feed)["y"] for feed in FEEDS])
    assert found.outputs == {"y": pytest.approx(expected, rel=1e-3)}
    assert found.layers[-1].gathered == pytest.approx(expected, rel=1e-3), "the last layer gives the output"
    assert found.layers[0].gathered == found.layers[0].alone, "nothing stands before the first"


def test_memory_and_threads_change_nothing() -> None:
    """A store of a few bytes spills every tensor to disk."""
    graph, plan, solution = solved(residual(), FEEDS)
    found = [
        losses(graph, plan, solution, FEEDS, options=WalkOptions(memory=memory, threads=threads))
        for memory, threads in (("1 GiB", 1), (64, 1), (64, 4))
    ]
    assert found[0] == found[1] == found[2]


def test_the_batches_do_not_matter() -> None:
    graph, plan, solution = solved(residual(), FEEDS)
    cut = losses(graph, plan, solution, FEEDS, checker="sqnr")
    whole = losses(graph, plan, solution, [{"x": X}], checker="sqnr")
    for one, other in zip(cut.layers, whole.layers, strict=True):
        assert one.alone == pytest.approx(other.alone, abs=0.01)
        assert one.gathered == pytest.approx(other.gathered, abs=0.01)
    assert losses(graph, plan, solution, FEEDS, options=WalkOptions(limit=1)).feeds == 1


BRANCH_FEEDS = [
    {"x": RNG.standard_normal((2, 4)).astype(np.float32), "a": np.array(a), "b": np.array(b)}
    for a, b in ((True, True), (True, False), (False, True), (True, True))
]


def test_layers_in_branches() -> None:
    """Each on the feeds that took its branch; onnxruntime tells what the branch gave through the graph's output."""
    proto = nested()
    graph, plan, solution = solved(proto, BRANCH_FEEDS, weight=QuantSpec())
    found = losses(graph, plan, solution, BRANCH_FEEDS, checker="mse")
    rows = {row.tensor: row for row in found.layers}
    assert {name: row.feeds for name, row in rows.items()} == {"m": 4, "p": 3, "u": 2, "u2": 1, "e": 1}
    assert sum("is in a branch that was taken on" in note for note in found.notes) == 4
    skipped = [feed for feed in BRANCH_FEEDS if not feed["a"]]
    alone = with_qdq(proto, only(plan, rows["e"].node, ROLES["alone"]), solution)
    everything = with_qdq(proto, plan, solution)
    references = [run(proto, feed)["y"] for feed in skipped]
    for made, value in ((alone, rows["e"].alone), (everything, rows["e"].gathered)):
        assert value == pytest.approx(squared([run(made, feed)["y"] for feed in skipped], references), rel=1e-3)
    expected = squared(
        [run(everything, feed)["y"] for feed in BRANCH_FEEDS], [run(proto, feed)["y"] for feed in BRANCH_FEEDS]
    )
    assert found.outputs["y"] == pytest.approx(expected, rel=1e-3)


def test_a_quantized_network_that_takes_another_branch() -> None:
    """The condition hangs on a quantized product: what is decided there is said, not compared."""
    text = """
    agraph (float[1,4] x, float limit) => (float[1,4] y) {
        m = MatMul (x, w0)
        s = ReduceSum <keepdims = 0> (m)
        c = Less (s, limit)
        y = If (c) <
            then_branch = yes () => (float[1,4] t) { t = MatMul (m, w1) },
            else_branch = no () => (float[1,4] e) { e = MatMul (m, w2) }
        >
    }"""
    proto = model(text, w0=(4, 4), w1=(4, 4), w2=(4, 4))
    for number, node in enumerate(proto.graph.node):
        node.name = f"n{number}"
    for attribute in proto.graph.node[3].attribute:
        attribute.g.node[0].name = f"in_{attribute.name}"
    x = RNG.standard_normal((1, 4)).astype(np.float32)
    exact = float((x @ onnx.numpy_helper.to_array(proto.graph.initializer[0])).sum())
    feeds = [{"x": x, "limit": np.array(exact + step, np.float32)} for step in (-50, 50)]
    graph, plan, solution = solved(proto, feeds, weight=QuantSpec())
    made = shown(with_qdq(proto, plan, solution), "s")
    rounded = float(run(made, feeds[0])["s"])
    between = {"x": x, "limit": np.array((exact + rounded) / 2, np.float32)}
    found = losses(graph, plan, solution, [between])
    assert any("takes another branch on 1 feeds" in note for note in found.notes)
    (inside,) = [row for row in found.layers if row.scope and row.feeds]
    assert inside.gathered is None
    assert inside.alone is not None


def test_several_inputs_and_one_tensor_read_twice() -> None:
    text = """
    agraph (float[N,4,4] x, float[N,4,4] z) => (float[N,4,4] y) {
        p = MatMul (x, x)
        q = MatMul (p, z)
        y = Add (q, x)
    }"""
    proto = model(text, opset=21)
    for node, name in zip(proto.graph.node, ("square", "mix", "add"), strict=True):
        node.name = name
    feeds = [{name: RNG.standard_normal((n, 4, 4)).astype(np.float32) for name in "xz"} for n in (1, 3)]
    graph = load(proto)
    coarse = QuantSpec(bits=4, signed=False, symmetric=False)
    reads = [("x", A8, "square", 0), ("x", coarse, "square", 1), ("p", A8, "mix", 0), ("z", coarse, "mix", 1)]
    sites = [
        Site(f"{node}/{index}", tensor, "activation", spec, (Reader(node, index),), "test", f"{node}/{index}")
        for tensor, spec, node, index in reads
    ]
    plan = Plan(tuple(sites))
    solution = calibrate(graph, plan, feeds)
    found = {row.node: row for row in losses(graph, plan, solution, feeds, checker="mse").layers}
    for name, tensor in (("square", "p"), ("mix", "q")):
        made, plain = shown(with_qdq(proto, only(plan, name, ROLES["alone"]), solution), tensor), shown(proto, tensor)
        expected = squared([run(made, feed)[tensor] for feed in feeds], [run(plain, feed)[tensor] for feed in feeds])
        assert found[name].alone == pytest.approx(expected, rel=1e-3)
        assert found[name].weights is None, "it has none"
        assert found[name].activations == found[name].alone


@pytest.mark.parametrize(("proto", "feeds"), [(residual(), FEEDS), (nested(), BRANCH_FEEDS)])
def test_layers_alone_in_one_session(proto: onnx.ModelProto, feeds: list[Any]) -> None:
    graph, plan, solution = solved(proto, feeds)
    solution = replace(solution, constants={"b1": np.full(8, 3, np.float32)})
    expected = losses(graph, plan, solution, feeds, columns=("alone",)).layers
    found = {row.node: row for row in losses_alone(graph, plan, solution, feeds).layers}
    assert found.keys() == {row.node for row in expected}
    for row in expected:
        assert found[row.node].feeds == row.feeds
        assert found[row.node].alone == pytest.approx(row.alone, rel=1e-5)


def test_corrected_constants_count_to_the_weights() -> None:
    """A bias that takes up the error of the weights makes the layer's loss smaller, alone and with the weights."""
    proto = residual()
    graph, plan, solution = solved(proto, FEEDS, bias=False)
    before = {row.node: row for row in losses(graph, plan, solution, FEEDS, checker="mse").layers}
    codes = next(site for site in plan.sites if site.role == "weight" and site.readers[0].node == "fc")
    names = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    rounded = solution.qparams[codes.key].dequantize(solution.codes[codes.key])
    inner = shown(proto, "f")
    mean = np.concatenate([run(inner, feed)["f"] for feed in FEEDS]).mean(0)
    better = (names["bf"] + (names["wf"] - rounded) @ mean).astype(np.float32)
    after = losses(graph, plan, replace(solution, constants={"bf": better}), FEEDS, checker="mse")
    rows = {row.node: row for row in after.layers}
    assert rows["fc"].weights is not None and before["fc"].weights is not None
    assert rows["fc"].weights < 0.9 * before["fc"].weights
    assert rows["fc"].activations == before["fc"].activations
    assert rows["conv1"] == before["conv1"]
    assert after.outputs["y"] < losses(graph, plan, solution, FEEDS, checker="mse").outputs["y"]


@pytest.mark.parametrize("part", ["weights", "activations"])
def test_a_part_of_everything(part: Any) -> None:
    """Accumulated errors of weights alone: the whole network with those pairs and no others."""
    proto = residual(opset=21)
    graph, plan, solution = solved(proto, FEEDS)
    role = {"weights": "weight", "activations": "activation"}[part]
    sites = tuple(site for site in plan.sites if site.role == role)
    made = with_qdq(proto, replace(plan, sites=sites), solution)
    expected = squared([run(made, feed)["y"] for feed in FEEDS], [run(proto, feed)["y"] for feed in FEEDS])
    found = node_errors(graph, plan, solution, FEEDS, checker="mse", alone=False, part=part)
    assert found["fc"] == pytest.approx(expected, rel=1e-3)


def test_the_network_runs_once_however_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions run by layer: one float and one quantized run of each step a feed, and the layer's own; never more."""
    graph, plan, solution = solved(residual(), FEEDS)
    runs: list[str] = []
    plain = LayerRunner.run

    def counted(self: LayerRunner, *args: Any, **more: Any) -> dict[str, Any]:
        runs.append(self.name)
        return plain(self, *args, **more)

    monkeypatch.setattr(LayerRunner, "run", counted)
    losses(graph, plan, solution, FEEDS, options=WalkOptions(threads=1))
    per_feed = {name: runs.count(name) / len(FEEDS) for name in set(runs)}
    assert per_feed == {"'stem'": 5, "'conv1'": 5, "'conv2'": 5, "'fc'": 5, "'between layers'": 2 * 3}


def test_only_what_leads_to_a_layer_runs() -> None:
    """Alone needs no outputs: the steps end with the last layer."""
    walk: Walk[int] = Walk(solved(residual(), FEEDS)[0], ["stem"])
    assert [step.nodes for step in walk.steps] == [("stem",)]


def test_no_feeds() -> None:
    graph, plan, solution = solved(residual(), FEEDS)
    with pytest.raises(DataError, match="the data has no feeds"):
        losses(graph, plan, solution, [])


@pytest.mark.slow
def test_the_voice_detector_of_the_pack(pack: Path) -> None:
    """Recurrent, with branches of If and states as inputs: every planned layer has a figure or a note."""
    wishes, rules = read_recipe(None, "onnxruntime", {})
    prepared = prepare(pack / "models" / "silero_vad.onnx", wishes, rules)
    audio = np.load(pack / "data" / "audio_calib.npz")["X"].astype(np.float32).reshape(-1)[: 4 * 576] / 32768
    feeds = [
        {
            "input": audio[i * 576 : (i + 1) * 576][None],
            "state": np.zeros((2, 1, 128), np.float32),
            "sr": np.array(16000),
        }
        for i in range(4)
    ]
    solution = calibrate(prepared.graph, prepared.plan, feeds)
    found = losses(prepared.graph, prepared.plan, solution, feeds)
    assert found.layers
    for row in found.layers:
        assert row.feeds == 4 or any(row.node in note for note in found.notes)


PEAK = """
import resource, sys
import numpy as np
from tests.support.calibration import calibrate
from sbonnx.graph import load
from sbonnx.profiling import WalkOptions, losses
from tests.support.naive import plan_linear
from tests.support.models import residual

def feeds(count):
    rng = np.random.default_rng(0)
    return ({"x": rng.standard_normal((64, 3, 8, 8)).astype(np.float32)} for _ in range(count))

graph = load(residual())
plan = plan_linear(graph)
options = WalkOptions(memory="1 MiB", threads=1)
losses(graph, plan, calibrate(graph, plan, list(feeds(2))), feeds(int(sys.argv[1])), options=options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_does_not_grow_with_the_data() -> None:
    """50 times the data: 5 MiB of feeds, 12 MiB of each activation in each stream, that must not stay."""
    few, many = (
        int(subprocess.run([sys.executable, "-c", PEAK, count], cwd=ROOT, capture_output=True, check=True).stdout)
        for count in ("2", "100")
    )
    assert many - few < 16 << 10
