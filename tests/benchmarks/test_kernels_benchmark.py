"""The benchmark of kernels: every case runs, the fit is right, and the Q/DQ forms compute what the float ones do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import elementwise as kernel_elementwise
from benchmarks.kernels.chain_cases import CHAINS, SINGLES
from benchmarks.kernels.chains import SCALE, Chain, kernels_of, measured, quantized, size
from benchmarks.kernels.costs import REFERENCE, fits, mean_of, timed
from benchmarks.kernels.timing import COLUMNS, Case, fit, nonnegative, optimised, repeated, session, time_case

TINY = (1, 16, 4)
CHAIN_OF = {chain.name: chain for chain in (*CHAINS, *SINGLES)}


def tiny_cases() -> Iterator[Case]:
    """Every kernel at one small size."""
    kinds = {(kernel, stride, 16 if groups > 1 else 1) for *_, kernel, stride, groups in kernel_cases.CONVOLUTIONS}
    for kind in sorted(kinds):
        yield kernel_cases.integer_conv((16, 16, 8, *kind))
        yield kernel_cases.float_conv((16, 16, 8, *kind))
    for make in kernel_elementwise.FAMILIES:
        yield from make(TINY)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", list(tiny_cases()), ids=lambda case: f"{case.kernel} {case.variant} {case.dtype}")
def test_every_kernel_runs(case: Case) -> None:
    assert [node.op_type for node in repeated(case, 3).graph.node].count(case.kernel) >= 3
    assert 0 <= time_case(case, 0.0005) < 1e8


def test_the_kernels_of_encoders_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "PRODUCTS", ((2, 32, 32),))
    monkeypatch.setattr(kernel_elementwise, "TOKENS", ((2, 32),))
    found = timed([*kernel_cases.products(), *kernel_elementwise.rows()], 0.0005)
    assert not [row for row in found if "refused" in row]
    assert {"QGemm", "MatMulNBits", "QLinearSoftmax"} <= {row["kernel"] for row in found}


def test_a_refused_kernel_has_its_reason() -> None:
    case = Case("Relu", "", "float", {"x": np.zeros((1, 2), np.float32)}, ("x",), domain="com.microsoft")
    (row,) = timed([case], 0.001)
    assert "ns" not in row
    assert "Relu" in row["refused"]


def test_the_mean_of_two_machines_weighs_both_alike() -> None:
    def rows(reference: float, pool: float) -> list[dict[str, Any]]:
        named = [(REFERENCE, reference), (("NhwcMaxPool", "3x3", "u8"), pool)]
        zeros = dict.fromkeys(COLUMNS, 0.0)
        return [
            {"kernel": kernel, "variant": variant, "type": kind, **zeros, "mac_ns": ns, "worst": 0.1}
            for (kernel, variant, kind), ns in named
        ]

    new = {"kernel": "New", "variant": "", "type": "u8", **dict.fromkeys(COLUMNS, 1.0), "worst": 0.1}
    found = {row["kernel"]: row["mac_ns"] for row in mean_of([*rows(1.0, 3.0), new], {"fits": rows(2.0, 2.0)})}
    assert found == {"Conv": 1.0, "NhwcMaxPool": 2.0, "New": 1.0}  # the other machine is half as fast: its pool costs 1


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 1000))
def test_the_fit_finds_costs_that_are_there(costs: list[float], seed: int) -> None:
    columns = np.random.default_rng(seed).uniform(0.1, 1, (8, 3))
    found = nonnegative(columns, columns @ costs)
    assert (found >= 0).all()
    assert np.allclose(columns @ found, columns @ costs, atol=1e-6)


@given(st.integers(0, 1000))
def test_no_other_costs_are_closer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns, target = rng.uniform(0, 1, (6, 3)), rng.normal(0, 1, 6)
    found = nonnegative(columns, target)
    least = ((columns @ found - target) ** 2).sum()
    others = np.abs(found + rng.normal(0, 0.3, (200, 3)))
    assert (((others @ columns.T - target) ** 2).sum(axis=1) >= least - 1e-9).all()


def test_a_fit_by_macs_and_elements() -> None:
    rows = [
        {"kernel": "k", "variant": "", "type": "u8", "domain": "", "macs": macs, "reads": reads, "writes": writes}
        | {"weights": 0, "pieces": 0, "ns": 500 + 0.01 * macs + 0.3 * reads}
        for macs, reads, writes in ((1000, 10, 7), (5000, 900, 30), (70000, 200, 100), (100, 4000, 9))
    ]
    (found,) = fits([*rows, {**rows[0], "ns": None}])
    assert found["sizes"] == 4
    assert [found[name] for name in COLUMNS[:3]] == pytest.approx([500, 0.01, 0.3], rel=1e-3)
    assert found["worst"] < 1e-3
    assert fit(rows[:1])["worst"] < 1e-6


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The output, nothing optimised."""
    return np.asarray(session(model).run(None, {"x": x})[0])


@pytest.mark.sampled(14)
@pytest.mark.parametrize("chain", CHAIN_OF.values(), ids=CHAIN_OF)
def test_pairs_change_little(chain: Chain) -> None:
    """The Q/DQ form of every placement computes what the float chain does, up to its scales."""
    x = np.random.default_rng(1).uniform(-1, 1, chain.shape).astype(np.float32)
    reference = run(chain.model(), x)
    for placement in chain.points.values():
        made = quantized(chain, placement, "u8")
        error = run(made, x) - reference
        assert np.sqrt(np.mean(error**2)) < SCALE / 2 + 0.2 * np.sqrt(np.mean(reference**2)), placement


def test_kernels_are_counted_and_float_ones_named() -> None:
    chain = CHAIN_OF["conv Relu conv"]
    good, bad = (quantized(chain, chain.points[name], "u8") for name in chain.points)
    whole, left = kernels_of(optimised(good))
    assert (whole["QLinearConv"], left.total()) == (2, 0)
    assert kernels_of(optimised(bad))[1] == {"FusedConv": 1}


def test_a_row_of_a_chain() -> None:
    chain = CHAIN_OF["Gemm 384"]
    rows = list(measured([chain], 0.001))
    assert [row["activation"] for row in rows] == ["u8", "s8"]
    assert size(chain.model()) == (128 * 384 * 384, 128 * 384)
    assert rows[0]["ratio"] == pytest.approx(rows[0]["ns_integer"] / rows[0]["ns_float"], rel=0.01)
    assert rows[0]["integer"] is (not rows[0]["float"])
