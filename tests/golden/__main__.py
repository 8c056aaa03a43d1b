"""Compare the files of all cases with their recorded digests, or record them.

python -m tests.golden [--write] [CASE ...]
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from sbonnx.system.machine_costs import CACHE
from tests.golden.cases import CASES
from tests.golden.digests import digest, environment, recorded, write


def main() -> int:
    """Exit code 1 if a digest differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names; none: all")
    parser.add_argument("--write", action="store_true", help="record the digests of this environment")
    options = parser.parse_args()
    known, found = recorded(), {}
    os.environ[CACHE] = os.devnull  # costs of this machine are not used
    for name in options.cases or CASES:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            found[name] = digest(CASES[name], Path(folder))
        said = "new" if name not in known.digests else "same" if known.digests[name] == found[name] else "DIFFERS"
        print(f"{time.perf_counter() - start:6.1f} s  {said:8s} {name}", flush=True)
    if options.write:
        write(environment(), {**(known.digests if options.cases else {}), **found})
        return 0
    return int(any(known.digests.get(name) != value for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
