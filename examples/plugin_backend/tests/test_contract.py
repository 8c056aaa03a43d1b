"""The backend keeps the contract of sbonnx."""

from __future__ import annotations

from sbonnx import testing


def test_backend() -> None:
    testing.check_backend("mcu")
