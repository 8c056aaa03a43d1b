"""`LocalEngine`: the steps of a batch on this machine, as many at a time as there are workers."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, final

from sbonnx.batch.jobs.job import AGAIN, FINE, Outcome, Places, Step, Watch
from sbonnx.batch.outcomes import now
from sbonnx.batch.process.cleanup import sweep
from sbonnx.batch.process.step_main import Publish, Work
from sbonnx.batch.process.step_process import LOOK_EVERY, Isolated
from sbonnx.cpu import cores
from sbonnx.errors import DeviceError

Expected = Callable[[Step], "float | None"]
"""Seconds that a step will take, as far as that is known."""

UNKNOWN: Final = 10.0
"""Seconds for a step of which nothing is known, where nothing is known of any."""


@final
class LocalEngine:
    """Runs steps, each in a process of its own.

    Of the steps whose needs are met, the one at the head of the longest way to the end begins first. What is free of
    the processors is shared among those that can begin: the last step alone has all of them. One that crashed is
    tried again behind the others.

        outcomes = LocalEngine(workers=4).run(steps, Places(folder), watch)

    Args:
        workers: steps at a time; None: one for every two processors, at least two where there are two.
        work, publish: see `child.Errand`; None: sbonnx's own.
        expected: how long steps take; None: nothing is known.
        method: of starting processes; None: a server of forks where there is one.
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
        self._start = partial(Isolated, work=work, publish=publish, method=method)
        self._expected = expected

    def run(self, steps: Sequence[Step], places: Places, watch: Watch) -> dict[str, Outcome]:
        """Run `steps`, which need one another only: what they need besides is taken as done.

        Steps of the same key are one. Whatever ends this call early (Ctrl-C, an exception of `watch`), no process is
        left, and what was done stays done.

        Returns:
            The last outcome of each step, by key. How each attempt ends is told to `watch` as it happens.

        Raises:
            OutputError: the folder cannot be written to.
        """
        unique = {step.key: step for step in steps}
        (places.state / "steps").mkdir(parents=True, exist_ok=True)
        sweep(places, unique.values())
        run = _Run(unique, places, watch, self.workers, self._start, self._priorities(unique))
        try:
            run.go()
        finally:
            run.end()
            sweep(places, unique.values())
        return run.outcomes

    def _priorities(self, steps: dict[str, Step]) -> dict[str, float]:
        """Seconds from the begin of each step to the end of the last that waits for it."""
        known = {key: self._expected(step) if self._expected else None for key, step in steps.items()}
        told = [seconds for seconds in known.values() if seconds is not None]
        usual = sum(told) / len(told) if told else UNKNOWN
        readers: dict[str, list[str]] = {key: [] for key in steps}
        for key, step in steps.items():
            for need in step.after:
                if need in readers:
                    readers[need].append(key)
        found: dict[str, float] = {}
        for key in reversed(_ordered(steps)):
            own = known[key]
            found[key] = (usual if own is None else own) + max((found[one] for one in readers[key]), default=0.0)
        return found


def default_workers() -> int:
    """Steps at a time where nobody says: most of a step runs on one thread, calibration on all that it is given."""
    return max(min(cores(), 2), cores() // 2)


def _ordered(steps: dict[str, Step]) -> list[str]:
    """Keys, those that others need first.

    Raises:
        ValueError: steps wait for each other in a ring.
    """
    left = {key: {need for need in step.after if need in steps} for key, step in steps.items()}
    found: list[str] = []
    while left:
        free = [key for key, needs in left.items() if not needs]
        if not free:
            raise ValueError(f"steps wait for each other: {sorted(left)}")
        found += free
        for key in free:
            del left[key]
        for needs in left.values():
            needs.difference_update(free)
    return found


class _Run:
    """One run of an engine.

    Attributes:
        outcomes: of steps that have ended, by key.
    """

    def __init__(
        self,
        steps: dict[str, Step],
        places: Places,
        watch: Watch,
        workers: int,
        start: Callable[..., Isolated],
        priorities: dict[str, float],
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._steps = steps
        self._places = places
        self._watch = watch
        self._workers = workers
        self._start = start
        self._priorities = priorities
        self._waiting = dict(steps)
        self._attempts = dict.fromkeys(steps, 0)
        self._running: dict[str, Isolated] = {}
        self._load = dict.fromkeys(_processors(), 0)

    def go(self) -> None:
        """Until all have ended."""
        while self._waiting or self._running:
            self._skip()
            self._fill()
            if not self._running:
                continue
            sources = [source for one in self._running.values() for source in one.sources()]
            multiprocessing.connection.wait(sources, timeout=LOOK_EVERY)
            for key, one in list(self._running.items()):
                self._look(key, one)

    def end(self) -> None:
        """Leave no process behind."""
        for one in self._running.values():  # all at once, then wait
            one.kill()
        for one in self._running.values():
            one.end()
        self._running.clear()

    def _look(self, key: str, one: Isolated) -> None:
        """Hear what a process says, and whether it has ended."""
        step, watch = one.step, self._watch
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
        del self._running[key]
        for cpu in one.cpus:
            self._load[cpu] -= 1
        self._settle(step, one.outcome)

    def _skip(self) -> None:
        """Those of which a need did not end well; and those that need them."""
        while lost := list(self._lost()):
            for key, why in lost:
                step = self._waiting.pop(key)
                outcome = Outcome(key, "skipped", reason=why, attempts=0, finished=now())
                self.outcomes[key] = outcome
                self._watch.ended(step, outcome, again=False)

    def _lost(self) -> Iterator[tuple[str, str]]:
        for key, step in self._waiting.items():
            for need in step.after:
                ended = self.outcomes.get(need)
                if ended is not None and ended.status not in FINE:
                    yield key, f"'{self._steps[need].title}' did not end well ({ended.status}): {ended.reason}"
                    break

    def _fill(self) -> None:
        """Begin what can begin."""
        while free := self._workers - len(self._running):
            ready = [
                key
                for key, step in self._waiting.items()
                if all(need in self.outcomes or need not in self._steps for need in step.after)
            ]
            if not ready:
                return
            key = max(ready, key=lambda one: (self._priorities[one], -list(self._steps).index(one)))
            self._begin(self._waiting.pop(key), min(free, len(ready)))

    def _begin(self, step: Step, sharers: int) -> None:
        """Begin a step, with its share of the processors that are free."""
        idle = [cpu for cpu, load in self._load.items() if not load]
        threads = max(1, len(idle) // sharers)
        cpus = sorted(self._load, key=lambda cpu: (self._load[cpu], cpu))[:threads]
        self._attempts[step.key] += 1
        attempt = self._attempts[step.key]
        try:
            one = self._start(step, self._places, threads=threads, cpus=cpus, attempt=attempt)
        except OSError as error:  # too many processes, say: that may pass
            self._watch.started(step, attempt, "none")
            self._settle(step, Outcome(step.key, "crashed", str(error), attempts=attempt, finished=now()))
            return
        self._running[step.key] = one
        for cpu in one.cpus:
            self._load[cpu] += 1
        self._watch.started(step, attempt, str(one.pid))

    def _settle(self, step: Step, outcome: Outcome) -> None:
        """An attempt has ended: another one, or the last word."""
        again = outcome.status in AGAIN and outcome.attempts <= step.limits.retries
        if again:
            self._waiting[step.key] = step
            self._priorities[step.key] = 0.0  # behind the others: it may be what brings the machine down
        else:
            self.outcomes[step.key] = outcome
        self._watch.ended(step, outcome, again=again)


def _processors() -> list[int]:
    """Numbers of the processors that this process may use; none where the system does not say."""
    with contextlib.suppress(AttributeError, OSError):
        return sorted(os.sched_getaffinity(0))
    return []


__all__ = ["Expected", "LocalEngine", "default_workers"]
