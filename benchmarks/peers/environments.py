"""A virtual environment for each peer, which `make peers` runs: `python -m benchmarks.peers.environments`.

Needs the standard library only. torch goes in first: what comes after it then asks for no other. A package that names
one that is not needed and would bring another torch is installed by itself. A peer that cannot be had leaves the
reason in a file, which the tables show in its place.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".peers"
TORCH: Final = "torch==2.13.0"
READY: Final = "ready.txt"
WHY_NOT: Final = "why-not.txt"


@dataclass(frozen=True)
class Peer:
    """Installation of a peer.

    Attributes:
        packages: packages to install with their dependencies.
        alone: packages to install without dependencies.
        check: program that tests the installation, and triggers builds at first use.
        script: module that quantizes (or prunes) with the peer, run by the Python of its environment.
        versions: versions for the tables.
        torch: install torch first.
        quantizes: False for peers that prune only, or quantize the weights of decoders only.
    """

    packages: Sequence[str]
    alone: Sequence[str]
    check: str
    script: str
    versions: str
    torch: bool = True
    quantizes: bool = True


PEERS: Final[Mapping[str, Peer]] = {
    "onnxruntime": Peer(
        ("onnx==1.23.2", "onnxruntime==1.31.1", "sympy"),
        (),
        "import onnxruntime.quantization",
        "benchmarks.peers.onnxruntime_static",
        "onnxruntime.quantization 1.31.1",
        torch=False,
    ),
    "modelopt": Peer(
        (
            *("onnx==1.21.0", "onnxruntime==1.24.4", "onnx-graphsurgeon", "onnxconverter-common", "onnxscript"),
            *("onnxslim", "polygraphy", "lief", "cppimport", "numpy", "scipy", "pulp", "omegaconf", "pydantic", "rich"),
            *("nvidia-ml-py", "regex", "safetensors", "tqdm", "ninja", "packaging", "setuptools", "PyYAML"),
        ),
        # its extra "onnx" names onnxruntime-gpu and cupy, which int8 on a CPU does without
        ("nvidia-modelopt==0.47.0",),
        "import modelopt.onnx.quantization",
        "benchmarks.peers.modelopt_onnx",
        "nvidia-modelopt 0.47.0, onnx 1.21.0, onnxruntime 1.24.4, torch 2.13.0",
    ),
    "aimet": Peer(
        (
            *("onnx==1.23.2", "onnxruntime==1.31.1", "onnx_ir", "onnxscript", "numpy", "scipy", "pandas"),
            *(
                "scikit-learn",
                "osqp",
                "pybind11",
                "psutil",
                "Jinja2",
                "PyYAML",
                "jsonschema",
                "bokeh",
                "hvplot",
                "tqdm",
            ),
        ),
        # onnx2torch depends on torchvision, only for two detection ops, and torchvision would install another torch.
        ("onnx2torch", "aimet-onnx==2.42.0"),
        "import aimet_onnx",
        "benchmarks.peers.aimet",
        "aimet-onnx 2.42.0, onnx 1.23.2, onnxruntime 1.31.1, torch 2.13.0",
    ),
    "quark": Peer(
        (
            *("onnx==1.22.0", "onnxruntime==1.28.0", "onnxscript", "onnxslim", "protobuf", "numpy", "scipy", "pandas"),
            *("ninja", "joblib", "evaluate", "plotly", "psutil", "pydantic", "rich", "sentencepiece", "tqdm"),
            "zstandard",
        ),
        ("amd-quark==0.13",),
        "import quark.onnx",
        "benchmarks.peers.quark_onnx",
        "amd-quark 0.13, onnx 1.22.0, onnxruntime 1.28.0, torch 2.13.0",
    ),
    "nncf": Peer(
        ("onnx==1.23.2", "onnxruntime==1.31.1", "nncf==3.4.0"),
        (),
        "import nncf, nncf.onnx",
        "benchmarks.peers.nncf_onnx",
        "nncf 3.4.0, onnx 1.23.2, onnxruntime 1.31.1",
        torch=False,
    ),
    "ppq": Peer(
        # Its Caffe descriptors fail to import with protobuf above 3.20, which rules out newer onnx and onnxruntime.
        (
            *("protobuf==3.20.3", "onnx==1.14.1", "numpy==1.26.4", "onnxruntime==1.17.3", "tqdm", "sympy"),
            *("packaging", "ml_dtypes==0.3.2", "setuptools==75.8.0"),
        ),
        ("onnxslim==0.1.48", "ppq==0.6.6"),
        "import onnxslim, ppq, ppq.lib",
        "benchmarks.peers.ppq_onnx",
        "ppq 0.6.6, onnx 1.14.1, onnxruntime 1.17.3, torch 2.13.0",
    ),
    "onnxsim": Peer(
        ("onnx==1.23.2", "onnxruntime==1.31.1", "numpy", "onnxsim==0.8.1"),
        (),
        "import onnxsim.quark_weight_rounding",
        "benchmarks.peers.onnxsim_qdq",
        "onnxsim 0.8.1, onnx 1.23.2, onnxruntime 1.31.1",
        torch=False,
    ),
    "onnx_quantize": Peer(
        ("onnx==1.23.2", "onnxruntime==1.31.1", "numpy", "onnx-quantize==0.2.0"),
        (),
        "import onnx_quantize",
        "benchmarks.peers.onnx_quantize_groups",
        "onnx_quantize 0.2.0, onnx 1.23.2, onnxruntime 1.31.1",
        torch=False,
        quantizes=False,
    ),
    "auto_round": Peer(
        ("auto-round==0.16.1", "transformers==5.23.0", "onnx==1.23.2"),
        (),
        "import auto_round, onnx",
        "benchmarks.peers.auto_round_llama",
        "auto-round 0.16.1, transformers 5.23.0, torch 2.13.0",
        quantizes=False,
    ),
    "mobius": Peer(
        ("transformers==5.24.0", "onnxscript==0.7.2", "onnx-shape-inference==0.4.0", "safetensors", "tqdm"),
        ("mobius-onnx==0.1.0",),
        "import mobius",
        "benchmarks.peers.mobius_models",
        "mobius-onnx 0.1.0",
        quantizes=False,
    ),
    "torch-pruning": Peer(
        # those of sbonnx, whose importer makes the torch module, and of torch.onnx
        (
            *("onnx==1.23.2", "onnxruntime==1.31.1", "onnxscript", "numpy", "onnx-graphsurgeon", "ml-dtypes"),
            *("pydantic", "PyYAML", "typer", "rich", "xxhash", "networkx", "threadpoolctl", "psutil", "jinja2"),
        ),
        ("torch-pruning==1.6.1",),
        "import torch_pruning",
        "benchmarks.peers.torch_pruning_onnx",
        "torch-pruning 1.6.1, torch 2.13.0",
        quantizes=False,
    ),
}


def python_of(folder: Path, name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    parts = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return (folder / name).joinpath(*parts)


def absent(folder: Path, name: str) -> str | None:
    """Return the reason why a peer is not available, or None."""
    place = folder / name
    if (place / READY).is_file():
        return None
    reason = place / WHY_NOT
    return reason.read_text(encoding="utf-8").strip() if reason.is_file() else "not built: make peers"


def steps(peer: Peer, python: Path) -> list[list[str]]:
    """Return the commands that install a peer into an empty environment and test it."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    alone = [[*pip, "--no-deps", *peer.alone]] if peer.alone else []
    return [
        *([[*pip, TORCH]] if peer.torch else []),
        [*pip, *peer.packages],
        *alone,
        [str(python), "-c", peer.check],
    ]


def build(name: str, folder: Path) -> str | None:
    """Create a peer's environment unless it is up to date; returns the reason why it is not available, or None."""
    peer, place = PEERS[name], folder / name
    if (place / READY).is_file() and (place / READY).read_text(encoding="utf-8").strip() == peer.versions:
        return None
    for mark in (READY, WHY_NOT):
        (place / mark).unlink(missing_ok=True)
    venv.create(place, with_pip=True)
    for command in steps(peer, python_of(folder, name)):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            why = f"`{' '.join(command[1:])[:80]}` fails: {said[-1][:200]}"
            (place / WHY_NOT).write_text(f"{why}\n", encoding="utf-8")
            return why
    (place / READY).write_text(f"{peer.versions}\n", encoding="utf-8")
    return None


def main() -> int:
    """Build the selected environments. Exit code 1 if one is not available."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the environments lie")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - PEERS.keys())
    if unknown:
        parser.error(f"there is no peer '{unknown[0]}': there are {', '.join(PEERS)}")
    failed = 0
    for name in options.names:
        why = build(name, options.folder)
        print(f"{name}: {why or PEERS[name].versions}", file=sys.stderr if why else sys.stdout)
        failed += why is not None
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
