"""Fake-quantized forward pass without the exported file: the reference that the file is verified against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.schedule import PICKED_BY
from sbonnx.calib.engine.segments import reads_of
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.extract import extract
from sbonnx.graph.query import bodies, captured, constant, dtype, scopes, tensors_by_name
from sbonnx.graph.storage.weights import SPILL_BYTES, spill
from sbonnx.planning.types import Plan, Site, Solution
from sbonnx.spec import Array, QParams

Uses = dict[tuple[str, int], Site]
"""The site that each use (node, input index) is quantized by."""


@dataclass
class _Stage:
    """Nodes that run together: a session over float nodes, then the fake quantization and branches that depend on it.

    Attributes:
        nodes: of the session.
        run: the session, None if there are no nodes.
        outputs: its outputs.
        quantize: (key, tensor, new name) of activations that are complete after it.
        conditionals: Ifs with quantization inside their branches, which are run by `_Scope`s.
    """

    nodes: list[Node] = field(default_factory=list)
    run: LayerRunner | None = None
    outputs: tuple[str, ...] = ()
    quantize: list[tuple[str, str, str]] = field(default_factory=list)
    conditionals: list[tuple[Node, dict[bool, _Scope]]] = field(default_factory=list)


class Forward:
    """The float graph with fake quantization in between: `QParams.fake_quant` in numpy, float nodes in onnxruntime.

    Activations are fake-quantized for the readers that their site lists, every other reader gets the float tensor;
    weights and biases are replaced by their dequantized values. It shares no code with the Q/DQ writer and nothing is
    optimised, so it is an independent reference for the exported file.

        with Forward(graph, plan, solution, tensors=["conv1_out"]) as run:
            run(feeds)["conv1_out"]

    Args:
        graph, plan, solution: arguments and result of `calibrate`; the graph is not changed.
        w_quant: quantize weights.
        a_quant: fake-quantize activations. Biases are quantized if both are on.
        device: see `providers`.
        tensors: inner tensors to return in addition to the outputs, as computed, before their own fake quantization.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        solution: Solution,
        *,
        w_quant: bool = True,
        a_quant: bool = True,
        device: str = "cpu",
        tensors: Sequence[str] = (),
    ) -> None:
        self.outputs = tuple(dict.fromkeys([*(tensor.name for tensor in graph.outputs), *tensors]))
        self._stack = ExitStack()
        on = {"weight": w_quant, "activation": a_quant, "bias": w_quant and a_quant}
        solved = {**solution.qparams, **solution.bias_scales}
        uses = {
            (reader.node, reader.index): site
            for site in plan.sites
            if on[site.role] and site.key in solved
            for reader in site.readers
            if reader not in solution.unread
        }
        constants = solution.constants if w_quant else {}
        wanted = tuple(dict.fromkeys(tensors))
        self._build = _Build(graph, uses, solution, device, wanted, self._stack, constants)
        try:
            self._main = self._build.scope("", [t.name for t in graph.inputs], [t.name for t in graph.outputs])
        except BaseException:
            self._stack.close()
            raise

    def __call__(self, feeds: Mapping[str, Array], *, where: str = "this feed") -> dict[str, Any]:
        """Run the model and return the outputs and the requested tensors by name.

        Tensors of branches that did not run are missing.

        Args:
            where: name of the feed in messages.

        Raises:
            DataError: the model cannot run on these feeds.
        """
        tensors: dict[str, Any] = dict(feeds)
        self._main.run(tensors, where)
        return {name: tensors[name] for name in self.outputs if name in tensors}

    def close(self) -> None:
        """Free the sessions. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def forward(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    feeds: Mapping[str, Array],
    *,
    w_quant: bool = True,
    a_quant: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run one feed through a `Forward`; for many feeds keep a `Forward` open."""
    with Forward(graph, plan, solution, w_quant=w_quant, a_quant=a_quant, device=device) as run:
        return run(feeds)


class _Scope:
    """The main graph or a branch, in stages."""

    def __init__(
        self, stages: list[_Stage], outputs: list[str], held: Mapping[str, Array], qparams: Mapping[str, QParams]
    ) -> None:
        self.stages = stages
        self.outputs = outputs
        self._held = held  # outputs that are constants
        self._qparams = qparams

    def run(self, known: dict[str, Any], where: str) -> None:
        """Compute everything from the known tensors: graph inputs, and tensors of the enclosing scopes."""
        known.update(self._held)
        for stage in self.stages:
            if stage.run is not None:
                known.update(stage.run.run(known, stage.outputs, where=where))
            for key, name, rounded in stage.quantize:
                known[rounded] = fake_quant(self._qparams[key], known[name])
            for node, inner in stage.conditionals:
                branch = inner[bool(np.asarray(known[node.inputs[0].name]).item())]
                branch.run(known, where)
                for output, name in zip(node.outputs, branch.outputs, strict=True):
                    known[output.name] = known[name]


def fake_quant(qparams: QParams, x: Array) -> Array:
    """Quantize and dequantize `x`; the result has the type of `x`."""
    return qparams.fake_quant(x).astype(x.dtype)


@dataclass
class _Build:
    """Builds the stages of a scope."""

    graph: Graph
    uses: Uses
    solution: Solution
    device: str
    wanted: tuple[str, ...]
    stack: ExitStack
    constants: Mapping[str, Array]

    def scope(self, path: str, inputs: Sequence[str], outputs: Sequence[str]) -> _Scope:
        """Build the scope at `path` with these inputs and outputs."""
        body = next(scope for where, scope in scopes(self.graph) if where == path)
        local = {t.name for node in body.nodes for t in node.outputs}
        extra = [name for name in self.wanted if name in local and name not in outputs]
        computed = [name for name in [*outputs, *extra] if name in local]
        piece = extract(self.graph, inputs, computed, scope=path)
        replaced = self._replace(piece)
        stages = self._stages(piece, path, replaced)
        self._open(piece, stages, {*computed, *replaced})
        held = {t.name: value for t in body.outputs if (value := constant(t)) is not None}
        return _Scope(stages, list(outputs), held, self.solution.qparams)

    def _replace(self, piece: Graph) -> dict[str, list[tuple[str, str]]]:
        """Replace constants by dequantized ones and activations by new inputs, in place.

        Returns:
            For each activation, the (site key, new name) of its fake-quantized inputs.
        """
        new: dict[str, Tensor] = {}
        replaced: dict[str, list[tuple[str, str]]] = {}
        for node in piece.nodes:
            for index, tensor in enumerate(list(node.inputs)):
                site = self.uses.get((node.name, index))
                if site is None:
                    if isinstance(tensor, Constant) and tensor.name in self.constants:
                        node.inputs[index] = Constant(f"{tensor.name}/corrected", self.constants[tensor.name])
                    continue
                if site.key not in new:
                    name = f"{site.key}/fake_quant"
                    if isinstance(tensor, Constant):
                        values = self.solution.dequantized(site, dtype(tensor))
                        if values is None:  # a solution without codes: rounded to nearest
                            values = self.solution.qparams[site.key].fake_quant(tensor.values).astype(dtype(tensor))
                        new[site.key] = Constant(name, spill(values) if values.nbytes >= SPILL_BYTES else values)
                    else:
                        new[site.key] = Variable(name, tensor.dtype, tensor.shape)
                        piece.inputs.append(new[site.key])
                        replaced.setdefault(tensor.name, []).append((site.key, name))
                node.inputs[index] = new[site.key]
        return replaced

    def _stages(self, piece: Graph, path: str, replaced: Mapping[str, list[tuple[str, str]]]) -> list[_Stage]:
        """Assign nodes to stages in order: a node runs in the first stage in which all its inputs are known."""
        inner = {id(node): self._conditional(node, path) for node in piece.nodes if self._is_conditional(node)}
        ready: dict[str, int] = {}  # tensor → the stage after which, or in which, it is known

        def quantized(name: str) -> None:
            for _, new in replaced.get(name, ()):
                ready[new] = ready.get(name, 0) + 1

        for tensor in piece.inputs:
            quantized(tensor.name)
        stages: list[_Stage] = [_Stage()]
        for node in piece.nodes:
            at = max((ready.get(name, 0) for name in reads_of(node)), default=0)
            while len(stages) <= at + 1:
                stages.append(_Stage())
            if id(node) in inner:
                stages[at].conditionals.append((node, inner[id(node)]))
            else:
                stages[at].nodes.append(node)
            for output in node.outputs:
                ready[output.name] = at + int(id(node) in inner)
                quantized(output.name)
        for name, pairs in replaced.items():
            stages[ready.get(name, 0)].quantize.extend((key, name, new) for key, new in pairs)
        return stages

    def _is_conditional(self, node: Node) -> bool:
        """Return whether a tensor inside an If is quantized or requested, so that its branches run separately."""
        if node.op != "If":
            return False
        for _, body in bodies(node):
            for _, scope in scopes(body):
                for inside in scope.nodes:
                    if any((inside.name, index) in self.uses for index in range(len(inside.inputs))):
                        return True
                    if any(tensor.name in self.wanted for tensor in inside.outputs):
                        return True
        return False

    def _conditional(self, node: Node, path: str) -> dict[bool, _Scope]:
        """Build the branches of an If, by the value of the condition that selects them."""
        bodies_of: dict[bool, _Scope] = {}
        for attribute, body in bodies(node):
            scope = f"{path}/{node.name}/{attribute}" if path else f"{node.name}/{attribute}"
            inputs = [tensor.name for tensor in captured(body)]
            bodies_of[PICKED_BY[attribute]] = self.scope(scope, inputs, [tensor.name for tensor in body.outputs])
        return bodies_of

    def _open(self, piece: Graph, stages: list[_Stage], targets: set[str]) -> None:
        """Open the sessions; each outputs the tensors that later stages or the caller read."""
        index = tensors_by_name(piece)
        read: dict[str, set[int]] = {}
        for number, stage in enumerate(stages):
            for node in stage.nodes:
                for name in reads_of(node):
                    read.setdefault(name, set()).add(number)
            for node, _ in stage.conditionals:
                for name in reads_of(node):
                    read.setdefault(name, set()).add(-1)
        for number, stage in enumerate(stages):
            computed = [tensor.name for node in stage.nodes for tensor in node.outputs if tensor.name]
            stage.outputs = tuple(n for n in computed if n in targets or read.get(n, set()) - {number})
            if not stage.outputs:
                continue
            local = set(computed)
            inputs = dict.fromkeys(name for node in stage.nodes for name in reads_of(node) if name not in local)
            model = Graph(  # of the nodes of `piece` themselves, which nothing else uses
                stage.nodes,
                [index[name] for name in inputs],
                [index[name] for name in stage.outputs],
                name=piece.name,
                opset=piece.opset,
                import_domains=piece.import_domains,
                info=piece.info,
            )
            stage.run = self.stack.enter_context(
                LayerRunner(model, device=self.device, threads=1, optimisation="off", name="the fake-quantized forward")
            )
