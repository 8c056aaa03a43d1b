"""Rows, lanes and blocks of the graph on a page."""

from __future__ import annotations

import re

import pytest

from sbonnx.present.html.graph_view import MOST_LANES, blocks_of, graph_view, lanes
from sbonnx.report.details import Details
from tests.present.reports import details, node, profiled
from tests.support.values import built


def followed(names: list[str], inputs: list[list[str]]) -> set[tuple[str, str]]:
    """Follow the drawn lines from row to row, and return the pairs (maker, reader) that they join."""
    carried: dict[int, str] = {}
    found = set()
    for name, lane in zip(names, lanes(names, inputs), strict=True):
        ends = {int(x): "M" for x in re.findall(r"M(\d+) 0C", lane.lines)} | {
            int(x): "M" for x in re.findall(r"M(\d+) 0V15(?!\d)", lane.lines)
        }
        through = {int(x) for x in re.findall(r"M(\d+) 0V30", lane.lines)}
        found |= {(carried[x], name) for x in ends}
        assert set(carried) == set(ends) | through, "no line begins or ends between rows"
        carried = {x: carried[x] for x in through}
        if f"M{lane.dot} 15V30" in lane.lines:
            assert lane.dot not in carried, "two tensors in one lane"
            carried[lane.dot] = name
    assert not carried, "every line ends at a reader"
    return found


GRAPHS = {
    "chain": [[], ["0"], ["1"], ["2"]],
    "skip": [[], ["0"], ["1"], ["0", "2"], ["3", "0"]],
    "fork": [[], ["0"], ["0"], ["0"], ["1", "2", "3"]],
    "two inputs": [[], [], ["1", "0"], ["2"]],
    "late": [[], [], [], ["2"], ["1"], ["0", "3", "4"]],
    "unread": [[], ["0"], ["0"], ["0"]],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lines_join_makers_and_readers(name: str) -> None:
    inputs = GRAPHS[name]
    names = [str(index) for index in range(len(inputs))]
    assert followed(names, inputs) == {(maker, names[index]) for index, row in enumerate(inputs) for maker in row}


def test_many_lanes_share_the_last() -> None:
    drawn = lanes([str(index) for index in range(31)], [*[[]] * 30, [str(index) for index in range(30)]])
    assert {lane.width for lane in drawn} == {MOST_LANES * 12 + 4}
    assert all(lane.dot < lane.width for lane in drawn)


def test_unknown_makers_are_ignored() -> None:
    assert [lane.lines for lane in lanes(["a", "b"], [["x", "b"], ["b"]])] == ["", ""]


def test_blocks_are_modules_or_runs() -> None:
    names = [f"/model/layer{index // 30}/block{index // 10}/op{index}" for index in range(600)]
    assert blocks_of(names)[:2] == [("/model/layer0/block0", range(10)), ("/model/layer0/block1", range(10, 20))]
    assert [title for title, _ in blocks_of([f"n{index}" for index in range(90)])] == [
        "nodes 1 to 40",
        "nodes 41 to 80",
        "nodes 81 to 90",
    ]
    places = [place for _, part in blocks_of([*names, *(f"n{index}" for index in range(90))]) for place in part]
    assert places == list(range(690)), "each node is in one block"


def test_rows_have_types_losses_and_refusals() -> None:
    nodes = [node("a"), node("b", "a", reads=(), refusals=("quantize: why",)), node("in", scope="b/then_branch")]
    view = graph_view(built(Details, details(nodes, [profiled("a", 30.0, 12.5, alone=12.25)])))
    assert view is not None and (view.total, view.quantized, view.refused, view.collapsed) == (3, 2, 1, False)
    first, second = view.rows
    assert (first.types, first.loss, first.shade) == ("uint8", "12.2", 1)
    assert ("by inputs", "12.5 dB") in first.figures
    assert [(read.tensor, read.covered) for read in first.reads] == [("a_in", "0 to 6")]
    assert (second.types, second.loss, second.refusals) == ("", "", ("quantize: why",))
    assert [child.name for child in second.children] == ["in"]


def test_blocks_show_their_worst_node() -> None:
    nodes = [
        node(f"/m{index // 4}/n{index}", *([f"/m{(index - 1) // 4}/n{index - 1}"] if index else ()))
        for index in range(240)
    ]
    losses = [profiled("/m0/n1", 30.0, 9.0, alone=8.0), profiled("/m0/n2", 30.0, 9.0, alone=12.0)]
    view = graph_view(built(Details, details(nodes, losses)))
    assert view is not None and view.collapsed and len(view.rows) == 60
    assert (view.rows[0].name, view.rows[0].op, view.rows[0].loss) == ("/m0", "4 nodes", "8.0")
    assert len(view.rows[0].children) == 4
    assert graph_view(Details()) is None
