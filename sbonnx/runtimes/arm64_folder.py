"""Download Python and onnxruntime for ARM64 into a folder, for the runtime `arm64`; nothing is installed.

    python -m sbonnx.runtimes.arm64_folder FOLDER

Needs Debian's apt-get and dpkg, whose package sources have ARM64, and pip; 250 MB. Root is not needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from sbonnx.runtimes.arm64 import PACKAGES, SYSTEM

DEBIAN: Final = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "zlib1g", "libgomp1")
WHEELS: Final = ("onnxruntime==1.24.4", "numpy", "flatbuffers", "packaging", "protobuf")
"""onnxruntime 1.30 and 1.32 crash in QEMU 7.2 when they are imported."""
PLATFORMS: Final = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


def download_system(folder: Path) -> None:
    """Unpack Python and its libraries into `folder`.

    Raises:
        subprocess.CalledProcessError: a command fails; its output is on the terminal.
    """
    folder.mkdir(parents=True)
    with TemporaryDirectory() as work:
        place = Path(work)
        for name in ("lists", "cache/archives"):
            (place / name / "partial").mkdir(parents=True)
        (place / "status").touch()
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "",
            "Dir::State::lists": place / "lists",
            "Dir::State::status": place / "status",
            "Dir::Cache": place / "cache",
            "Debug::NoLocking": "1",
        }
        apt = ["apt-get", "-q", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "-y", "--no-install-recommends", "--download-only", "install", *DEBIAN], check=True)
        for package in sorted((place / "cache" / "archives").glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, folder], check=True)


def download_packages(folder: Path, python: str) -> None:
    """Unpack Python packages into `folder`.

    Args:
        python: version of Python, such as "311".

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    target = [word for name in PLATFORMS for word in ("--platform", name)]
    with TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", work]
        subprocess.run([*pip, *target, "--python-version", python, *WHEELS], check=True)
        for wheel in Path(work).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def main() -> int:
    """Fill the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m sbonnx.runtimes.arm64_folder", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    download_system(folder / SYSTEM)
    names = (re.fullmatch(r"python3\.(\d+)", path.name) for path in (folder / SYSTEM / "usr" / "bin").iterdir())
    minor = next(name[1] for name in names if name is not None)
    download_packages(folder / PACKAGES, f"3{minor}")
    print(f"{folder} is complete: set SBONNX_ARM64 to it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
