"""Whole quantization of deep networks: CPU seconds and memory by number of nodes, and the split by stage.

    python -m benchmarks.scale [--nodes 1000 3000 10000] [--ways default layer gptq] [--json FILE] [--write]

Each run is the command `sbonnx quantize` in a separate process, from its start to the verified file. CPU seconds and
peak memory are those that the system counted for that process; seconds of stages are of processor time inside it.
Growth is the CPU time of a node, without the time of the imports, compared with the smallest network: 1 is linear.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.results import table, write_section

CHANNELS, HEIGHT, WIDTH = 8, 4, 8
SHAPE: Final = [1, CHANNELS, HEIGHT, WIDTH]

BLOCK: Final = 15
"""Nodes of one block of the network."""

PARAMETERS = ("gamma", "beta", "mean", "var")

EVERYWHERE: Final = ("--set", "KERNEL_COSTS=none")
"""Quantize every operator with an integer kernel, also those that are faster in float, as most are at this size."""

WAYS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "everywhere": EVERYWHERE,
    "layer": (*EVERYWHERE, "--granularity", "layer"),
    "gptq": (*EVERYWHERE, "--bits", "w4a8", "--set", "rounding=gptq"),
    "asym": (*EVERYWHERE, "--asym"),
}
"""Options of the command by name of the way."""

EXIT_LOW_QUALITY: Final = 1
"""Exit code of a file that was written and whose outputs are far from float; ten thousand layers add their errors."""


@dataclass(frozen=True)
class Row:
    """One run of the command.

    Attributes:
        way: a name in `WAYS`.
        nodes: nodes of the float network.
        sites: planned Q/DQ pairs of activations and weights.
        cpu: CPU seconds of the process, user and system.
        peak: peak resident memory in MB (10**6 bytes).
        stages: CPU seconds by stage.
    """

    way: str
    nodes: int
    sites: int
    cpu: float
    peak: float
    stages: dict[str, float]

    @property
    def work(self) -> float:
        """CPU seconds without imports."""
        return self.cpu - self.stages["imports"]


class Network:
    """A deep residual network: convolutions with and without batch norm, matrix products, layer norms, ReLUs, sums."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def build(self, nodes: int) -> onnx.ModelProto:
        """Build the network with `nodes` nodes rounded down to whole blocks; input and output float32 (1, 8, 4, 8)."""
        last = "x"
        for _ in range(nodes // BLOCK):
            last = self._products(self._convolutions(last))
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in ("x", last))
        graph = helper.make_graph(self._nodes, "deep", [x], [y], self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _convolutions(self, last: str) -> str:
        first = self._add("Relu", self._convolve(last, 1))
        middle = self._add("Add", last, self._convolve(first, 3))
        names = [self._weight(self._rng.uniform(0.5, 1.5, CHANNELS)) for _ in PARAMETERS]
        second = self._add("Relu", self._add("BatchNormalization", self._convolve(middle, 3), *names))
        return self._add("Add", middle, self._convolve(second, 1))

    def _products(self, last: str) -> str:
        hidden = self._add("Add", self._multiply(last), self._weight(self._rng.normal(0, 0.1, WIDTH)))
        hidden = self._multiply(self._add("Relu", hidden))
        total = self._add("Add", last, hidden)
        gamma, beta = (self._weight(self._rng.uniform(0.5, 1.0, WIDTH)) for _ in range(2))
        return self._add("LayerNormalization", total, gamma, beta)

    def _convolve(self, given: str, kernel: int) -> str:
        weight = self._rng.normal(0, 0.3 / kernel, (CHANNELS, CHANNELS, kernel, kernel))
        bias = self._rng.normal(0, 0.1, CHANNELS)
        pads = [kernel // 2] * 4
        return self._add("Conv", given, self._weight(weight), self._weight(bias), kernel_shape=[kernel] * 2, pads=pads)

    def _multiply(self, given: str) -> str:
        return self._add("MatMul", given, self._weight(self._rng.normal(0, 0.3, (WIDTH, WIDTH))))

    def _weight(self, values: np.ndarray[Any, Any]) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def _add(self, op: str, *given: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, given, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"


Seconds = dict[str, float]

SAVE_PARTS: Final = {"write": ("graph", "save"), "check": ("verify", "check"), "layer report": ("profile", "errors")}
"""Functions, as (module, name), whose time is shown apart from the stage `save`."""

CHECK_PARTS: Final = {"check sessions": ("sessions", "open_session")}
"""Functions whose time is shown apart from the check: onnxruntime loads and optimizes the two files."""


@contextmanager
def timed(seconds: Seconds, name: str) -> Iterator[None]:
    """Add the processor time of the block to `seconds`."""
    began = time.process_time()
    yield
    seconds[name] += time.process_time() - began


def timing(seconds: Seconds, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its processor time is added to `seconds`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with timed(seconds, name):
            return function(*args, **kwargs)

    return wrapped


def child(command: Sequence[str]) -> None:
    """Run the command line `command` in this process and print its CPU seconds by stage as JSON."""
    seconds: Seconds = defaultdict(float)
    from sbonnx import graph, pipeline, profiling, verify
    from sbonnx.cli import main as cli
    from sbonnx.verify import sessions

    seconds["imports"] = time.process_time()
    pipeline.STAGES = tuple(timing(seconds, stage.__name__, stage) for stage in pipeline.STAGES)  # type: ignore[misc]
    for name, (module, attribute) in {**SAVE_PARTS, **CHECK_PARTS}.items():
        owner = {"graph": graph, "verify": verify, "profile": profiling, "sessions": sessions}[module]
        setattr(owner, attribute, timing(seconds, name, getattr(owner, attribute)))
    sys.argv[1:] = command
    code = cli()
    seconds["save"] -= sum(seconds[name] for name in SAVE_PARTS)
    seconds["check"] -= sum(seconds[name] for name in CHECK_PARTS)
    seconds["other"] = time.process_time() - sum(seconds.values())
    print(json.dumps({"code": code, "stages": dict(seconds)}))


def measure(way: str, nodes: int, samples: int, folder: Path) -> Row:
    """Quantize a generated network in a separate process.

    Raises:
        SystemExit: the command failed.
    """
    model, data, output = folder / "deep.onnx", folder / "data.npz", folder / "quantized.onnx"
    onnx.save(Network().build(nodes), model)
    np.savez(data, x=np.random.default_rng(1).standard_normal((samples, *SHAPE[1:])).astype(np.float32))
    command = ["quantize", str(model), "--data", str(data), "--split", "1", "-o", str(output), "--force", "--json"]
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        arguments = [sys.executable, "-m", "benchmarks.scale", "--child", *command, *WAYS[way]]
        process = subprocess.Popen(arguments, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        text = out.read()
        if process.returncode:
            raise SystemExit(err.read())
    found = json.loads(text.splitlines()[-1])
    if found["code"] not in (0, EXIT_LOW_QUALITY):
        raise SystemExit(text)
    sites = sum(node.op_type == "QuantizeLinear" for node in onnx.load(output).graph.node)
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6
    return Row(way, nodes // BLOCK * BLOCK, sites, cpu, peak, found["stages"])


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table; growth is relative to the first row of the same way."""
    first: dict[str, Row] = {}
    for row in rows:
        base = first.setdefault(row.way, row)
        growth = row.work / row.nodes * base.nodes / base.work
        costly = Counter(row.stages).most_common(4)
        split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in costly)
        yield row.way, f"{row.nodes}", f"{row.sites}", f"{row.cpu:.1f}", f"{growth:.2f}", f"{row.peak:.0f}", split


ABOUT = """## Deep networks

`python -m benchmarks.scale --write`: the whole command `sbonnx quantize`, from its start to the verified file, on a
generated network (convolutions, batch norms, matrix products, layer norms, sums; tensors of 256 values), 4 samples.
Growth: CPU time of a node, without imports, compared with the smallest network.

"""
HEADER = ("way", "nodes", "QuantizeLinear", "CPU s", "growth", "peak MB", "largest parts, CPU s")


def main() -> None:
    """Measure and print the table."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 3000, 10_000])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["default", "everywhere", "layer", "gptq"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--write", action="store_true", help="put the table into its page of docs/results/")
    options = parser.parse_args()
    rows = []
    for way in options.ways:
        for nodes in options.nodes:
            with TemporaryDirectory() as folder:
                rows.append(measure(way, nodes, options.samples, Path(folder)))
            print(" | ".join(list(lines(rows))[-1]), flush=True)
    text = ABOUT + table(HEADER, lines(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    if options.write:
        write_section("scale", text)


if __name__ == "__main__":
    main()
