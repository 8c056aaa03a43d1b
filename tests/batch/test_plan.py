"""How long a batch will take, by what its steps took before."""

from __future__ import annotations

from pathlib import Path

from sbonnx.batch.jobs.batch_plan import Todo
from tests.batch import works


def test_estimates() -> None:
    """Two workers, a chain of 2 + 10 seconds, three of 4; what is unknown counts as its like on the mean."""
    out = Path("out")
    head = works.step_of("head", out, kind="calibrate")
    steps = (head, works.step_of("tail", out, after=(head.key,)), *(works.step_of(f"s{n}", out) for n in range(3)))
    seconds = {"k-head": 2.0, "k-tail": 10.0, "k-s0": 4.0, "k-s1": 4.0}
    assert Todo(steps, {}, {**seconds, "k-s2": 4.0}).wall(2) == 12.0
    assert Todo(steps, {}, {**seconds, "k-s2": 4.0}).wall(1) == 24.0
    assert Todo(steps, {}, seconds).wall(1) == 26.0
    assert Todo(steps, {}, {}).wall(1) is None
    assert Todo((), {}, {}).wall(1) == 0.0
