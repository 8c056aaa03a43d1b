"""Blocks of layers between single-tensor cuts."""

from __future__ import annotations

from typing import Any

import pytest

from sbonnx import graph as graphs
from sbonnx.calib.engine.segments import Segment
from sbonnx.graph import Graph
from sbonnx.reconstruct.blockwise import blocks
from tests.support.models import model

NET = """
    net (float[N,4,8,8] x) => (float[N,4,8,8] y, float[N,4,8,8] early) {
        stem = Conv <pads = [1,1,1,1]> (x, w0)
        a = Relu(stem)
        b = Conv <pads = [1,1,1,1]> (a, w1)
        early = Relu(b)
        d = Conv <pads = [1,1,1,1]> (early, w2)
        e = Add(d, a)
        f = Relu(e)
        mask = Sigmoid(x)
        g = Mul(f, mask)
        h = Conv <pads = [1,1,1,1]> (g, w3)
        i = Mul(h, mask)
        y = Tanh(i)
    }"""
WEIGHTS: dict[str, Any] = {f"w{index}": (4, 4, 3, 3) for index in range(4)}


def loaded(text: str, **weights: Any) -> tuple[Graph, list[str]]:
    graph = graphs.load(model(text, **weights))
    return graph, [node.name for node in graph.nodes if node.op == "Conv"]


def made(graph: Graph, pieces: list[Segment]) -> list[list[str]]:
    """What each piece computes."""
    by_name = {node.name: node for node in graph.nodes}
    return [[by_name[name].outputs[0].name for name in piece.nodes] for piece in pieces]


def test_a_residual_block_is_one() -> None:
    graph, layers = loaded(NET, **WEIGHTS)
    pieces = blocks(graph, layers)
    assert [set(some) - {"mask"} for some in made(graph, pieces)] == [
        {"stem", "a"},
        {"b", "early", "d", "e", "f", "g"},
        {"h", "i", "y"},
    ]
    assert [piece.observed for piece in pieces] == [("a",), ("early", "g"), ("y",)]


def test_what_depends_on_no_layer_passes_beside() -> None:
    graph, layers = loaded(NET, **WEIGHTS)
    assert set(blocks(graph, layers)[2].inputs) == {"g", "mask"}


def test_every_node_runs_once_and_reads_what_is_there() -> None:
    graph, layers = loaded(NET, **WEIGHTS)
    for scope in ("block", "layer"):
        pieces = blocks(graph, layers, scope)
        names = [name for piece in pieces for name in piece.nodes]
        assert sorted(names) == sorted(node.name for node in graph.nodes)
        there = {"x"}
        for piece in pieces:
            assert set(piece.inputs) <= there
            piece.model(graph)
            there.update(piece.outputs)
        assert {"y", "early"} <= there


def test_layer_by_layer() -> None:
    graph, layers = loaded(NET, **WEIGHTS)
    pieces = blocks(graph, layers, "layer")
    assert [sum(name in layers for name in piece.nodes) for piece in pieces] == [1, 1, 1, 1]
    assert set(pieces[2].inputs) >= {"early", "a"}


def test_too_many_layers_are_taken_one_by_one() -> None:
    graph, layers = loaded(NET, **WEIGHTS)
    assert len(blocks(graph, layers, most=1)) == 4


@pytest.mark.parametrize("chosen", [[], [3]])
def test_only_layers_that_are_asked_for(chosen: list[int]) -> None:
    graph, layers = loaded(NET, **WEIGHTS)
    pieces = blocks(graph, [layers[at] for at in chosen])
    assert len(pieces) == len(chosen)
    if chosen:
        assert len(pieces[0].nodes) == len(graph.nodes), "what leads to the first layer belongs to its block"
