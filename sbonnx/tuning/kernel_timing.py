"""Times one onnxruntime kernel at a time: copies of a single node in a graph that is not optimised further."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.backends.kernel_costs import Amounts
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.system.runtime import open_session, session_options

Model = onnx.ModelProto | Path

MICROSOFT: Final = "com.microsoft"
NCHWC: Final = "com.microsoft.nchwc"
COPIES: Final = 8
"""Nodes of the same kernel in a timed graph, because a run has an overhead of a few microseconds."""


@dataclass(frozen=True, eq=False)
class KernelCase:
    """One kernel at one size.

    activations: graph inputs by name, with their values; constants: initializers by name.
    operands: inputs of the node in order, "" for an omitted one. macs: multiply-accumulates, or values that a pooling
    compares or adds; 0 for other kernels. pieces: runs of adjacent values that the kernel gathers or copies one by one.
    """

    kernel: str
    variant: str
    dtype: str
    activations: Mapping[str, np.ndarray]
    operands: Sequence[str]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    macs: int = 0
    pieces: int = 0
    writes: int = 0

    @property
    def reads(self) -> int:
        """Number of elements of the activations."""
        return sum(values.size for values in self.activations.values())

    @property
    def weights(self) -> int:
        """Number of elements of the largest constant."""
        return max((values.size for values in self.constants.values()), default=0)

    @property
    def amounts(self) -> Amounts:
        """Measures that the formula of a price takes."""
        return Amounts(self.macs, self.reads, self.writes, self.weights, self.pieces)

    @property
    def row(self) -> dict[str, Any]:
        """Kernel and measures, as `cost_fit.fits` reads them with a time."""
        names = {"kernel": self.kernel, "variant": self.variant, "type": self.dtype, "domain": self.domain}
        measures = {"macs": self.macs, "reads": self.reads, "writes": self.writes, "weights": self.weights}
        return {**names, **measures, "pieces": self.pieces}


def session(model: Model, *, threads: int = 1, optimise: bool = False, entries: Mapping[str, str] | None = None) -> Any:
    """Create a CPU session, without optimization or with all optimizations; `entries`: its configuration entries."""
    options = session_options("all" if optimise else "off", threads=threads)
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    return open_session(source(model), options)


def source(model: Model) -> str | bytes:
    """Return the argument for the creation of a session: path or bytes."""
    return str(model) if isinstance(model, Path) else model.SerializeToString()


def optimised(model: Model) -> onnx.ModelProto:
    """Return the graph after all optimizations of onnxruntime for this CPU."""
    options = session_options("all", threads=1)
    with temporary_folder() as folder:
        path = folder / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        open_session(source(model), options)
        return onnx.load(str(path))


def repeated(case: KernelCase, copies: int) -> onnx.ModelProto:
    """Build a graph with `copies` nodes of the kernel on the same inputs; its output is one number, to avoid copies."""
    nodes = [helper.make_node("Identity", ["tick"], ["tock"])]
    for copy in range(copies):
        names = [f"y{copy}_{number}" for number in range(case.outputs)]
        nodes.append(helper.make_node(case.kernel, list(case.operands), names, domain=case.domain, **case.attributes))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
        for name, values in case.activations.items()
    ]
    inputs.append(helper.make_tensor_value_info("tick", TensorProto.FLOAT, [1]))
    output = helper.make_tensor_value_info("tock", TensorProto.FLOAT, [1])
    constants = [numpy_helper.from_array(values, name) for name, values in case.constants.items()]
    graph = helper.make_graph(nodes, case.kernel, inputs, [output], constants)
    domains = [("", 20), (MICROSOFT, 1), (NCHWC, 1)]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*pair) for pair in domains], ir_version=9)


def time_run(run: Any, feeds: Mapping[str, np.ndarray], seconds: float, quantile: float = 0.5) -> float:
    """Measure the time of one run in ns: a quantile of at least 5 runs, or as many as fit into `seconds`.

    CPU time for one thread, because it hardly depends on the load of the machine, else wall time.
    """
    clock = time.process_time_ns if run.get_session_options().intra_op_num_threads == 1 else time.perf_counter_ns
    given = dict(feeds)
    run.run(None, given)
    run.run(None, given)
    taken: list[int] = []
    end = clock() + int(seconds * 1e9)
    while len(taken) < 5 or clock() < end:
        start = clock()
        run.run(None, given)
        taken.append(clock() - start)
    return float(np.quantile(taken, quantile))


def time_case(case: KernelCase, seconds: float, threads: int = 1, copies: int = COPIES, quantile: float = 0.5) -> float:
    """Measure the time of one kernel in ns, including its dispatch by onnxruntime.

    Args:
        seconds: time of the measurement; 5 runs at least.
        threads: threads inside operators.
        copies: nodes of the timed graph.
        quantile: of the runs; a low one on a machine where other programs run too.

    Raises:
        exceptions of onnxruntime: this build has no such kernel for these types.
    """
    feeds = {**case.activations, "tick": np.zeros(1, np.float32)}
    full, bare = (session(repeated(case, count), threads=threads) for count in (copies, 0))
    spare = time_run(bare, feeds, seconds / 20, quantile)
    return max(time_run(full, feeds, seconds, quantile) - spare, 0.0) / copies
