"""Builds the source distribution so that the same tree gives the same bytes on every machine and day.

Setuptools writes times, owners and modes of the files that it packs. Here all entries have the time SOURCE_DATE_EPOCH
(or that of the last commit), no owner, and modes 644 and 755.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Build the archive, and write it with fixed metadata."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="tree to pack")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="folder of the archive")
    given = parser.parse_args()
    epoch = (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=given.tree, capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, str(given.tree)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (built,) = Path(folder).glob("*.tar.gz")
        given.outdir.mkdir(parents=True, exist_ok=True)
        target = given.outdir / built.name
        repack(built, target, int(epoch))
    print(target)


def repack(source: Path, target: Path, epoch: int) -> None:
    """Write the files of an archive, sorted, with fixed metadata."""
    with (
        tarfile.open(source) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)


if __name__ == "__main__":
    main()
