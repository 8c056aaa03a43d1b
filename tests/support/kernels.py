"""Kernels that take the times that a test sets, for `sbonnx tune` without measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from sbonnx.api import kernel_tuning
from sbonnx.tuning import cost_table
from sbonnx.tuning.elementwise_cases import edges
from sbonnx.tuning.kernel_cases import integer_conv
from sbonnx.tuning.kernel_timing import KernelCase
from sbonnx.tuning.kernel_trials import Trial
from sbonnx.verify.load import OtherLoad


def cases() -> Iterator[KernelCase]:
    """A few integer convolutions, and the kernels at the edges of float parts."""
    for size in ((16, 16, 8, 3, 1, 1), (16, 16, 32, 3, 1, 1), (48, 48, 20, 3, 1, 1)):
        yield integer_conv(size)
    for side in (16, 32, 64):
        yield from edges((1, 16, side))


def fake_kernels(monkeypatch: pytest.MonkeyPatch, factors: Mapping[str, float]) -> None:
    """Let `tune` see kernels that take as long as the bundled table says, those of `factors` so many times as long."""

    def time_of(trial: Trial) -> float | None:
        return (trial.expected_ns or 1000.0) * factors.get(trial.case.kernel, 1.0)

    monkeypatch.setattr(kernel_tuning, "every_case", cases)
    monkeypatch.setattr(kernel_tuning, "LEAST_SHARE", 0.01)
    monkeypatch.setattr(kernel_tuning, "_time_of", time_of)
    monkeypatch.setattr(kernel_tuning, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(cost_table, "block", lambda: 16)
    monkeypatch.setattr(OtherLoad, "busy", False)
