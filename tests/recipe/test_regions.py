"""Patterns by data flow: after, before, between, and the regions stem, head and tail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.backends import backend_for
from sbonnx.cli import main
from sbonnx.errors import RecipeError
from sbonnx.graph import io
from sbonnx.pipeline import prepare
from sbonnx.planning.node_infos import node_infos
from sbonnx.recipe import load
from sbonnx.recipe.regions import Flow
from tests.support.models import model, residual

DETECTOR = """
agraph (float[1,3,16,16] x) => (float[1,4,N] boxes, float[1,3,N] scores) {
    [stem0] a = Conv <strides = [2,2], pads = [1,1,1,1]> (x, w0)
    [act0] b = Relu (a)
    [deep] c = Conv <strides = [2,2], pads = [1,1,1,1]> (b, w1)
    [up] u = Resize <mode = "nearest"> (c, none, two)
    [neck] n = Concat <axis = 1> (b, u)
    [tower] t = Conv (n, w2)
    [act1] r = Relu (t)
    [reg] e = Conv (r, w3)
    [size] s = Shape (e)
    [batch] one = Gather (s, zero)
    [axes] row = Unsqueeze (one, zero1)
    [sizes] to = Concat <axis = 0> (row, tail)
    [flat] f = Reshape (e, to)
    [dfl_max] q = Softmax <axis = 2> (f)
    [dfl] d = Conv (q, arange)
    [box] boxes = Squeeze (d, first)
    [cls] g = Conv (n, w4)
    [prob] p = Sigmoid (g)
    [list] scores = Reshape (p, classes)
}"""


def detector() -> onnx.ModelProto:
    """Stem, two features joined, a box branch with a decoder of edge distributions, and a branch of class scores."""
    return model(
        DETECTOR,
        w0=(4, 3, 3, 3),
        w1=(6, 4, 3, 3),
        w2=(8, 10, 1, 1),
        w3=(16, 8, 1, 1),
        w4=(3, 10, 1, 1),
        two=np.array([1, 1, 2, 2], np.float32),
        none=np.zeros(0, np.float32),
        zero=np.array(0, np.int64),
        zero1=np.array([0], np.int64),
        first=np.array([1], np.int64),
        tail=np.array([4, 4, -1], np.int64),
        arange=np.arange(4, dtype=np.float32).reshape(1, 4, 1),
        classes=np.array([1, 3, -1], np.int64),
    )


def selected(pattern: str) -> set[str]:
    """Names of the nodes that a pattern of EXCLUDE keeps float."""
    recipe = load({"EXCLUDE": [pattern]})
    nodes = node_infos(io.load(detector()))
    recipe, _ = recipe.for_model(nodes, [])
    return {
        node.name
        for node in nodes
        if not recipe.settings("a", node=node.name, op=node.op, tensor="none of these").enabled
    }


INTEGERS = {"size", "batch", "axes", "sizes"}
BOX = {"tower", "act1", "reg"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("after:neck", BOX | INTEGERS | {"flat", "dfl_max", "dfl", "box", "cls", "prob", "list"}),
        ("after:prob", {"list"}),
        ("before:deep", {"stem0", "act0"}),
        ("before:re:up|deep", {"stem0", "act0"}),
        ("between:deep..reg", {"deep", "up", "neck", "tower", "act1", "reg"}),
        ("between:op:Relu..cls", {"act0", "deep", "up", "neck", "cls"}),
        ("between:cls..cls", {"cls"}),
        ("after:tail", set()),
        ("stem", {"stem0"}),
        ("head", BOX | {"flat", "dfl_max", "dfl", "box", "cls", "prob", "list"}),
        ("tail", {"flat", "dfl_max", "dfl", "box", "prob", "list"}),
    ],
)
def test_nodes_by_data_flow(pattern: str, names: set[str]) -> None:
    if names:
        assert selected(pattern) == names
    else:
        with pytest.raises(RecipeError, match="Nothing follows it"):
            selected(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "after:nek",
            "'EXCLUDE[0]' in the recipe matches no node of the model with 'nek', got 'after:nek'. Nearest: 'nec",
        ),
        ("between:reg..tower", "connects nothing, got 'between:reg..tower'. No path leads from the first to the last"),
        ("between:cls..reg", "connects nothing"),
        ("before:stem0", "Nothing precedes it"),
        ("between:reg", "must have the form between:FIRST..LAST"),
        ("after:", "must not be an empty pattern"),
        ("after:tensor:x", "must name nodes after 'after:'"),
        ("after:before:x", "must name nodes after 'after:'"),
        ("before:re:(", "is not a regular expression"),
    ],
)
def test_paths_that_do_not_exist(pattern: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        selected(pattern)
    assert message in str(caught.value)


def test_paths_are_for_keys_with_nodes() -> None:
    with pytest.raises(RecipeError, match="is a pattern for nodes, and this key has tensors"):
        load({"RANGES": {"after:neck": [0, 1]}})


def test_a_classifier_has_one_prediction_layer() -> None:
    flow = Flow(node_infos(io.load(residual())))
    assert [sorted(flow.region(name)) for name in ("stem", "head", "tail")] == [["stem"], ["fc"], []]


def test_a_node_of_that_name_comes_first() -> None:
    proto = residual()
    proto.graph.node[2].name = "head"
    recipe, _ = load({"EXCLUDE": ["head"]}).for_model(node_infos(io.load(proto)), [])
    off = [
        node.name for node in proto.graph.node if not recipe.settings("w", node=node.name, op="Conv", tensor="").enabled
    ]
    assert off == ["head"]


def test_a_model_without_layers_has_no_head() -> None:
    plain = model("agraph (float[N] x) => (float[N] y) { [act] y = Relu (x) }")
    with pytest.raises(RecipeError, match=r"'head'\. It has no layer with a constant weight"):
        prepare(plain, load({"EXCLUDE": ["head"]}), backend_for("virtual", None))


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("INCLUDE", ["between:stem0..deep"]),
        ("SKIP_TRACE_MODULES", ["after:deep"]),
        ("W", {"SPECIFIC": [{"after:deep": ["QUANTIZER.BIT", 0]}]}),
    ],
)
def test_every_key_with_nodes(key: str, settings: Any) -> None:
    recipe = load({"BACKEND": "onnxruntime", "KERNEL_COSTS": "none", key: settings})
    prepared = prepare(detector(), recipe, backend_for("onnxruntime", None))
    weights = {site.readers[0].node for site in prepared.plan.of_role("weight")}
    assert weights == {"stem0", "deep"}


def test_options_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(detector(), path)
    plan = ["plan", str(path), "--set", "kernel_costs=none", "--json"]
    assert main([*plan, "--exclude", "head", "--exclude", "node:deep"]) == 0
    once = capsys.readouterr().out
    assert main([*plan, "--include", "stem"]) == 0
    assert '"w0"' in once and capsys.readouterr().out.count('"role": "weight"') == once.count('"role": "weight"') == 1
    assert main([*plan, "--exclude", "after:nothing"]) == 2
    assert "matches no node of the model with 'nothing'" in capsys.readouterr().err
