"""Compare golden files where their digests were not recorded: `python -m tests.golden.elsewhere [--anyway]`.

Digests hold for one processor and one set of packages; tests skip them elsewhere. There, this program takes as
reference the files that the commit which recorded the digests writes on this machine. In the recorded environment it
does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import PACK, ROOT
from tests.golden.cases import CASES
from tests.golden.digests import FILE, digest, environment, recorded
from tests.golden.test_golden import LONG


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def runnable() -> list[str]:
    """Names of the cases of which this machine has the model and the packages."""
    pack, torch = (PACK / "manifest.json").is_file(), importlib.util.find_spec("torch") is not None
    return [
        name
        for name, case in CASES.items()
        if name not in LONG and (pack or not case.packed) and (torch or not case.torch)
    ]


def has_history() -> bool:
    """Whether the commit that recorded the digests can be known: in a clone that is not shallow."""
    try:
        return git("rev-parse", "--is-shallow-repository") == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def references(names: list[str], folder: Path) -> dict[str, str]:
    """Digests of the files that the commit of `digests.json` writes here."""
    path = str(FILE.relative_to(ROOT))
    commit = git("log", "-1", "--format=%H", "--", path)
    print(f"reference: {path} of {commit[:12]}", flush=True)
    git("worktree", "add", "--detach", str(folder), commit)
    try:
        for loops in (path for package in ("sbonnx", "calib") for path in (ROOT / package).rglob("*.so")):
            shutil.copy(loops, folder / loops.relative_to(ROOT))
        command = [sys.executable, "-m", "tests.golden", "--write", *names]
        subprocess.run(command, cwd=folder, env=os.environ | {"SBONNX_PACK": str(PACK)}, check=True)
        written: dict[str, str] = json.loads((folder / path).read_text(encoding="utf-8"))["digests"]
        return written
    finally:
        git("worktree", "remove", "--force", str(folder))


def main() -> int:
    """Exit code 1 if a file differs from its reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anyway", action="store_true", help="in the recorded environment too")
    parser.add_argument("cases", nargs="*", help="names; none: all but those of minutes")
    options = parser.parse_args()
    if environment() == recorded().environment and not options.anyway:
        print("golden files were compared by the tests: this is the recorded environment")
        return 0
    if not has_history():
        print("golden files were not compared: this processor is another one than that of the digests, and the commit")
        print("that recorded them is not known without the history (git fetch --unshallow)")
        return int(options.anyway)
    names = options.cases or runnable()
    with tempfile.TemporaryDirectory() as folder:
        known = references(names, Path(folder) / "tree")
        differing: list[str] = []
        for name in names:
            output = Path(folder) / name
            output.mkdir()
            if digest(CASES[name], output) != known[name]:
                differing.append(name)
    print(f"{len(names)} golden cases compared; other files than the reference: {', '.join(differing) or 'none'}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
