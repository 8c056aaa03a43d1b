"""One contract, run over every pattern and sweep of the catalogue. Whoever adds one adds a row to the tuple."""

from __future__ import annotations

import sys

import onnx
import pytest

from sbonnx.graph import load
from sbonnx.patterns import FUSE, SIMPLIFY, Pattern, Sweep, apply
from sbonnx.patterns.index import GraphIndex
from sbonnx.patterns.match import find
from tests.support.pattern_checks import assert_same_outputs, assert_sound, interface, random_feeds

CATALOGUE = {one.name: one for one in (*SIMPLIFY, *FUSE)}
EXACT = {one.name for one in SIMPLIFY}
FUSED = 2e-6
"""Fusion rounds weights anew: a few units in the last place of float32, of the largest output."""

HEADINGS = ("Supported", "Refused", "Equations")
"""Paragraphs in the docstring of a file with patterns, in this order."""

every = pytest.mark.parametrize("name", CATALOGUE)


def proto(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy to load from: an example is built anew on each call, and may be shared."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def test_names_are_unique() -> None:
    assert len(CATALOGUE) == len(SIMPLIFY) + len(FUSE)


@every
def test_example_fires_and_computes_the_same(name: str) -> None:
    one = CATALOGUE[name]
    before = one.example()
    graph = load(proto(before))
    applied = apply(graph, [one])
    assert {fired.pattern for fired in applied.fired} == {name}
    after = assert_sound(graph)
    assert interface(after) == interface(before)
    tolerance = 0.0 if name in EXACT else FUSED
    for seed, dynamic in enumerate((2, 1, 3)):
        assert_same_outputs(before, after, random_feeds(before, dynamic=dynamic, seed=seed), tolerance=tolerance)


@pytest.mark.sampled(16)
@every
def test_counter_example_stays_as_it_is(name: str) -> None:
    before = CATALOGUE[name].counter_example()
    graph = load(proto(before))
    kinds = [node.op for node in graph.nodes]
    applied = apply(graph, [CATALOGUE[name]])
    assert not applied.fired
    assert [node.op for node in graph.nodes] == kinds
    after = assert_sound(graph)
    assert interface(after) == interface(before)
    assert_same_outputs(before, after, random_feeds(before))


@every
def test_a_match_that_is_declined_has_its_reason_recorded(name: str) -> None:
    one = CATALOGUE[name]
    graph = load(one.counter_example())
    applied = apply(graph, [one])
    assert all(refusal.what == name and refusal.where and refusal.why for refusal in applied.refusals)
    if isinstance(one, Sweep):
        return
    assert {refusal.where for refusal in applied.refusals} == meant(one, GraphIndex(graph))


def meant(one: Pattern, index: GraphIndex) -> set[str]:
    """The nodes at which a pattern's tree and `where` fit."""
    found = {node.name: find(one.tree, node, index) for node in index.nodes()}
    return {
        name for name, outcome in found.items() if outcome is not None and (one.where is None or one.where(outcome[0]))
    }


@every
def test_twice_is_once(name: str) -> None:
    graph = load(CATALOGUE[name].example())
    apply(graph, [CATALOGUE[name]])
    once = [(node.op, node.name) for node in graph.nodes]
    assert not apply(graph, [CATALOGUE[name]]).fired
    assert [(node.op, node.name) for node in graph.nodes] == once


@pytest.mark.sampled(16)
@every
def test_the_whole_catalogue_keeps_what_the_examples_compute(name: str) -> None:
    for before in (CATALOGUE[name].example(), CATALOGUE[name].counter_example()):
        graph = load(proto(before))
        apply(graph, (*SIMPLIFY, *FUSE))
        after = assert_sound(graph)
        assert interface(after) == interface(before)
        assert_same_outputs(before, after, random_feeds(before), tolerance=FUSED)


def test_every_pattern_says_why_it_is_true() -> None:
    assert [name for name, one in CATALOGUE.items() if len(one.source) < 10] == []


@every
def test_its_file_opens_with_what_it_supports(name: str) -> None:
    text = sys.modules[CATALOGUE[name].example.__module__].__doc__ or ""
    starts = [line.partition(":")[0] for line in text.splitlines() if ": " in line]
    assert [start for start in starts if start in HEADINGS] == list(HEADINGS)
