"""Low-rank adapters on decoders with packed weights (QLoRA): training, and float branches in the file.

The base stays as it is quantized. Each MatMulNBits gets a parallel float branch:

    y = x W_q + x D,   D = alpha / rank * m * (B A)

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", equation 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx, nn

from sbonnx.errors import ModelError, RecipeError
from sbonnx.graph import Graph, Node, Variable
from sbonnx.graph.edit import Names, add_constant, add_node, replace_output, sort
from sbonnx.graph.query import node_by_name
from sbonnx.ops import CONTRIB
from sbonnx.progress import Progress
from sbonnx.qat.adapters import Adapters, adapter_parameters
from sbonnx.qat.lora import ADAPTERS, Outside, low_ranks
from sbonnx.qat.onnx_to_torch.importer import GET_ATTR
from sbonnx.qat.onnx_to_torch.operators import NodeModule
from sbonnx.qat.onnx_to_torch.reimport import CALL_MODULE, META, reimport
from sbonnx.qat.onnx_to_torch.write_back import write_parameters
from sbonnx.qat.training import loop
from sbonnx.qat.training.distillation import Outputs, divergence
from sbonnx.qat.training.loop import Objective, Settings, Trained
from sbonnx.spec import Array
from sbonnx.torchnet import Call
from sbonnx.torchnet.ops.decoders import nbits_matrix

PACKED: Final = "MatMulNBits"
SCALES: Final = {PACKED: 2, "GatherBlockQuantized": 2}
"""Input with the scales, by op."""

DEFAULTS: Final = Settings(epochs=4, batch=8, lr=0.05)
"""Settings of the training of decoders."""


def branched(graph: Graph, adapters: Adapters | int, *, device: str = "cpu") -> fx.GraphModule:
    """Import a decoder with packed weights and add an adapter to each of its MatMulNBits.

    The module computes the same as the graph: the products are initialized to 0. Only adapters and, if
    `Adapters.norms`, biases and norms are trainable.

    Args:
        graph: the decoder; not changed.
        adapters: configuration with mode "outside", or only the rank.
        device: torch device of the module.

    Raises:
        ModelError: an op is not supported, or the decoder is not of float32.
        RecipeError: mode "inside", or no weight that matches `targets` can have an adapter.
    """
    config = Adapters(adapters, mode="outside") if isinstance(adapters, int) else adapters
    if config.mode != "outside":
        raise RecipeError("adapters on packed weights are branches in the file: use mode 'outside'")
    module = reimport(graph, device=device)
    module.requires_grad_(False)
    module.add_submodule(ADAPTERS, nn.ModuleDict())
    chance = torch.Generator().manual_seed(config.seed)
    refused: dict[str, str] = {}
    scales: set[str] = set()
    for node in list(module.graph.nodes):
        call = _call(module, node)
        if call is None or call.op not in SCALES or call.domain != CONTRIB:
            continue
        scales.add(str(node.args[SCALES[call.op]].target))
        if call.op != PACKED:
            continue
        name = module.meta[META]["buffers"].get(str(node.args[1].target), "")
        if config.globs is not None and not any(fnmatchcase(name, glob) for glob in config.globs):
            continue
        reason = _add_branch(module, node, call, name, config, chance)
        if reason is not None:
            refused[name] = reason
    if not low_ranks(module):
        why = "; ".join(f"'{name}' {reason}" for name, reason in list(refused.items())[:3])
        raise RecipeError(
            f"no packed weight can have an adapter of rank {config.rank}: "
            f"{why or 'the decoder has no MatMulNBits with such a name: quantize it with sbonnx llm quantize'}"
        )
    module.graph.lint()
    module.recompile()
    for _, parameter in adapter_parameters(module):
        parameter.requires_grad_(True)
    for name, parameter in module.named_parameters() if config.norms else ():
        if parameter.numel() == max(parameter.shape) and name not in scales and not name.startswith(f"{ADAPTERS}."):
            parameter.requires_grad_(True)
    return module.eval()


def _call(module: fx.GraphModule, node: fx.Node) -> Call | None:
    part = module.get_submodule(str(node.target)) if node.op == CALL_MODULE else None
    return part.call if isinstance(part, NodeModule) else None


def _add_branch(
    module: fx.GraphModule, node: fx.Node, call: Call, name: str, config: Adapters, chance: torch.Generator
) -> str | None:
    """Add an adapter to one MatMulNBits, in place; return the reason if it cannot have one."""
    stored = [None if arg is None else _stored(module, arg) for arg in (*node.args, None)[1:4]]
    codes, scales, zero_points = stored
    if codes is None or scales is None or (zero_points is None and len(node.args) > 3 and node.args[3] is not None):
        return "is computed in the graph, not stored"
    if scales.dtype != torch.float32:
        raise ModelError(
            f"the scales of node '{call.name}' are {str(scales.dtype).removeprefix('torch.')}, and adapters are "
            "trained in float32: export the decoder in float32"
        )
    if name in low_ranks(module):
        return "is read by several nodes, of which one has an adapter"
    weight = nbits_matrix(call, codes, scales, zero_points)
    rows, columns = weight.shape
    if config.rank * (rows + columns) >= rows * columns:
        return f"has {rows} x {columns} elements, no more than the two factors"
    adapter = Outside(weight, name, call=call, axis=0, rank=config.rank, alpha=config.gain, chance=chance)
    path = f"{ADAPTERS}.{node.target}"
    module.add_submodule(path, adapter)
    with module.graph.inserting_after(node):
        branch = module.graph.call_module(path, (node, node.args[0]))
    node.replace_all_uses_with(branch, delete_user_cb=lambda reader: reader is not branch)
    return None


def _stored(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return a parameter or buffer; None for a computed tensor."""
    value: Tensor | None = getattr(module, str(node.target)).detach() if node.op == GET_ATTR else None
    return value


def write_branches(graph: Graph, module: fx.GraphModule) -> None:
    """Write the adapters of `branched` into its graph, in place: two MatMul and an Add after each MatMulNBits.

    Biases and norms get the values of the module. Everything else is unchanged.

    Args:
        graph: the graph that the module was made from.
        module: result of `branched`, trained or not.
    """
    write_parameters(graph, module)
    nodes, names = node_by_name(graph), Names(graph)
    for adapter in low_ranks(module).values():
        assert isinstance(adapter, Outside)
        node = nodes[adapter.call.name]
        y = node.outputs[0]
        base = Variable(names.fresh(f"{y.name}/base"), y.dtype, y.shape)
        replace_output(node, 0, base)
        inner = _product(graph, names, f"{node.name}/lora_A", node.inputs[0], adapter.A)
        side = _product(graph, names, f"{node.name}/lora_B", inner, adapter.unit * adapter.B)
        add_node(graph, "Add", [base, side], names=names, stem=f"{node.name}/lora_Add", outputs=[y])
    sort(graph)


def _product(graph: Graph, names: Names, stem: str, x: Any, matrix: Tensor) -> Any:
    """Add ``x @ matrix.T`` to the graph and return its output; the matrix (outputs, inputs) is stored transposed."""
    values = np.ascontiguousarray(matrix.detach().float().cpu().numpy().T)
    constant = add_constant(graph, f"{stem}/weight", values, names)
    node: Node = add_node(graph, "MatMul", [x, constant], names=names, stem=f"{stem}/MatMul")
    node.outputs[0].dtype = np.dtype(np.float32)
    node.outputs[0].shape = None if x.shape is None else (*x.shape[:-1], values.shape[1])
    return node.outputs[0]


def train_branches(
    module: fx.GraphModule,
    feeds: Iterable[Mapping[str, Array]],
    *,
    tokens: str,
    logits: str,
    teacher: Graph | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train the adapters of `branched`, in place.

    The loss is the mean Kullback-Leibler divergence of the predicted distributions from those of `teacher`, or, without
    a teacher, the mean negative log likelihood of the next token.

    Args:
        module: result of `branched`.
        feeds: inputs of the decoder by name, one window of tokens each, with empty caches.
        tokens, logits: names of the input with the token ids and of the output.
        teacher: the float decoder, with the same inputs.
        settings: default: `DEFAULTS`.
        progress: progress display.

    Raises:
        ModelError: the teacher has an op that is not supported, or other inputs.
        NumericError: the loss is NaN or infinite.
    """
    names = {source: name for name, source in module.meta[META]["inputs"].items()}
    if teacher is None:
        objective = Objective(_targets(names[tokens]), _next_token(logits), agree={"loss": "next token"})
    else:
        given = {tensor.name for tensor in teacher.inputs}
        if given != set(names):
            other = sorted(given ^ set(names))
            raise ModelError(f"the two decoders have different inputs ({', '.join(other)}): use exports of one form")
        device = next(module.parameters()).device
        twin = reimport(teacher, device=device).eval().requires_grad_(False)
        theirs = {names[source]: name for name, source in twin.meta[META]["inputs"].items()}

        def wanted(**batch: Tensor) -> Mapping[str, Tensor]:
            return {logits: twin(**{theirs[name]: value for name, value in batch.items()})[logits]}

        objective = Objective(wanted, _divergence(logits), agree={"loss": "divergence"})
    renamed = [{names[name]: value for name, value in feed.items()} for feed in feeds]
    return loop.train(module, renamed, objective, settings or DEFAULTS, progress=progress)


def _targets(name: str) -> Callable[..., Outputs]:
    def targets(**batch: Tensor) -> Outputs:
        return {"tokens": batch[name]}

    return targets


def _next_token(logits: str) -> Callable[[Outputs, Outputs], Tensor]:
    def loss(outputs: Outputs, targets: Outputs) -> Tensor:
        scores = outputs[logits][:, :-1].flatten(0, 1).float()
        value: Tensor = nn.functional.cross_entropy(scores, targets["tokens"][:, 1:].flatten().long())
        return value

    return loss


def _divergence(logits: str) -> Callable[[Outputs, Outputs], Tensor]:
    def loss(outputs: Outputs, targets: Outputs) -> Tensor:
        return divergence(outputs[logits].flatten(0, 1).float(), targets[logits].flatten(0, 1).float())

    return loss
