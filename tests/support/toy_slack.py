"""Graphs of tests are too small to gain anything by integers, which the planner would leave in float."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sbonnx.planning import cost_partition


@contextmanager
def toy_slack() -> Iterator[None]:
    """Place integers though a model loses 50 µs by them."""
    before = cost_partition.MODEL_SLACK_NS
    try:
        cost_partition.MODEL_SLACK_NS = 50_000.0  # type: ignore[misc]
        yield
    finally:
        cost_partition.MODEL_SLACK_NS = before  # type: ignore[misc]
