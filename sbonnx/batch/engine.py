"""`LocalEngine`: runs the steps of a batch in parallel processes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

from sbonnx.batch.jobs.job import AGAIN, Outcome, Places, Step, Watch
from sbonnx.batch.outcomes import now, skipped_steps
from sbonnx.batch.process.cleanup import sweep
from sbonnx.batch.process.step_main import Publish, Work
from sbonnx.batch.process.step_process import LOOK_EVERY, StepProcess
from sbonnx.errors import DeviceError
from sbonnx.system.cpu import cores

Expected = Callable[[Step], "float | None"]
"""Estimates the seconds of a step, or returns None."""

UNKNOWN: Final = 10.0
"""Default seconds of a step if no step has an estimate."""


@final
class LocalEngine:
    """Runs steps, each in a separate process.

    Of the ready steps, the one at the head of the longest remaining chain starts first. Idle processors are divided
    among the ready steps, so that the last step alone gets all of them. A crashed step is retried after the others.

        outcomes = LocalEngine(workers=4).run(steps, Places(folder), watch)

    Args:
        workers: concurrent steps; None: one per two processors, at least two if there are two.
        work, publish: see `step_main.Errand`; None: sbonnx's own.
        expected: estimates the duration of steps; None: unknown.
        method: start method of processes; None: forkserver if available.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        work: Work | None = None,
        publish: Publish | None = None,
        expected: Expected | None = None,
        method: str | None = None,
    ) -> None:
        self.workers = default_workers() if workers is None else workers
        if self.workers < 1:
            raise DeviceError(f"a batch needs at least one worker, got {self.workers}")
        self._start = partial(StepProcess, work=work, publish=publish, method=method)
        self._expected = expected

    def run(self, steps: Sequence[Step], places: Places, watch: Watch) -> dict[str, Outcome]:
        """Run `steps`. Dependencies outside `steps` are assumed to be done.

        Steps with the same key run once. If the call ends early (Ctrl-C, an exception of `watch`), all processes are
        terminated, and finished steps stay finished.

        Returns:
            The last outcome of each step, by key. Each attempt is reported to `watch` when it ends.

        Raises:
            OutputError: the folder is not writable.
        """
        unique = {step.key: step for step in steps}
        (places.state / "steps").mkdir(parents=True, exist_ok=True)
        sweep(places, unique.values())
        run = _LocalRun(unique, places, watch, self.workers, self._start, self._priorities(unique))
        try:
            run.go()
        finally:
            run.end()
            sweep(places, unique.values())
        return run.outcomes

    def _priorities(self, steps: dict[str, Step]) -> dict[str, float]:
        """Return the seconds of the longest chain that starts with each step (critical path), by key."""
        seconds_of = {key: self._expected(step) if self._expected else None for key, step in steps.items()}
        told = [seconds for seconds in seconds_of.values() if seconds is not None]
        usual = sum(told) / len(told) if told else UNKNOWN
        readers: dict[str, list[str]] = {key: [] for key in steps}
        for key, step in steps.items():
            for need in step.after:
                if need in readers:
                    readers[need].append(key)
        priorities: dict[str, float] = {}
        for key in reversed(_ordered(steps)):
            own = seconds_of[key]
            priorities[key] = (usual if own is None else own) + max(
                (priorities[reader] for reader in readers[key]), default=0.0
            )
        return priorities


def default_workers() -> int:
    """Return the default number of concurrent steps: most of a step is single-threaded, calibration is not."""
    return max(min(cores(), 2), cores() // 2)


def _ordered(steps: dict[str, Step]) -> list[str]:
    """Sort keys topologically, dependencies first.

    Raises:
        ValueError: the dependencies have a cycle.
    """
    left = {key: {need for need in step.after if need in steps} for key, step in steps.items()}
    order: list[str] = []
    while left:
        free = [key for key, needs in left.items() if not needs]
        if not free:
            raise ValueError(f"steps depend on each other: {sorted(left)}")
        order += free
        for key in free:
            del left[key]
        for needs in left.values():
            needs.difference_update(free)
    return order


@dataclass
class _LocalRun:
    """One run of an engine.

    Attributes:
        outcomes: outcomes of finished steps, by key.
    """

    steps: dict[str, Step]
    places: Places
    watch: Watch
    workers: int
    start: Callable[..., StepProcess]
    priorities: dict[str, float]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = dict(self.steps)
        self.attempts = dict.fromkeys(self.steps, 0)
        self.running: dict[str, StepProcess] = {}
        cpus: list[int] = []
        with contextlib.suppress(AttributeError, OSError):  # the system does not report them
            cpus = sorted(os.sched_getaffinity(0))
        self.load = dict.fromkeys(cpus, 0)

    def go(self) -> None:
        """Run until all steps have ended."""
        while self.waiting or self.running:
            self._skip()
            self._fill()
            if not self.running:
                continue
            sources = [source for process in self.running.values() for source in process.sources()]
            multiprocessing.connection.wait(sources, timeout=LOOK_EVERY)
            for key, process in list(self.running.items()):
                self._look(key, process)

    def end(self) -> None:
        """Terminate all processes."""
        for process in self.running.values():  # kill all before waiting for any
            process.kill()
        for process in self.running.values():
            process.end()
        self.running.clear()

    def _look(self, key: str, one: StepProcess) -> None:
        step, watch = one.step, self.watch
        said: list[tuple[str, int, int | None]] = []
        before = one.memory

        def tell(stage: str, done: int = 0, total: int | None = None) -> None:
            said.append((stage, done, total))
            watch.told(step, stage, done, total, one.memory)

        one.look(tell)
        if one.outcome is None:
            if not said and one.memory != before:
                watch.told(step, "", 0, None, one.memory)
            return
        del self.running[key]
        for cpu in one.cpus:
            self.load[cpu] -= 1
        self._settle(step, one.outcome)

    def _skip(self) -> None:
        """Skip steps whose dependencies failed, transitively."""
        while skipped := skipped_steps(self.steps, self.waiting, self.outcomes):
            for key, outcome in skipped:
                self.outcomes[key] = outcome
                self.watch.ended(self.waiting.pop(key), outcome, again=False)

    def _fill(self) -> None:
        while free := self.workers - len(self.running):
            ready = [
                key
                for key, step in self.waiting.items()
                if all(need in self.outcomes or need not in self.steps for need in step.after)
            ]
            if not ready:
                return
            key = max(ready, key=lambda one: (self.priorities[one], -list(self.steps).index(one)))
            self._begin(self.waiting.pop(key), min(free, len(ready)))

    def _begin(self, step: Step, sharers: int) -> None:
        """Start a step with its share of the idle processors."""
        idle = [cpu for cpu, load in self.load.items() if not load]
        threads = max(1, len(idle) // sharers)
        cpus = sorted(self.load, key=lambda cpu: (self.load[cpu], cpu))[:threads]
        self.attempts[step.key] += 1
        attempt = self.attempts[step.key]
        try:
            process = self.start(step, self.places, threads=threads, cpus=cpus, attempt=attempt)
        except OSError as error:  # for example too many processes; may be temporary
            self.watch.started(step, attempt, "none")
            self._settle(step, Outcome(step.key, "crashed", str(error), attempts=attempt, finished=now()))
            return
        self.running[step.key] = process
        for cpu in process.cpus:
            self.load[cpu] += 1
        self.watch.started(step, attempt, str(process.pid))

    def _settle(self, step: Step, outcome: Outcome) -> None:
        """Handle the end of an attempt: retry, or record the final outcome."""
        again = outcome.status in AGAIN and outcome.attempts <= step.limits.retries
        if again:
            self.waiting[step.key] = step
            self.priorities[step.key] = 0.0  # after the others: it may be what exhausts the machine
        else:
            self.outcomes[step.key] = outcome
        self.watch.ended(step, outcome, again=again)
