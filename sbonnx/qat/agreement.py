"""Comparison of an exported file with the module it was written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.calib.engine.session import Session, SessionModel
from sbonnx.graph import Graph
from sbonnx.graph.query import node_by_name
from sbonnx.planning import Site, Solution
from sbonnx.precision import emulated
from sbonnx.qat.fakequant import FakeQuant
from sbonnx.qat.module import ModuleOrigin, unwrapped
from sbonnx.report.codes import Problem
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU
from sbonnx.torchnet.onnx_to_torch.reimport import site_of

PLACEHOLDER: Final = "placeholder"
"""Kind of an input in a `torch.fx` graph."""

FLOAT: Final = {"fp32": 1e-4, "fp16": 0.1, "bf16": 0.3}
"""Float tolerance relative to the largest magnitude of a tensor, by float type. torch and onnxruntime add in different
orders, and half floats round after each operation."""

NARROW: Final = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Dtype in which a module computes after a cast to half, or if its graph is half."""

SAME_CODE: Final = 0.01
"""Tolerance, in quantization steps, for equal quantized values: scale times integer may be computed in another type."""

SMALL: Final = 0.05
"""Tolerance, in quantization steps, if some layers could not be compared in isolation. A value at the boundary of two
quantized values then changes all later results, so `SMALL_SHARE` and `LARGE_SHARE` bound how many values differ by
more."""

SMALL_SHARE: Final = 0.1
"""Largest share of the values of an output that may differ by more than `SMALL` steps."""

LARGE_SHARE: Final = 1e-4
"""Largest share of the values of an output that may differ by one to two steps."""

ALL_FLOAT: Final = 1e-3
"""Step that is assumed for a network without quantized activations."""


@dataclass(frozen=True)
class _FakeQuantCall:
    """A call of a fake-quant module, and the tensor of the file that corresponds to its output, or None."""

    site: Site
    module: FakeQuant
    tensor: str | None


@dataclass
class _Deviation:
    """Deviation of a tensor: largest excess over the tolerance, number of values above it, number of values."""

    excess: float = 0.0
    times: int = 0
    values: int = 0

    def add(self, beyond: Array) -> None:
        """Add the excess of each value of one feed over the tolerance; 0 or less if it is within the tolerance."""
        self.excess = max(self.excess, float(beyond.max(initial=0.0)))
        self.times += int((beyond > 0).sum())
        self.values += beyond.size

    def problem(self, name: str) -> Problem:
        """Describe the deviation of tensor `name`."""
        return Problem(
            "differs-from-module",
            f"'{name}' has other quantized values in the file than in the module on the same inputs: {self.times} of "
            f"{self.values} values, by up to {self.excess:.3g} steps more than float error explains",
        )


def disagreements(
    module: nn.Module, origin: ModuleOrigin, solution: Solution, path: Path, feeds: Sequence[Mapping[str, Array]]
) -> list[Problem]:
    """Compare an exported file with its module, and return one problem for each tensor and output that differs.

    The two are compared layer by layer on the same inputs (isolated error): after each fake-quant module, the module
    continues with the file's tensor. Weights must have the same quantized values. An activation must have the value
    that the module's value is rounded to, or the neighboring one if the module's value is within float error (`FLOAT`)
    of the boundary. A float output may differ by float error. An end-to-end comparison would not work: one value at a
    boundary changes quantized values in all later layers, by any amount.

    Args:
        module: wrapped or not. The inner module is run, in eval mode, without synchronization with other processes.
        origin: graph, plan and sites of the module.
        solution: solution that was written into the file.
        path: file, run by onnxruntime without optimization. Integer operators are replaced by float operators between
            Q/DQ pairs, and bfloat16 is emulated by float32 with bfloat16 rounding.
        feeds: samples by the names of the model's inputs.

    Raises:
        DataError: a feed has another value for a fixed input.
    """
    inner = unwrapped(module)
    graph = graphs.load(path)
    qdq.unfold(graph)
    if origin.prepared.plan.float_type == "bf16":
        graph = emulated(graph)
    reads = _fake_quant_calls(inner, origin, graph)
    tensors: dict[str, _Deviation] = {}
    differences: dict[str, list[Array]] = {}
    tolerances: dict[str, float] = {}
    modes = {part: part.training for part in inner.modules()}
    session = _session(graph, [read.tensor for read in reads.values() if read.tensor is not None], path)
    try:
        inner.eval()
        for feed in feeds:
            typed = {spec.name: np.asarray(feed[spec.name], spec.dtype) for spec in session.input_specs}
            values = session.run(typed)
            kind = origin.prepared.plan.float_type
            for name, expected in _Comparison(inner, reads, values, kind, tensors).outputs(origin.feed(feed)).items():
                if name in values and expected.is_floating_point():
                    wanted = expected.float().cpu().numpy()
                    difference = np.abs(np.asarray(values[name], np.float32) - wanted).ravel()
                    differences.setdefault(name, []).append(difference)
                    tolerance = FLOAT[NARROW.get(expected.dtype, kind)] * float(np.abs(wanted).max(initial=0.0))
                    tolerances[name] = max(tolerances.get(name, 0.0), tolerance)
    finally:
        session.close()
        for part, mode in modes.items():
            part.training = mode
    isolated = all(read.tensor is not None or call.args[0].op == PLACEHOLDER for call, read in reads.items())
    quantum = 0.0
    if not isolated:
        sites = origin.prepared.plan.of_role("activation")
        scales = (float(solution.qparams[site.key].scale.max()) for site in sites if site.key in solution.qparams)
        quantum = max(scales, default=ALL_FLOAT)
    problems = [deviation.problem(name) for name, deviation in tensors.items() if deviation.times]
    outputs = [_problem(name, np.concatenate(parts), tolerances[name], quantum) for name, parts in differences.items()]
    return problems + [problem for problem in outputs if problem is not None]


def _fake_quant_calls(inner: fx.GraphModule, origin: ModuleOrigin, graph: Graph) -> dict[fx.Node, _FakeQuantCall]:
    """Return every call of a fake-quant module; the tensor in the file is found by the first reader of the call."""
    nodes = node_by_name(graph)
    main = {id(node) for node in graph.nodes}
    calls: dict[fx.Node, _FakeQuantCall] = {}
    for name, sites in origin.sites.items():
        for site in sites:
            for reader in site.readers:
                if reader in origin.solution.unread:
                    continue
                read = site_of(inner, reader.node, reader.index)
                call = read.node.args[read.position]
                node = nodes.get(reader.node)
                fake_quant = inner.get_submodule(name)
                assert isinstance(call, fx.Node) and isinstance(fake_quant, FakeQuant)
                if call.target == name:
                    in_file = node is not None and id(node) in main and reader.index < len(node.inputs)
                    tensor = node.inputs[reader.index].name if in_file and node is not None else None
                    calls.setdefault(call, _FakeQuantCall(site, fake_quant, tensor))
    return calls


def _session(graph: Graph, tensors: Sequence[str], path: Path) -> Session:
    proto = graphs.to_proto(graph)
    given = {value.name for value in proto.graph.output}
    for name in dict.fromkeys(tensors):
        if name not in given:
            proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    return Session(SessionModel(proto.SerializeToString(), level="off"), [CPU], threads=1, name=str(path))


@dataclass
class _Comparison(fx.Interpreter):  # type: ignore[misc]
    """Interpreter that compares each fake-quant output with the file's tensor, and continues with the file's tensor.

    `values`: tensors of the file, by name; `kind`: its float type; `tensors`: output: deviations by tensor name.
    """

    inner: fx.GraphModule
    reads: Mapping[fx.Node, _FakeQuantCall]
    values: Mapping[str, Any]
    kind: str
    tensors: dict[str, _Deviation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.inner)

    def outputs(self, feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Run the module on a feed and return its outputs by name."""
        like = next(iter(self.inner.parameters()))
        inputs = []
        for node in self.inner.graph.nodes:
            if node.op == PLACEHOLDER:
                value = torch.from_numpy(np.array(feed[str(node.target)])).to(like.device)
                inputs.append(value.to(like.dtype) if value.dtype == torch.float32 else value)
        outputs: dict[str, torch.Tensor] = self.run(*inputs)
        return outputs

    def run_node(self, node: fx.Node) -> Any:
        """Run one node; at a fake-quant module, compare the result with the file's tensor and return the latter."""
        result = super().run_node(node)
        read = self.reads.get(node)
        if read is None or read.tensor is None:
            return result
        source = node.args[0]
        value = None if not isinstance(source, fx.Node) else self.env[source]
        in_file = _without_padding(np.asarray(self.values[read.tensor], np.float32), tuple(result.shape))
        if in_file is None or value is None:
            return result
        weight = read.site.role == "weight"
        before = (result if weight else value).detach().float().cpu().numpy()
        beyond = self._beyond(read, before, in_file, exact=weight, kind=NARROW.get(result.dtype, self.kind))
        self.tensors.setdefault(read.site.tensor, _Deviation()).add(beyond)
        return torch.from_numpy(in_file.copy()).to(result)

    @staticmethod
    def _beyond(read: _FakeQuantCall, value: Array, given: Array, *, exact: bool, kind: str) -> Array:
        """Compute, in quantization steps, how far each value of the file is outside the tolerance."""
        qparams = read.module.qparams()
        scale = qparams.along(qparams.scale, value.shape).astype(np.float64)
        beyond: Array
        if exact:
            beyond = np.abs(given - value.astype(np.float64)) / scale - SAME_CODE
            return beyond
        spec = qparams.spec
        zero = qparams.along(qparams.zero_point, value.shape).astype(np.float64)
        clipped = np.clip(
            np.nan_to_num(value.astype(np.float64)), (spec.qmin - zero) * scale, (spec.qmax - zero) * scale
        )
        tolerance = FLOAT[kind] * float(np.abs(value).max(initial=0.0))
        far = (np.abs(given - clipped) - tolerance) / scale - 0.5
        steps = given / scale
        off = np.abs(steps - np.rint(steps)) if kind == "fp32" else np.zeros_like(steps)  # half floats are not exact
        beyond = np.maximum(far, off) - SAME_CODE
        return beyond


def _without_padding(value: Array, shape: tuple[int, ...]) -> Array | None:
    """Remove channels that were appended to `value` for a kernel; None if its layout is different."""
    if value.ndim != len(shape) or any(have < want for have, want in zip(value.shape, shape, strict=True)):
        return None
    if sum(have != want for have, want in zip(value.shape, shape, strict=True)) > 1:
        return None
    return value[tuple(slice(size) for size in shape)]


def _problem(name: str, difference: Array, tolerance: float, quantum: float) -> Problem | None:
    """Describe the absolute differences of an output; None if they are within the tolerance.

    quantum: quantization step by which values may differ; 0 if each layer was compared on the same inputs.
    """
    most = float(difference.max(initial=0.0))
    allowed = max(tolerance, quantum)
    often = float((difference > SMALL * allowed).mean()) if quantum and difference.size else 0.0
    beyond = float((difference > 1.001 * allowed).mean()) if difference.size else 0.0
    if often <= SMALL_SHARE and (beyond == 0.0 or (quantum and beyond <= LARGE_SHARE and most <= 2.0 * allowed)):
        return None
    return Problem(
        "differs-from-module",
        f"output '{name}' of the file differs from that of the module by up to {most:.3g} ({beyond:.1%} of its values "
        f"by more than the {allowed:.3g} that rounding explains)",
    )
