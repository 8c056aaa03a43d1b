"""Colours of the chart; its nodes and edges are tested where it is written."""

from __future__ import annotations

import math

from sbonnx.graph import load
from sbonnx.mermaid import colours, mermaid
from tests.support.models import residual


def test_from_white_to_red() -> None:
    found = colours({"none": 0.0, "some": 0.25, "most": 1.0, "lost": math.inf, "odd": math.nan})
    assert found["none"] == "#ffffff"
    assert found["most"] == found["lost"] == found["odd"] == "#e53935"
    assert found["some"] == "#f29c9a", "half way, by the square root"


def test_nothing_lost_is_white() -> None:
    assert set(colours({"a": 0.0, "b": 0.0}).values()) == {"#ffffff"}
    assert colours({}) == {}


def test_only_nodes_with_a_loss_are_coloured() -> None:
    graph = load(residual())
    plain, chart = mermaid(graph), mermaid(graph, {"conv1": 0.5, "no such node": 1.0})
    lines = set(chart.splitlines()) - set(plain.splitlines())
    assert sorted(line.partition(" ")[0] for line in lines)[-1] == "style"
    assert any('"conv1<br/>(Conv)<br/>0.5"' in line for line in lines)
    assert len(lines) == 2
