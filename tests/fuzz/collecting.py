"""Draw cases of a part, run them, and count how they end."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.harness import Case, Verdict, Zygote, describe
from tests.fuzz.parts import PARTS


@dataclass
class Tally:
    """Cases by class, one description for each kind of fault, the longest time (s) and the highest memory (bytes)."""

    classes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    slowest: float = 0.0
    peak: int = 0

    def add(self, case: Case, verdict: Verdict) -> bool:
        """Count one case. Returns whether it shows a new kind of fault."""
        self.classes[verdict.name] += 1
        self.slowest, self.peak = max(self.slowest, verdict.seconds), max(self.peak, verdict.peak)
        if not verdict.faults or kind_of(verdict) in self.faults:
            return False
        self.faults[kind_of(verdict)] = describe(case, verdict)
        return True

    def __iadd__(self, other: Tally) -> Tally:
        self.classes += other.classes
        self.faults = {**other.faults, **self.faults}
        self.slowest, self.peak = max(self.slowest, other.slowest), max(self.peak, other.peak)
        return self


def kind_of(verdict: Verdict) -> str:
    """Key of a defect: the broken rules, and the line of code if the message names one."""
    place = re.findall(r"\((\w+\.py line \d+)\)", verdict.err)
    return f"{[re.sub('[0-9]+', 'N', fault)[:60] for fault in verdict.faults]} {' '.join(place[-1:])}"


def collect(part: str, count: int, number: int, keep: str | None = None, zygote: Zygote | None = None) -> Tally:
    """Run `count` cases of a part, drawn from the seed `number`.

    Args:
        keep: folder for one case of each fault.
        zygote: server that runs the cases; None: a new one, which takes 3 s to start.
    """
    strategy, _ = PARTS[part]
    tally = Tally()
    with Zygote() if zygote is None else nullcontext(zygote) as server:

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run(case: Case) -> None:
            verdict = server.run(case)
            if tally.add(case, verdict) and keep:
                name = hashlib.sha256(kind_of(verdict).encode()).hexdigest()[:12]
                Path(keep, f"{name}.pickle").write_bytes(pickle.dumps(case))

        run()
    return tally
