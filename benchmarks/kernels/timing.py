"""Times one onnxruntime kernel at a time: copies of a single node in a graph that is not optimised further."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Model = onnx.ModelProto | Path

MICROSOFT = "com.microsoft"
NCHWC = "com.microsoft.nchwc"
COPIES = 8
"""Nodes of the same kernel in a timed graph, because a run has an overhead of a few microseconds."""
COLUMNS = ("fixed_ns", "mac_ns", "read_ns", "write_ns", "weight_ns", "piece_ns")
"""Coefficients of a kernel's cost: fixed, and per MAC, element read, element written, weight and piece."""
MEASURES = ("macs", "reads", "writes", "weights", "pieces")


@dataclass(frozen=True)
class Case:
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


def session(
    model: Model, *, threads: int = 1, optimise: bool = False, entries: Mapping[str, str] | None = None
) -> onnxruntime.InferenceSession:
    """Create a CPU session, without optimization or with all optimizations; `entries`: its configuration entries."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    for key, value in {"session.intra_op.allow_spinning": "0", **(entries or {})}.items():
        options.add_session_config_entry(key, value)
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(source(model), options, providers=["CPUExecutionProvider"])


def source(model: Model) -> str | bytes:
    """Return the argument for the creation of a session: path or bytes."""
    return str(model) if isinstance(model, Path) else model.SerializeToString()


def optimised(model: Model) -> onnx.ModelProto:
    """Return the graph after all optimizations of onnxruntime for this CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(source(model), options, providers=["CPUExecutionProvider"])
        return onnx.load(str(path))


def repeated(case: Case, copies: int) -> onnx.ModelProto:
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
    held = [numpy_helper.from_array(values, name) for name, values in case.constants.items()]
    graph = helper.make_graph(nodes, case.kernel, inputs, [output], held)
    domains = [("", 20), (MICROSOFT, 1), (NCHWC, 1)]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*pair) for pair in domains], ir_version=9)


def median_run(run: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray], seconds: float) -> float:
    """Measure the time of one run in ns: the median of at least 5 runs, or as many as fit into `seconds`.

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
    return statistics.median(taken)


def time_case(case: Case, seconds: float, threads: int = 1) -> float:
    """Measure the time of one kernel in ns, including its dispatch by onnxruntime.

    Raises:
        exceptions of onnxruntime: this build has no such kernel for these types.
    """
    feeds = {**case.activations, "tick": np.zeros(1, np.float32)}
    full, bare = (session(repeated(case, copies), threads=threads) for copies in (COPIES, 0))
    spare = median_run(bare, feeds, seconds / 20)
    return max(median_run(full, feeds, seconds) - spare, 0.0) / COPIES


def nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve non-negative least squares: the best solution without negative coefficients over all subsets of columns.

    columns: float64 (N, K), K small; target: float64 (N,). Returns float64 (K,). For K <= 6 trying the 2**K - 1
    subsets is exact and simple (Lawson & Hanson 1974, chapter 23, search the same subsets step by step).
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, min(count, len(target)) + 1):
        for chosen in combinations(range(count), size):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(count), error
                best[list(chosen)] = found
    return best


def fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit the cost of a kernel in ns as a linear function of the row's measures; the coefficients are `COLUMNS`.

    The fit minimizes relative errors, so that large sizes do not dominate small ones. "worst" is the largest
    |predicted / measured - 1|. Elements read are left out if they are proportional to elements written, and weights for
    kernels without MACs.
    """
    table = np.array([[1, *(row[key] for key in MEASURES)] for row in rows], np.float64)
    taken = np.array([row["ns"] for row in rows], np.float64)
    if not table[:, 1].any():
        table[:, 4] = 0
    ratios = table[:, 2] / np.maximum(table[:, 3], 1)
    if np.ptp(ratios) <= 0.01 * ratios.max():
        table[:, 2] = 0
    used = [index for index in range(len(COLUMNS)) if table[:, index].any()]
    weighted = table[:, used] / taken[:, None]
    sizes = np.abs(weighted).max(axis=0)
    found = nonnegative(weighted / sizes, np.ones(len(taken))) / sizes
    whole = np.zeros(len(COLUMNS))
    whole[used] = found
    worst = float(np.abs(table @ whole / taken - 1).max())
    return {**{name: float(value) for name, value in zip(COLUMNS, whole, strict=True)}, "worst": worst}
