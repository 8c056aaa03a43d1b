"""Long runs of the fuzz suite: ``python -m tests.fuzz --cases 10000``; ``--help`` lists the options."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.results import write_section
from tests.fuzz.collecting import Tally, collect
from tests.fuzz.parts import PARTS

ABOUT = """## Fuzzing

`python -m tests.fuzz --cases {cases} --seed {seed} --write`: wrong models, data, recipes, flags, job files and names, \
each run through the command line in a process of its own. A fault is a traceback, an internal error, a signal, more \
than 60 s, memory above the size of the model and 1 GB, a file left behind, a changed input, an unreadable report, or \
a result that computes something else than its model.

"""


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="how many, over all parts")
    parser.add_argument("--seed", type=int, default=0, help="another number draws other cases")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this part; can be repeated")
    parser.add_argument("--keep", help="folder for one pickled case of every kind of fault")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into its page of docs/results/")
    return parser.parse_args(arguments)


def table(tallies: dict[str, Tally]) -> str:
    """Classes and counts by part, as Markdown."""
    names = sorted({name for tally in tallies.values() for name in tally.classes})
    lines = [f"| part | cases | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for part, tally in tallies.items():
        lines.append(f"| {part} | {tally.classes.total()} | {' | '.join(str(tally.classes[name]) for name in names)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in proportion to their short mode; print classes and faults."""
    chosen = options(arguments)
    parts = chosen.part or list(PARTS)
    weight = sum(PARTS[part][1] for part in parts)
    if chosen.keep:
        Path(chosen.keep).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    tallies = {part: Tally() for part in parts}
    with ProcessPoolExecutor(chosen.workers) as pool:
        runs = [
            (part, pool.submit(collect, part, count, chosen.seed * 1000 + index, chosen.keep))
            for part in parts
            for count in [max(round(chosen.cases * PARTS[part][1] / weight / chosen.workers), 1)]
            for index in range(chosen.workers)
        ]
        for part, run in runs:
            tallies[part] += run.result()
    whole = Tally()
    for part, tally in tallies.items():
        whole += tally
        for kind, text in sorted(tally.faults.items()):
            print(f"\n{part}: {kind}\n  {text}")
    text = f"{table(tallies)}\n\n{whole.classes.total()} cases; longest {whole.slowest:.1f} s, highest memory "
    text += f"{whole.peak >> 20} MiB."
    print(f"\n{text}\n{time.monotonic() - start:.0f} s")
    if chosen.write:
        write_section("fuzz", ABOUT.format(cases=chosen.cases, seed=chosen.seed) + text)
    return 1 if whole.faults else 0


if __name__ == "__main__":
    sys.exit(main())
