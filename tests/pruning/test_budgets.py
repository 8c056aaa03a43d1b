"""Budgets of time, bytes and loss, rounds, and numbers of channels that kernels compute without waste."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbonnx
from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx import verify
from sbonnx.backends import BACKENDS
from sbonnx.backends.onnxruntime.costs import load_costs
from sbonnx.cli import main
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.query import output_names
from sbonnx.pipeline import prepare_pruning
from sbonnx.planning.times import GraphTimes
from sbonnx.pruning.budgets.channel_counts import multiples_of
from sbonnx.pruning.budgets.loss_limit import LossTrial, smallest_within
from sbonnx.pruning.budgets.pruned_times import PrunedTimes
from sbonnx.pruning.groups.channel_removal import remove
from sbonnx.pruning.groups.dimensions import dependencies
from sbonnx.system.cpu import target_cpu
from tests.pruning.random_graphs import STEPS, random_model
from tests.pruning.test_prune import error, feeds, inverted, pruned
from tests.support.models import model, run
from tests.support.values import some


def wide(channels: int = 64) -> onnx.ModelProto:
    """Three convolutions of many channels, the last with a shortcut, and a classifier."""
    return model(
        """agraph (float[N,3,8,8] x) => (float[N,6] y) {
            a = Conv <pads = [1,1,1,1]> (x, wa)
            ar = Relu (a)
            b = Conv (ar, wb)
            br = Relu (b)
            c = Conv <pads = [1,1,1,1]> (br, wc)
            s = Add (c, ar)
            g = GlobalAveragePool (s)
            f = Flatten (g)
            y = Gemm <transB = 1> (f, wf)
        }""",
        wa=(channels, 3, 3, 3),
        wb=(channels, channels, 1, 1),
        wc=(channels, channels, 3, 3),
        wf=(6, channels),
    )


def estimate(graph: Graph) -> float:
    return GraphTimes.of(graph.nodes, output_names(graph), load_costs(None, target_cpu())).of_division(())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=8), st.integers(0, 2**20))
def test_the_time_of_counts_is_that_of_the_pruned_graph(steps: list[str], seed: int) -> None:
    graph = prepare_pruning(random_model(steps, seed)[0], recipes.load()).prepared.graph
    rng, found = np.random.default_rng(seed), dependencies(graph)
    orders = [dimension.removable(rng.permutation(dimension.groups).tolist()) for dimension in found.dimensions]
    times = PrunedTimes(graph, found, orders, load_costs(None, target_cpu()))
    for _ in range(3):
        removed = np.array([rng.integers(0, len(order) + 1) for order in orders], np.int64)
        chosen = [order[:count] for order, count in zip(orders, removed.tolist(), strict=True)]
        small = graphs.copy(graph)
        remove(small, found.plan_of(zip(found.dimensions, chosen, strict=True)))
        assert times(removed) == pytest.approx(estimate(small), rel=1e-12)
    assert times(np.zeros(len(orders), np.int64)) == pytest.approx(estimate(graph), rel=1e-12)


@pytest.mark.slow
def test_a_latency_budget_is_met_in_whole_blocks(tmp_path: Path) -> None:
    graph = graphs.load(wide())
    found = pruned(graph, latency=0.6, multiple="auto")
    assert found.latency is not None
    assert found.latency <= 0.6
    assert found.latency == pytest.approx(estimate(found.graph) / estimate(graph))
    assert {row.after % 16 for row in found.dimensions} == {0}
    assert not found.unaligned


@pytest.mark.slow
def test_more_channels_can_take_less_time() -> None:
    """45 channels of 64 are no multiple of 4, so that no kernel works on blocks of them; 48 are."""
    loose = pruned(graphs.load(wide()), ratio=0.3)
    blocks = pruned(graphs.load(wide()), ratio=0.3, multiple="auto")
    assert {row.after for row in loose.dimensions} == {row.after for row in loose.unaligned} == {45}
    assert {row.after for row in blocks.dimensions} == {48}
    assert loose.latency is not None
    assert blocks.latency is not None
    assert loose.macs < blocks.macs
    assert loose.latency > blocks.latency


def test_numbers_of_channels_by_backend() -> None:
    onnxruntime, tensorrt = BACKENDS["onnxruntime"].placement, BACKENDS["tensorrt"].placement
    assert [onnxruntime.channel_multiple("Conv", count) for count in (16, 32, 33, 256)] == [8, 8, 16, 16]
    assert onnxruntime.channel_multiple("MatMul", 768) == 1
    assert [tensorrt.channel_multiple("Conv", count) for count in (16, 256)] == [8, 8]
    assert [tensorrt.channel_multiple("Gemm", count, integers=True) for count in (64, 65)] == [8, 32]
    assert BACKENDS["virtual"].placement.channel_multiple("Conv", 256) == 1
    # two channels of a side in one group: half as many groups fill a block
    shuffled = graphs.load(
        model(
            """agraph (float[2,3,6,6] x) => (float[2,4,6,6] y) {
                c = Conv (x, w)
                g = Conv <group = 2> (c, u)
                y = Conv (g, v)
            }""",
            w=(48, 3, 1, 1),
            u=(64, 24, 1, 1),
            v=(4, 64, 1, 1),
        )
    )
    found = dependencies(shuffled)
    assert [
        (dimension.groups, multiple)
        for dimension, multiple in zip(found.dimensions, multiples_of(found, BACKENDS["onnxruntime"]), strict=True)
    ] == [(24, 8), (32, 8)]


def test_a_latency_budget_needs_kernel_costs() -> None:
    with pytest.raises(RecipeError, match=r"'SPARSE.BUDGET.LATENCY' .*tensorrt has no table.*BUDGET.MACS"):
        sbonnx.prune(wide(), feeds(), latency=0.7, backend="tensorrt")
    with pytest.raises(RecipeError, match=r"'SPARSE.BUDGET.LATENCY' .*KERNEL_COSTS is none"):
        sbonnx.prune(wide(), feeds(), latency=0.7, kernel_costs="none")


@pytest.mark.slow
def test_bytes_of_constants_are_counted_on_the_file() -> None:
    proto = wide()
    report = sbonnx.prune(proto, feeds(), size=0.5)
    assert report.pruned is not None
    before, after = (
        sum(len(weight.raw_data) or 4 * len(weight.float_data) for weight in each.graph.initializer)
        for each in (proto, report.pruned)
    )
    assert report.reached == {"size": pytest.approx(after / before)}
    assert after <= 0.5 * before


@pytest.mark.slow
def test_the_nearest_network_is_written_if_a_budget_cannot_be_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, data, output = tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "p.onnx"
    onnx.save(wide(16), source)
    np.savez(data, x=np.concatenate([feed["x"] for feed in feeds(16)]))
    arguments = ["prune", str(source), "--data", str(data), "--split", "4", "-o", str(output)]
    assert main([*arguments, "--macs", "0.1", "--least", "0.5", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["asked"] == {"macs": 0.1}
    assert "of the multiplications remain, and 0.1 are asked for" in report["problems"][0]
    assert {row["after"] / row["before"] for row in report["dimensions"]} == {0.5}
    assert main([*arguments, "--macs", "0.6", "--force"]) == 0
    assert "asked: macs" in capsys.readouterr().out
    assert onnx.load(output).graph.node


@pytest.mark.slow
def test_a_loss_limits_what_is_removed() -> None:
    found = {}
    for limit in (0.05, 0.3):
        report = sbonnx.prune(wide(16), feeds(64), max_loss=f"{limit:%}", loss="relative")
        assert report.ok, report.problems
        assert report.reached["max_loss"] <= limit
        found[limit] = report
    assert found[0.3].macs < found[0.05].macs < 1
    assert found[0.3].pruned is not None
    # the loss is that of the outputs on samples held out
    rows = some(found[0.3].metrics).outputs
    assert some(found[0.3].metrics).held_out == 16
    assert found[0.3].reached["max_loss"] == pytest.approx(10 ** (-rows[0].sqnr_db / 20), rel=1e-3)


@pytest.mark.slow
def test_a_metric_of_the_user_and_a_loss_that_cannot_be_met() -> None:
    def always(changed: Any, plain: Any) -> float:
        assert changed.keys() == plain.keys() == {"y"}
        return 1.0

    report = sbonnx.prune(wide(16), feeds(64), max_loss="50%", metric=always)
    assert not report.ok
    assert "the loss is 1, and 0.5 is asked for" in report.problems[0]
    assert report.pruned is not None
    with pytest.raises(RecipeError, match="give max_loss as well"):
        sbonnx.prune(wide(16), feeds(64), macs=0.5, metric=always)


def test_bisection_finds_the_smallest_share_within_a_loss() -> None:
    tried: list[float] = []

    def trial(share: float) -> LossTrial[str]:
        tried.append(share)
        return LossTrial(share, 1 - share, f"{share:.2f}")

    found = smallest_within(trial, 0.2, 0.25)
    assert 0.75 <= found.share <= 0.75 + 0.8 / 64
    assert found.result == f"{found.share:.2f}"
    assert len(tried) == 6
    assert smallest_within(trial, 0.2, 0.001).share == max(tried)


@pytest.mark.slow
def test_rounds_measure_the_remaining_network_and_reach_the_budget() -> None:
    graph = inverted()
    found = [pruned(inverted(), macs=0.5, rounds=3) for _ in range(2)]
    assert found[0].macs <= 0.5
    assert graphs.to_proto(found[0].graph) == graphs.to_proto(found[1].graph)
    once = pruned(inverted(), macs=0.5)
    assert error(graph, found[0].graph) < 2 * error(graph, once.graph)
    masked, small = (error(graph, each) for each in (found[0].masked, found[0].graph))
    assert small == pytest.approx(masked, rel=1e-3)
    with pytest.raises(RecipeError, match=r"'SPARSE.ROUNDS' .*go step by step to a budget"):
        sbonnx.prune(wide(16), feeds(), ratio=0.5, rounds=2)


def test_channels_that_fill_no_block_are_noted() -> None:
    report = sbonnx.prune(wide(), ratio=0.3)
    assert any("whole blocks of the kernels of onnxruntime: 2 (first: 45 of 64" in note for note in report.notes)
    aligned = sbonnx.prune(wide(), ratio=0.3, multiple="auto")
    assert {row.after for row in aligned.dimensions} == {48}
    assert not any("whole blocks" in note for note in aligned.notes)
    assert aligned.pruned is not None
    assert run(aligned.pruned, feeds(1)[0])["y"].shape == (1, 6)


def test_a_time_that_cannot_be_reached_is_a_problem() -> None:
    report = sbonnx.prune(wide(), feeds(16), latency=0.01)
    assert not report.ok
    assert "of the estimated time remain, and 0.01 are asked for: the nearest network was written" in report.problems[0]
    assert report.reached["latency"] == report.latency
    assert report.kernel_costs == load_costs(None, target_cpu()).source
    assert {row.after for row in report.dimensions} == {16}


def test_a_slower_file_is_a_problem_only_with_a_latency_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = verify.compare

    def slower(*models: Any, **more: Any) -> verify.Comparison:
        times: dict[str, Any] = {
            "median_ms_float": 1.0,
            "median_ms_quantized": 1.2,
            "latency_ratio": 1.2,
            "latency_interval": (1.1, 1.3),
            "latency_runs": 9,
        }
        return replace(measure(*models, **more), **times)

    monkeypatch.setattr(verify, "compare", slower)
    report = sbonnx.prune(wide(16), feeds(16), latency=0.8)
    assert [text for text in report.problems if "slower than float on this machine" in text]
    assert "a run takes 1.20 (1.10 to 1.30) of the time in float on this machine, 0.8 by the table" in report.notes
    other = sbonnx.prune(wide(16), feeds(16), macs=0.8)
    assert other.ok
    assert any(text.startswith("slower than float on this machine: a run takes 1.20") for text in other.notes)
