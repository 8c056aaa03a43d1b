"""Several plans, one walk: what each looks up is what it would have measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.shared_calibration import CalibrationTasks, EqualTensors, equal_tensors, observe_tasks
from sbonnx.equalize import channel_ranges
from sbonnx.errors import NumericError
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.planning import Plan, Site
from sbonnx.progress import Progress, Silent
from sbonnx.spec import QuantSpec
from tests.support.calibration import calibrate
from tests.support.sample_count import SampleCount

SAMPLES = 6
DATA = [{"x": x} for x in np.random.default_rng(5).normal(size=(SAMPLES, 1, 4, 5)).astype(np.float32)]


def model_of(nodes: list[NodeProto], opset: int, **weights: np.ndarray) -> Graph:
    """A graph of one input x and one output y."""
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return graphs.load(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), opset=13)


def chain(opset: int = 13, slope: float = 0.1) -> Graph:
    """A Relu; and beside it a leaky one with a product behind."""
    weight = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("LeakyRelu", ["x"], ["b"], "leaky", alpha=slope),
        helper.make_node("MatMul", ["b", "w"], ["y"], "product"),
    ]
    return model_of(nodes, opset, w=weight)


def branched(opset: int = 13) -> Graph:
    """An If whose condition holds for no sample: its first branch never runs."""
    branches = {
        name: helper.make_graph(
            [
                helper.make_node(op, ["x"], [f"{name}_r"], f"{name}_op"),
                helper.make_node("Neg", [f"{name}_r"], [f"{name}_y"]),
            ],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
        )
        for name, op in (("yes", "Relu"), ("no", "Sigmoid"))
    }
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], "top", keepdims=0),
        helper.make_node("Greater", ["top", "much"], ["c"], "more"),
        helper.make_node("If", ["c"], ["y"], "if", then_branch=branches["yes"], else_branch=branches["no"]),
    ]
    return model_of(nodes, opset, much=np.float32(1e9))


def plan_of(*tensors: str, scope: Mapping[str, str] | None = None) -> Plan:
    """A plan that observes some tensors."""
    scopes = scope or {}
    return Plan(tuple(Site(t, t, "activation", QuantSpec(), (), "a test", t, scope=scopes.get(t, "")) for t in tensors))


def data(graph: Graph) -> Dataset:
    """The samples."""
    return read(DATA, graph)


def samples(progress: Progress | None = None) -> Callable[[Graph], Samples]:
    """The samples of a graph."""
    return lambda graph: Samples.of(DATA, graph, RunOptions(progress=progress or Silent()))


def cached(graph: Graph, plan: Plan, folder: Path) -> int:
    """Samples that a calibration behind a cache runs."""
    runs = SampleCount()
    behind = calibrate(graph, plan, data(graph), cache=folder, progress=runs)
    alone = calibrate(graph, plan, data(graph))
    assert {key: (float(one.lo), float(one.hi)) for key, one in behind.bounds.items()} == {
        key: (float(one.lo), float(one.hi)) for key, one in alone.bounds.items()
    }
    return runs.samples


def test_plans_of_one_graph(tmp_path: Path) -> None:
    """One folder, one walk; both plans look everything up."""
    tasks = CalibrationTasks()
    first, second = plan_of("x", "a"), plan_of("a", "b")
    names = [tasks.add(chain(), first), tasks.add(chain(), second)]
    assert names[0] == names[1]
    runs = SampleCount()
    observe_tasks(tasks.found.values(), samples(runs), tmp_path)
    assert runs.samples == SAMPLES
    assert cached(chain(), first, tmp_path / names[0]) == 0
    assert cached(chain(), second, tmp_path / names[1]) == 0


def test_graphs_of_two_opsets(tmp_path: Path) -> None:
    """Two folders, one walk, since the numbers are the same."""
    tasks = CalibrationTasks()
    old, new = chain(13), chain(17)
    names = [tasks.add(old, plan_of("x", "a")), tasks.add(new, plan_of("x", "a", "b"))]
    assert names[0] != names[1]
    runs = SampleCount()
    observe_tasks(tasks.found.values(), samples(runs), tmp_path)
    assert runs.samples == SAMPLES
    assert [cached(old, plan_of("x", "a"), tmp_path / names[0]), cached(new, plan_of("b"), tmp_path / names[1])] == [
        0,
        0,
    ]


def test_numbers_that_differ_are_measured_apart(tmp_path: Path) -> None:
    """Tensors of one name that hold something else: never taken for one another."""
    tasks = CalibrationTasks()
    one, other = chain(slope=-1.0), chain(slope=0.5)
    names = [tasks.add(one, plan_of("x", "a", "b")), tasks.add(other, plan_of("b", "y"))]
    runs = SampleCount()
    observe_tasks(tasks.found.values(), samples(runs), tmp_path)
    assert cached(one, plan_of("x", "a", "b"), tmp_path / names[0]) == 0
    assert cached(other, plan_of("b", "y"), tmp_path / names[1]) == 0
    assert runs.samples == 2 * SAMPLES


def test_a_second_time_nothing_runs(tmp_path: Path) -> None:
    """And of a further plan, only if it asks for more tensors."""
    for wanted, expected in ((("x", "a"), SAMPLES), (("x", "a"), 0), (("a",), 0), (("b",), SAMPLES)):
        tasks = CalibrationTasks()
        tasks.add(chain(), plan_of(*wanted))
        runs = SampleCount()
        observe_tasks(tasks.found.values(), samples(runs), tmp_path)
        assert runs.samples == expected


def test_branches(tmp_path: Path) -> None:
    """What no sample reached in one graph, none reached in the other."""
    scopes = {"yes_r": "if/then_branch", "no_r": "if/else_branch"}
    plan = plan_of("yes_r", "no_r", scope=scopes)
    old, new = branched(13), branched(17)
    found = equal_tensors(old, new, ["yes_r", "no_r", "x", "nothing"], samples()(old), budget=1 << 20)
    assert found == EqualTensors(frozenset({"no_r", "x"}), frozenset({"yes_r"}))
    tasks = CalibrationTasks()
    names = [tasks.add(graph, plan) for graph in (old, new)]
    runs = SampleCount()
    observe_tasks(tasks.found.values(), samples(runs), tmp_path)
    assert runs.samples == SAMPLES
    assert [cached(old, plan, tmp_path / names[0]), cached(new, plan, tmp_path / names[1])] == [0, 0]


def test_little_memory_compares_piece_by_piece() -> None:
    """The same answer whatever fits at a time."""
    old, new = chain(13), chain(17)
    names = ["x", "a", "b", "y"]
    for budget in (1, 1 << 30):
        assert equal_tensors(old, new, names, samples()(old), budget=budget).same == set(names)


def test_counting() -> None:
    """Ranges of channels count as well."""
    graph, runs = chain(), SampleCount()
    channel_ranges(graph, {"b": 1}, samples(runs)(graph))
    calibrate(graph, plan_of("x"), data(graph), progress=runs)
    calibrate(graph, plan_of("x"), data(graph))
    assert runs.samples == 2 * SAMPLES


@pytest.mark.parametrize("granularity", ["whole", "layer"])
def test_any_granularity_counts(granularity: str) -> None:
    """Layer by layer a sample is one sample."""
    runs = SampleCount()
    plan = plan_of("a", "b", "y")
    calibrate(chain(), plan, data(chain()), granularity=granularity, progress=runs)
    assert runs.samples == SAMPLES


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    """As by a calibration of its own."""
    nodes = [helper.make_node("Log", ["x"], ["a"], "log"), helper.make_node("Relu", ["a"], ["y"], "relu")]
    tasks = CalibrationTasks()
    tasks.add(model_of(nodes, 13), plan_of("a"))
    with pytest.raises(NumericError, match="'log'"):
        observe_tasks(tasks.found.values(), samples(), tmp_path)
