"""Blocks of a graph, and the values that the page's script draws."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np

from sbonnx.present.html.graph_blocks import MOST, GraphBlock, GraphNode, blocks_of
from sbonnx.present.html.graph_view import graph_view
from sbonnx.report.details import Details
from tests.present.reports import EVIL, details, node, profiled
from tests.support.values import built


def check_division(nodes: list[GraphNode]) -> tuple[list[GraphBlock], list[int]]:
    """Divide nodes; check the size of every block, and that the children of none depend on each other in a cycle."""
    blocks, block_of = blocks_of(nodes)
    assert all(block.parent < index for index, block in enumerate(blocks)), "outer blocks come first"

    def path(index: int) -> list[str]:
        steps, block = [f"node {index}"], block_of[index]
        while block >= 0:
            steps.append(f"block {block}")
            block = blocks[block].parent
        return ["graph", *reversed(steps)]

    reads: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    paths = [path(index) for index in range(len(nodes))]
    for index, own in enumerate(paths):
        for outer, inner in pairwise(own):
            reads[outer].setdefault(inner, set())
        for maker in nodes[index].makers:
            level = next(depth for depth, pair in enumerate(zip(own, paths[maker], strict=False)) if len(set(pair)) > 1)
            reads[own[level - 1]][own[level]].add(paths[maker][level])
    for children in reads.values():
        assert len(children) <= MOST
        list(TopologicalSorter(children).static_order())
    return blocks, block_of


def test_blocks_never_depend_on_each_other_in_a_cycle() -> None:
    """Random graphs with random modules, most of which are interleaved."""
    random = np.random.default_rng(0)
    for size in (3, 40, 150, 400):
        for modules in (1, 3, 30):
            nodes = []
            for index in range(size):
                makers = random.integers(0, index, random.integers(1, 4)) if index else ()
                path = tuple(f"m{part}" for part in random.integers(0, modules, random.integers(0, 4)))
                nodes.append(GraphNode(f"n{index}", path, tuple(sorted({int(maker) for maker in makers}))))
            check_division(nodes)


def chain(*nodes: GraphNode) -> list[GraphNode]:
    return [GraphNode(row.name, row.path, (index - 1,) if index else (), row.size) for index, row in enumerate(nodes)]


def test_modules_are_blocks() -> None:
    nodes = [GraphNode(f"op{index}", ("model", f"layer{index // 8}", f"block{index // 4}")) for index in range(32)]
    blocks, block_of = check_division(chain(*nodes))
    assert [block.title for block in blocks if block.parent == -1] == [f"layer{index}" for index in range(4)]
    inner = [block for block in blocks if block.parent >= 0]
    assert [(blocks[block.parent].title, block.title) for block in inner[-2:]] == [
        ("layer0", "block0"),
        ("layer0", "block1"),
    ]
    assert len({block_of[index] for index in range(4)}) == 1 and block_of[3] != block_of[4]


def test_names_that_say_nothing_give_stages() -> None:
    """Stages end where the resolution changes; long ones are cut where a single tensor passes."""
    sizes = ["56 × 56"] * 30 + [""] + ["28 × 28"] * 100
    nodes = chain(*(GraphNode(f"Conv_{index}", size=size) for index, size in enumerate(sizes)))
    for index in range(31, 131):
        if index % 10 in (5, 7, 9):  # two tensors pass before these
            nodes[index] = replace(nodes[index], makers=(index - 2, index - 1))
    blocks, block_of = check_division(nodes)
    assert [block.title for block in blocks if block.parent == -1] == ["56 × 56", "28 × 28"]
    cuts = [index for index in range(32, 131) if block_of[index] != block_of[index - 1]]
    assert len(cuts) >= 4 and not any(index % 10 in (5, 7, 9) for index in cuts), cuts


def test_long_chains_are_nested() -> None:
    blocks, block_of = check_division(chain(*(GraphNode(f"n{index}") for index in range(11_000))))
    assert min(block_of) >= 0 and blocks[0].title.startswith("n0 … n")


def test_values_of_nodes() -> None:
    computed = {"name": "u", "dtype": "float32", "shape": None}
    rows = [
        node("a", outputs=[{"name": "t", "dtype": "float32", "shape": ("N", 8)}], tensors=("x",)),
        node(
            "b", "a", reads=(), refusals=("quantize: why",), codes=("few-channels",), tensors=("t",), outputs=[computed]
        ),
        node("if", "b", op="If", reads=()),
        node("in", scope="if/then_branch", reads=(), outputs=[{"name": "s", "dtype": "int64", "shape": ()}]),
    ]
    values = details(rows, [profiled("a", 30.0, 12.5, alone=12.25)])
    values |= {"inputs": [{"name": "x", "dtype": "float32", "shape": ("N", 8)}], "outputs": ("t",)}
    view = graph_view(built(Details, values))
    assert view is not None and (view.total, view.quantized, view.floats) == (4, 1, 2)
    first, second, inner, owner = view.data["nodes"]
    assert (first["db"], first["loss"][2]) == (12.25, ("by inputs", "12.5 dB"))
    assert first["reads"][0] == {
        "role": "activation", "tensor": "a_in", "type": "uint8", "bits": 8, "range": "0 to 6"
    }  # fmt: skip
    assert [view.data["tensors"][index] for index in (*first["in"], *first["out"])] == [
        ["x", "float32 N × 8"],
        ["t", "float32 N × 8"],
    ]
    assert second["in"] == first["out"] == view.data["outputs"]
    assert (second["kind"], view.data["reasons"][second["why"][0]]) == ("float", ("quantize: why", "few-channels"))
    assert (inner["name"], inner["kind"], owner["name"]) == ("in", "other", "if")
    blocks = view.data["blocks"]
    assert [title for title, _ in blocks] == ["if"] and inner["block"] == owner["block"] == 0
    assert graph_view(Details()) is None


def test_any_name_is_json() -> None:
    view = graph_view(built(Details, details([node(name, op=name, module=name) for name in EVIL])))
    assert view is not None
    assert len(json.loads(json.dumps(view.data).encode())["nodes"]) == len(EVIL)
