"""Digests of the files of a case, and the environment that they were recorded in."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.system.cpu import target_cpu
from tests.golden.cases import SUBJECTS, Case
from tests.support.toy_slack import toy_slack

FILE: Final = Path(__file__).parent / "digests.json"
PACKAGES: Final = ("numpy", "onnx", "onnxruntime", "protobuf", "torch")


@dataclass(frozen=True)
class Recorded:
    """What `digests.json` holds.

    Attributes:
        environment: versions and processor features on which the last bits of float sums depend.
        digests: sha256 of the files of a case, by its name.
    """

    environment: Mapping[str, str]
    digests: Mapping[str, str]


def environment() -> dict[str, str]:
    """Versions of the packages that compute and write, the processor, and the kernels that onnxruntime has for it."""
    config: Any = np.show_config(mode="dicts")
    return {
        "processor": f"{_processor()}: {' '.join(config['SIMD Extensions'].get('found', ()))}",
        "kernels": target_cpu().name,
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    """Model of the processor by name and numbers, as virtual machines share names; or at least its architecture."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    fields = ("model name", "cpu family", "model", "stepping")
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return " ".join(values[name] for name in fields if name in values) or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"


def recorded() -> Recorded:
    """The digests of the repository."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Recorded(content["environment"], content["digests"])


def write(where: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Record digests."""
    content = asdict(Recorded(dict(where), dict(digests)))
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def digest(case: Case, folder: Path) -> str:
    """Run a case in an empty folder. Returns the sha256 of the names and contents of all files written."""
    output = folder / "output"
    output.mkdir()
    with toy_slack():
        case.write(SUBJECTS[case.subject](), output)
    total = hashlib.sha256()
    files = sorted(path for path in output.rglob("*") if path.is_file())
    assert files
    for path in files:
        content = path.read_bytes()
        total.update(f"{path.relative_to(output)} {len(content)};".encode())
        total.update(content)
    return total.hexdigest()
