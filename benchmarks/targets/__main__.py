"""Latency beside the peer, lint and half precision, compared with their targets.

    python -m benchmarks.targets [--tables latency lint half] [--models NAME ...] [--repeats 15] [--write]

Each table is a section of its own in docs/results/, so that one can be measured again without the others.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

from benchmarks.accuracy import HEADLINE, load_pack
from benchmarks.results import arguments, with_command, write_section
from benchmarks.targets import half as targets_half
from benchmarks.targets import latency as targets_latency
from benchmarks.targets import lint as targets_lint
from benchmarks.targets.models import NAMES, subject

TABLES = ("latency", "lint", "half")
COMMAND = "python -m benchmarks.targets --tables {} --write"


def models_of(which: str, names: list[str]) -> list[str]:
    """Return the models of a table; those with random weights have no accuracy and are not used for half precision."""
    shown = {"latency": NAMES, "lint": (*HEADLINE, *targets_lint.PEER_SUBJECTS)}.get(which, tuple(HEADLINE))
    return [name for name in names if name in shown]


def section(which: str, names: list[str], pack: object, folder: Path, repeats: int) -> str:
    """Return one table with its heading."""
    wanted = models_of(which, names)
    subjects = [subject(name, pack, folder) for name in wanted]
    if which == "latency":
        lines = [line for one in subjects for line in targets_latency.measure(one, folder, repeats)]
        return targets_latency.text(lines, repeats)
    return targets_lint.text(subjects) if which == "lint" else targets_half.text(subjects)


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--models", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each contestant for latency")
    parser.add_argument("--files", type=Path, help="folder where the peer's files are kept and looked for")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pack = load_pack(options.pack)
    with tempfile.TemporaryDirectory() as spare:
        folder = options.files or Path(spare)
        folder.mkdir(parents=True, exist_ok=True)
        for which in options.tables:
            text = with_command(section(which, options.models, pack, folder, options.repeats), COMMAND.format(which))
            print(text)
            if options.write:
                write_section(f"targets {which}", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
