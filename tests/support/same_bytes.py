"""Digests of the file that a model is quantized to; as a program, in an environment that the caller chose."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sbonnx
from sbonnx.spec import Array

ROOT = Path(__file__).resolve().parents[2]


def digest(model: Any, data: Mapping[str, Array], *, shuffle: int | None = None, **wishes: Any) -> str:
    """sha256 of the quantized file.

    Args:
        data: samples along the leading axis.
        shuffle: seed of their order; None: as they come.
        wishes: see `sbonnx.quantize`.
    """
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(len(next(iter(data.values()))))
        data = {name: values[order] for name, values in data.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantized.onnx"
        sbonnx.quantize(model, data, output=path, verify=False, **wishes)
        return hashlib.sha256(path.read_bytes()).hexdigest()


def digests_elsewhere(
    model: Path, data: Path, runs: Sequence[Mapping[str, Any]], *, hash_seed: int, compiled: bool, blas_threads: int
) -> list[str]:
    """`digest` of each of `runs` in another process.

    Args:
        data: an .npz file.
        hash_seed: of Python's hashes, and so of the order of sets.
        compiled: whether the loops in C may be used.
        blas_threads: of numpy's OpenBLAS.
    """
    environment = os.environ | {
        "PYTHONHASHSEED": str(hash_seed),
        "SBONNX_COMPILED": str(int(compiled)),
        "OPENBLAS_NUM_THREADS": str(blas_threads),
    }
    command = [sys.executable, "-m", "tests.support.same_bytes", json.dumps([str(model), str(data), list(runs)])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    model, data, runs = json.loads(sys.argv[1])
    print(json.dumps([digest(model, dict(np.load(data)), **wishes) for wishes in runs]))
