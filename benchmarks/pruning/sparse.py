"""Error and accuracy of sparse weights, with other ways and a peer, and with 4 bits: section of docs/results/.

python -m benchmarks.pruning.sparse --pack FOLDER [MODEL ...] [--ways WAY ...] [--kept FILE] [--write]

The first layer is dense in all rows. The peer runs in its own environment (`make peers`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers.environments import FOLDER, PEERS
from benchmarks.pruning.scores import Logits, cell, judge, logits
from benchmarks.pruning.ways import ONNXSIM, NotRun, Subject
from benchmarks.results import arguments, not_measured, table, write_section
from sbonnx.recipe.names import PruningStrategyName

MODELS: Final = ("cifar_resnet20", "squeezenet11")

PATTERNS: Final[dict[str, dict[str, Any]]] = {"50 % unstructured": {"sparsity": 0.5}, "2:4": {"pattern": "2:4"}}
"""Keywords of `sbonnx.prune` by pattern."""

PEERS_PATTERNS: Final[dict[str, dict[str, Any]]] = {
    "50 % unstructured": {"sparsity": 0.5},
    "2:4": {"sparsity": 0.5, "n": 2, "m": 4},
}
"""Options of onnxsim by pattern."""

GROUP: Final = 4

BITS: Final = ", 4-bit weights"

WEIGHTS_ONLY: Final = {"W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"DISABLE": True}}}

GOALS: Final = {
    ("cifar_resnet20", "2:4"): 13.5,
    ("cifar_resnet20", "50 % unstructured"): 16.5,
    ("cifar_resnet20", "2:4" + BITS): 12.8,
}
"""SQNR of the logits on clean images that the default must reach, dB."""

DEFAULT: Final = "default (zeros by the error after refit)"
FLOAT: Final = "float"
DENSE: Final = "dense" + BITS

HEADER: Final = (
    *("model", "weights", "way", "zeros", "2:4 for TensorRT", "SQNR, dB", "top-1", "as float", "KL, nats", "CPU s"),
    "goal",
)

SparseWay = Callable[[Subject, str, Path], float]
"""Writes a file with a pattern of zeros and returns the CPU seconds."""


def ours(strategy: PruningStrategyName, *, data: bool = True) -> SparseWay:
    """Use `sbonnx.prune` with a strategy."""

    def run(subject: Subject, pattern: str, output: Path) -> float:
        begin = time.process_time()
        feeds = subject.feeds if data else None
        sbonnx.prune(subject.model, feeds, strategy=strategy, output=output, threads=1, **PATTERNS[pattern])
        return time.process_time() - begin

    return run


def onnxsim(method: str) -> SparseWay:
    """Use onnxsim."""

    def run(subject: Subject, pattern: str, output: Path) -> float:
        options = PEERS_PATTERNS[pattern]
        return subject.run_peer(ONNXSIM, output, method=method, unstructured=True, **options)

    return run


WAYS: Final[dict[str, SparseWay]] = {
    "onnxsim, magnitude": onnxsim("magnitude"),
    "onnxsim, Wanda": onnxsim("wanda"),
    "onnxsim, SparseGPT": onnxsim("sparsegpt"),
    "l1norm, no data": ours("l1norm", data=False),
    "l1norm, refitted": ours("l1norm"),
    "output (zeros of Wanda), refitted": ours("output"),
    DEFAULT: ours("auto"),
}
"""Ways, the peer first."""

QUANTIZED: Final = ("onnxsim, SparseGPT", "l1norm, no data", DEFAULT)
"""Ways whose 2:4 files are quantized to 4-bit weights."""


@dataclass(frozen=True)
class SparseBench:
    """Measurements of one model."""

    pack: Any
    name: str
    subject: Subject

    @cached_property
    def _reference(self) -> Logits:
        return logits(self.pack, self.name, self.subject.model)

    def record(self, pattern: str, way: str) -> Record:
        """Write one file and evaluate it."""
        output = self.subject.path("sparse.onnx")
        plain = pattern.removesuffix(BITS)
        try:
            seconds = 0.0 if way in (FLOAT, DENSE) else WAYS[way](self.subject, plain, output)
        except NotRun as reason:
            return {"why": f"not run: {reason}"}
        path = self.subject.model if way in (FLOAT, DENSE) else output
        if pattern.endswith(BITS):
            path = self._quantized(path)
        zeros, fitting = zeros_of(path)
        scores = judge(self.pack, self.name, self._reference, logits(self.pack, self.name, path))
        return {"zeros": zeros, "fitting": fitting, "cpu": seconds, **scores}

    def _quantized(self, path: Path) -> Path:
        """Quantize the weights to 4 bits."""
        output = self.subject.path("quantized.onnx")
        subject = self.subject
        sbonnx.quantize(path, subject.feeds, backend="virtual", recipe=WEIGHTS_ONLY, output=output, verify=False)
        return output


def zeros_of(path: Path) -> tuple[float, float]:
    """Return the shares of zeros, and of groups with at most two non-zero weights, in convolutions after the first.

    A group is four input channels at one kernel tap and output. Quantized weights are dequantized.
    """
    model = onnx.load(str(path))
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values:
            codes = values[node.input[0]].astype(np.float64)
            point = values[node.input[2]].astype(np.float64) if len(node.input) > 2 else np.zeros(1)
            shape = [-1, *[1] * (codes.ndim - 1)] if point.ndim and codes.ndim else [1]
            values[node.output[0]] = codes - point.reshape(shape)
    inputs = {value.name for value in model.graph.input}
    nodes = [node for node in model.graph.node if node.op_type == "Conv" and node.input[1] in values]
    weights = [values[node.input[1]] for node in nodes if not inputs & set(node.input)]
    zero = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.size for weight in weights)
    counts = [
        (weight.reshape(len(weight), -1, GROUP, *weight.shape[2:]) != 0).sum(axis=2)
        for weight in weights
        if weight.shape[1] % GROUP == 0
    ]
    fitting = sum(int((count <= GROUP // 2).sum()) for count in counts) / sum(count.size for count in counts)
    return zero, fitting


Key = tuple[str, str, str]


def keys_of(name: str, ways: Sequence[str]) -> list[Key]:
    """Return (model, weights, way) of all rows of a model."""
    sparse = [(name, pattern, way) for pattern in PATTERNS for way in ways]
    quantized = [(name, f"2:4{BITS}", way) for way in QUANTIZED if way in ways]
    return [(name, FLOAT, FLOAT), *sparse, (name, DENSE, DENSE), *quantized]


def row(key: Key, record: Record) -> tuple[str, ...]:
    """Return the cells of a record."""
    name, pattern, way = key
    if "why" in record:
        return (name, pattern, way, "", "", "", record["why"], "", "", "", "")
    fits = "yes" if record["fitting"] == 1 else f"{record['fitting']:.0%} of the groups"
    goal = GOALS.get((name, pattern)) if way == DEFAULT else None
    reached = next(iter(record["sqnr"].values()))[0]
    against = ("sqnr", 1), ("agreement", 3), ("kl", 3)
    error, agreement, divergence = ("" if way == FLOAT else cell(record, *each) for each in against)
    return (
        *(name, pattern, way, f"{record['zeros']:.2f}", fits if "2:4" in pattern else ""),
        *(error, cell(record, "top1"), agreement, divergence, f"{record['cpu']:.1f}" if record["cpu"] else ""),
        "" if goal is None else f"{goal:g} dB: {'met' if reached >= goal else '**missed**'}",
    )


def text_of(rows: Sequence[Sequence[str]], missing: Sequence[Key]) -> str:
    """Return the section: what was run, and the table. `missing`: keys without a record."""
    return (
        "## Sparse weights\n\n`python -m benchmarks.pruning.sparse --write`. Zeros in unchanged shapes, without "
        "training and without labels, from the same float file and calibration samples; the first layer is dense in all"
        " rows. Zeros: share of the weights of convolutions after the first. 2:4 for TensorRT: at most two weights of "
        "each four input channels at one kernel tap are not zero. SQNR: of the logits against the float network. "
        "top-1, share of the samples with the class of float, and mean divergence from the float network, with 95 % "
        "intervals over the samples; ResNet-20: clean / JPEG images. 4-bit weights: the file quantized with "
        "`W.QUANTIZER.BIT: 4` and float activations. Goals: on clean images. CPU s: of pruning. "
        f"Peer: {PEERS[ONNXSIM].versions}." + f"{not_measured(missing)}\n\n" + table(HEADER, rows)
    )


def main() -> None:
    """Print one row for each model, pattern and way."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--samples", type=int, help="calibration samples; default: all of the pack")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="folder of the peers' environments")
    parser.add_argument("--kept", type=Path, help="file of records of an interrupted run")
    parser.add_argument("--only-kept", action="store_true", help="table of the records, without measuring")
    given = parser.parse_args()
    pack, kept = load_pack(given.pack), Kept(given.kept)
    rows: list[tuple[str, ...]] = []
    missing: list[Key] = []
    for name in given.models:
        model = Path(pack.model_path(name))
        with tempfile.TemporaryDirectory(prefix="sparse-") as folder:
            subject = Subject(model, pack.load_calib(name, limit=given.samples), Path(folder), peers=given.peers)
            bench = SparseBench(pack, name, subject)
            for key in keys_of(name, given.ways):
                if given.only_kept and kept.get(*key) is None:
                    missing.append(key)
                    continue
                rows.append(row(key, kept.record(key, partial(bench.record, *key[1:]))))
                print(" | ".join(rows[-1]), flush=True)
    if given.write:
        write_section("sparse weights", text_of(rows, missing))


if __name__ == "__main__":
    main()
