"""The benchmark of kernels: every case runs, the fit is right, and the Q/DQ forms compute what the float ones do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.chain_cases import CHAINS, SINGLES
from benchmarks.kernels.chains import measured, size
from sbonnx.backends.kernel_costs import KINDS
from sbonnx.tuning import elementwise_cases, kernel_cases
from sbonnx.tuning.cost_fit import fit, fits, nonnegative
from sbonnx.tuning.kernel_timing import KernelCase, repeated, time_case

TINY = (1, 16, 4)
CHAIN_OF = {chain.name: chain for chain in (*CHAINS, *SINGLES)}


def tiny_cases() -> Iterator[KernelCase]:
    """Every kernel at one small size."""
    kinds = {(kernel, stride, 16 if groups > 1 else 1) for *_, kernel, stride, groups in kernel_cases.CONVOLUTIONS}
    for kind in sorted(kinds):
        yield kernel_cases.integer_conv((16, 16, 8, *kind))
        yield kernel_cases.float_conv((16, 16, 8, *kind))
    for make in elementwise_cases.FAMILIES:
        yield from make(TINY)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", list(tiny_cases()), ids=lambda case: f"{case.kernel} {case.variant} {case.dtype}")
def test_every_kernel_runs(case: KernelCase) -> None:
    assert [node.op_type for node in repeated(case, 3).graph.node].count(case.kernel) >= 3
    assert 0 <= time_case(case, 0.0005) < 1e8


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
    assert [found[name] for name in KINDS[:3]] == pytest.approx([500, 0.01, 0.3], rel=1e-3)
    assert found["worst"] < 1e-3
    assert fit(rows[:1])["worst"] < 1e-6


def test_a_row_of_a_chain() -> None:
    chain = CHAIN_OF["Gemm 384"]
    rows = list(measured([chain], 0.001))
    assert [row["activation"] for row in rows] == ["u8", "s8"]
    assert size(chain.model()) == (128 * 384 * 384, 128 * 384)
    assert rows[0]["ratio"] == pytest.approx(rows[0]["ns_integer"] / rows[0]["ns_float"], rel=0.01)
    assert rows[0]["integer"] is (not rows[0]["float"])
