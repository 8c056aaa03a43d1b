"""Work for the batch engine that takes no time: what remains is the engine's own."""

from __future__ import annotations

import os
from pathlib import Path

from sbonnx.batch.jobs.batch_plan import BatchRequest
from sbonnx.batch.jobs.job import Job, Outcome, Places, Step, Tell
from sbonnx.batch.outcomes import FILE, now, to_json


def noop(step: Step, places: Places, tell: Tell, threads: int) -> Outcome:
    """Run a no-op step: only write its folder and outcome, as every step does."""
    outcome = Outcome(step.key, "done", finished=now())
    hidden = places.made(step.key).with_name(f".{step.key}.{os.getpid()}")
    hidden.mkdir(parents=True)
    (hidden / FILE).write_text(to_json(outcome))
    os.rename(hidden, places.made(step.key))
    return outcome


def nowhere(step: Step, places: Places) -> None:
    """Publish nothing."""


def wish_of(count: int, folder: Path) -> BatchRequest:
    """Create a batch request of `count` independent no-op steps."""
    jobs = tuple(Job(f"n{n}", "m.onnx", None, "onnxruntime", str(folder / f"n{n}.onnx")) for n in range(count))
    steps = tuple(Step(f"key-{job.name}", "quantize", job.name, (job,)) for job in jobs)
    return BatchRequest("no-op", Places(folder), jobs, jobs, steps)
