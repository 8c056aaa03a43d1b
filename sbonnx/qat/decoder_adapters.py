"""Low-rank adapters on decoders with quantized weights (QLoRA): training, and float branches in the file.

With mode "outside" the base stays as it is quantized. Each linear layer with stored quantized values gets a parallel
float branch:

    y = x W_q + x D,   D = alpha / rank * m * (B A)

With mode "inside" the quantized values change instead; see `sbonnx.qat.requantized`.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", equation 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from sbonnx.errors import ModelError, RecipeError
from sbonnx.graph import Body, Constant, Graph, Node, Variable
from sbonnx.graph.edit import Names, add_constant, add_node, replace_output, sort
from sbonnx.graph.query import all_nodes, constant, producer, scopes, tensors_by_name
from sbonnx.ops import CONTRIB
from sbonnx.precision import widened
from sbonnx.progress import Progress
from sbonnx.qat.adapters import Adapters, Mode, adapter_parameters
from sbonnx.qat.lora import ADAPTERS, LowRank, Outside, low_ranks
from sbonnx.qat.requantized import PACKED, Requantized, requantized_nodes, write_values
from sbonnx.spec import Array, QuantSpec
from sbonnx.torchnet import FUNCTIONS, Call, compute
from sbonnx.torchnet.onnx_to_torch.fx_conversion import GET_ATTR
from sbonnx.torchnet.onnx_to_torch.operators import NodeModule
from sbonnx.torchnet.onnx_to_torch.reimport import CALL_MODULE, META, reimport
from sbonnx.torchnet.onnx_to_torch.write_back import write_parameters
from sbonnx.torchnet.ops.decoders import nbits_matrix
from sbonnx.training import loop
from sbonnx.training.batches import Augment
from sbonnx.training.distillation import Outputs, divergence
from sbonnx.training.loop import Objective, Settings, Trained

PLAIN: Final = ("MatMul", "Gemm")
DEQUANTIZE: Final = "DequantizeLinear"
SCALES: Final = {PACKED: 2, "GatherBlockQuantized": 2, DEQUANTIZE: 1}
"""Input with the scales, by op."""

DEFAULTS: Final = Settings(epochs=4, batch=8, lr=0.05)
"""Settings of the training of decoders."""

WHOLE: Final = Settings(epochs=12, batch=8, lr=0.1)
"""Settings of the training of whole weights."""

RESAMPLED: Final = 0.3
"""Share of tokens that are resampled in the training of whole weights."""


def adapted(
    graph: Graph,
    adapters: Adapters | int,
    *,
    device: str = "cpu",
    fixed: Mapping[str, Any] | None = None,
    mode: Mode = "outside",
    norms: bool = True,
    teacher: Graph | None = None,
) -> fx.GraphModule:
    """Import a decoder with quantized weights and add an adapter to each of its linear layers.

    Layers are MatMulNBits, and MatMul and Gemm with a DequantizeLinear of stored values. The module computes the same
    as the graph, in float32: the products are initialized to 0. Only adapters and, if `Adapters.norms`, biases and
    norms are trainable.

    Args:
        graph: the decoder, of any float type; not changed.
        adapters: configuration, or only the rank.
        device: torch device of the module.
        fixed: inputs that become constants, such as the one that selects the branch of a merged decoder.
        mode, norms: fields of `Adapters`, if only the rank is given.
        teacher: the float decoder; updates without a rank start near its weights (`Requantized.start_near`).

    Raises:
        ModelError: an op is not supported, or activations are quantized.
        RecipeError: no weight that matches `targets` can have an adapter.
    """
    config = Adapters(adapters, mode=mode, norms=norms) if isinstance(adapters, int) else adapters
    _require_float_activations(graph)
    module = reimport(widened(graph), device=device, fixed=fixed)
    module.requires_grad_(False)
    module.add_submodule(ADAPTERS, nn.ModuleDict())
    chance = torch.Generator().manual_seed(config.seed)
    refused: dict[str, str] = {}
    paths: dict[str, str] = {}
    floats = {} if teacher is None else _float_weights(graph, teacher)
    for node in list(module.graph.nodes):
        layer = _layer(module, node)
        if layer is None or (config.globs is not None and not any(fnmatchcase(layer.name, g) for g in config.globs)):
            continue
        if layer.name not in paths:
            reason = _unfit(module, layer, config)
            if reason is not None:
                refused[layer.name] = reason
                continue
            paths[layer.name] = f"{ADAPTERS}.{node.target}"
            adapter = _adapter(layer, graph, config, chance)
            module.add_submodule(paths[layer.name], adapter)
            weight = floats.get(layer.call.name)
            if isinstance(adapter, Requantized) and config.rank is None and weight is not None:
                stored = [_stored(module, value) for value in node.args[1:4]]
                adapter.start_near(torch.from_numpy(weight).to(device), *(x for x in stored if x is not None))
        _insert(module, node, layer, paths[layer.name], config)
    module.graph.eliminate_dead_code()
    _make_parameters(module)
    if not paths:
        why = "; ".join(f"'{name}' {reason}" for name, reason in list(refused.items())[:3])
        raise RecipeError(
            f"no quantized weight can have an adapter of rank {config.rank}: "
            f"{why or 'the decoder has none with such a name: quantize it with sbonnx llm quantize'}"
        )
    module.graph.lint()
    module.recompile()
    for _, parameter in adapter_parameters(module):
        parameter.requires_grad_(True)
    for parameter in changed_scales(module) if config.scales else ():
        parameter.requires_grad_(True)
    for parameter in _norms(module, graph) if config.norms else ():
        parameter.requires_grad_(True)
    return module.eval()


def _require_float_activations(graph: Graph) -> None:
    for node in all_nodes(graph):
        if node.op == "QuantizeLinear":
            raise ModelError(
                f"node '{node.name}' quantizes activations, through which nothing can be trained: give a decoder with "
                "float activations (sbonnx llm quantize)"
            )


def _float_weights(graph: Graph, teacher: Graph) -> dict[str, Array]:
    """Return the float weights of packed products, (N, K) in float32, by node; layers are matched by their outputs."""
    makers = {output.name: node for node in all_nodes(teacher) for output in node.outputs}
    weights = {}
    for node in all_nodes(graph):
        maker = makers.get(node.outputs[0].name) if node.op == PACKED else None
        if maker is None or maker.op not in PLAIN:
            continue
        stored = constant(maker.inputs[1])
        if stored is not None and stored.ndim == 2:
            matrix = np.asarray(stored, np.float32) * np.float32(maker.attrs.get("alpha", 1.0))
            weights[node.name] = matrix if maker.attrs.get("transB", 0) else np.ascontiguousarray(matrix.T)
    return weights


class _QuantizedLayer(NamedTuple):
    """Linear layer with stored quantized values: their name, and the dequantized weight with its output axis.

    `reads` dequantizes: the layer itself, or a DequantizeLinear.
    """

    name: str
    call: Call
    weight: Tensor
    axis: int
    reads: fx.Node
    codes: fx.Node
    dequantizes: Call


def _adapter(layer: _QuantizedLayer, graph: Graph, config: Adapters, chance: torch.Generator) -> LowRank:
    options: dict[str, Any] = {"axis": layer.axis, "rank": config.rank, "alpha": config.gain, "chance": chance}
    if config.mode == "outside":
        return Outside(layer.weight, layer.name, call=layer.call, **options)
    part = layer.call
    if part.op == PACKED:
        limits = (0, (1 << part.integer("bits", 4)) - 1)
    else:
        kind = np.dtype(tensors_by_name(graph)[layer.name].dtype).name  # such as int4
        spec = QuantSpec(bits=int(kind.lstrip("uint")), signed=not kind.startswith("u"), symmetric=False)
        limits = (spec.qmin, spec.qmax)
    return Requantized(layer.weight, layer.name, call=layer.dequantizes, limits=limits, **options)


def _insert(module: fx.GraphModule, node: fx.Node, layer: _QuantizedLayer, path: str, config: Adapters) -> None:
    """Insert the call of an adapter: after the layer, or in place of what dequantizes."""
    place = node if config.mode == "outside" else layer.reads
    with module.graph.inserting_after(place):
        call = module.graph.call_module(path, (node, node.args[0]) if config.mode == "outside" else place.args)
    place.replace_all_uses_with(call, delete_user_cb=lambda reader: reader is not call)


def _layer(module: fx.GraphModule, node: fx.Node) -> _QuantizedLayer | None:
    call = _call(module, node)
    if call is None:
        return None
    if call.op == PACKED and call.domain == CONTRIB:
        codes, scales, zero_points = [_stored(module, arg) for arg in (*node.args, None)[1:4]]
        omitted = len(node.args) < 4 or node.args[3] is None
        if codes is None or scales is None or not (omitted or zero_points is not None):
            return None
        weight = nbits_matrix(call, codes, scales, zero_points)
        return _QuantizedLayer(_source(module, node.args[1]), call, weight, 0, node, node.args[1], call)
    given = node.args[1] if call.op in PLAIN and len(node.args) > 1 else None
    if isinstance(given, fx.Node) and not call.integer("transA", 0):
        inner = _call(module, given)
        if inner is None or inner.op != DEQUANTIZE:
            return None
        stored = [_stored(module, arg) for arg in given.args]
        if stored[0] is None or stored[0].is_floating_point() or stored[0].dim() != 2 or stored[1] is None:
            return None
        weight = compute(FUNCTIONS[DEQUANTIZE], inner, stored)
        axis = 1 - call.integer("transB", 0)
        return _QuantizedLayer(_source(module, given.args[0]), call, weight, axis, given, given.args[0], inner)
    return None


def _call(module: fx.GraphModule, node: fx.Node) -> Call | None:
    part = module.get_submodule(str(node.target)) if node.op == CALL_MODULE else None
    return part.call if isinstance(part, NodeModule) else None


def _stored(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Return a parameter or buffer; None for a computed tensor, or none."""
    if not isinstance(node, fx.Node) or node.op != GET_ATTR:
        return None
    value: Tensor = getattr(module, str(node.target)).detach()
    return value


def _source(module: fx.GraphModule, node: Any) -> str:
    """Return the name in the graph of a stored tensor."""
    meta, name = module.meta[META], str(node.target)
    return str(meta["buffers"].get(name) or meta["parameters"].get(name, ""))


def _unfit(module: fx.GraphModule, layer: _QuantizedLayer, config: Adapters) -> str | None:
    reason = config.unfit(*layer.weight.shape)
    if reason is not None:
        return reason
    readers = [_call(module, reader) for reader in _readers(module, layer.codes)]
    if config.mode == "inside" and any(call is None or call.op not in (PACKED, *PLAIN) for call in readers):
        return "is read by other nodes than linear layers, such as those of a tied embedding"
    return None


def _readers(module: fx.GraphModule, codes: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read stored values, directly or through a DequantizeLinear."""
    for user in codes.users:
        call = _call(module, user)
        yield from user.users if call is not None and call.op == DEQUANTIZE else (user,)


def _make_parameters(module: fx.GraphModule) -> None:
    """Turn the scales of changed weights into parameters; those of Q/DQ are imported as buffers."""
    meta = module.meta[META]
    for _, _, inputs in requantized_nodes(module):
        name = str(inputs[1].target)
        if name in meta["buffers"]:
            values = module.get_buffer(name)
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(values, requires_grad=False))
            meta["parameters"][name] = meta["buffers"].pop(name)


def changed_scales(module: fx.GraphModule) -> list[nn.Parameter]:
    """Return the scales of the weights whose quantized values change."""
    stored = [inputs[1] for _, _, inputs in requantized_nodes(module)]
    return [module.get_parameter(name) for name in dict.fromkeys(str(scale.target) for scale in stored)]


def _norms(module: fx.GraphModule, graph: Graph) -> list[nn.Parameter]:
    """Return the biases and norms that every branch of the graph reads, and that can be written back."""
    scales = {
        str(node.args[SCALES[call.op]].target)
        for node in module.graph.nodes
        if (call := _call(module, node)) is not None and call.op in SCALES
    }
    scales |= {str(inputs[1].target) for _, _, inputs in requantized_nodes(module)}
    bodies = [{id(tensor) for node in body.nodes for tensor in node.inputs} for path, body in scopes(graph) if path]
    tensors = tensors_by_name(graph)
    parameters = []
    for name, parameter in module.named_parameters():
        if name.startswith(f"{ADAPTERS}.") or name in scales or parameter.numel() != max(parameter.shape):
            continue
        tensor = tensors.get(module.meta[META]["parameters"].get(name))
        alike = isinstance(tensor, Constant) and tuple(tensor.shape) == tuple(parameter.shape)
        if alike and len({id(tensor) in read for read in bodies}) <= 1:
            parameters.append(parameter)
    return parameters


def write_adapters(graph: Graph, module: fx.GraphModule, *, inputs: bool = False) -> dict[str, Array]:
    """Write the adapters of `adapted` into its graph, in place: two MatMul and an Add after each layer, or new values.

    Biases, norms and scales get the values of the module. Everything else is unchanged.

    Args:
        graph: the graph that the module was made from.
        module: result of `adapted`, trained or not.
        inputs: write factors of rank 0, whose product is 0: the values are inputs of the decoder. Mode "outside".

    Returns:
        The factors by name of the constant: A (inputs, rank) and B (rank, outputs) of each adapter.
    """
    write_parameters(graph, module)
    write_values(graph, module)
    branches = {name: adapter for name, adapter in low_ranks(module).items() if isinstance(adapter, Outside)}
    names = Names(graph)
    constants: dict[str, tuple[Constant, Constant]] = {}
    factors: dict[str, Array] = {}
    for _, body in list(scopes(graph)):
        for node in list(body.nodes):
            codes = _codes(node)
            adapter = None if codes is None else branches.get(codes.name)
            if adapter is None or codes is None:
                continue
            if codes.name not in constants:
                kind = np.dtype(node.outputs[0].dtype or np.float32)
                sides, gain = [], float(node.attrs.get("alpha", 1.0))  # of a Gemm
                for side, matrix in (("A", adapter.A), ("B", gain * adapter.unit * adapter.B)):
                    values = np.ascontiguousarray(matrix.detach().float().cpu().numpy().T).astype(kind)
                    empty = values[:, :0] if side == "A" else values[:0]
                    stored = add_constant(graph, _factor_name(node, side), empty if inputs else values, names)
                    factors[stored.name] = values
                    sides.append(stored)
                constants[codes.name] = (sides[0], sides[1])
            y = node.outputs[0]
            base = Variable(names.fresh(f"{y.name}/base"), y.dtype, y.shape)
            replace_output(node, 0, base)
            inner = _product(body, names, f"{node.name}/lora_A", node.inputs[0], constants[codes.name][0])
            side_output = _product(body, names, f"{node.name}/lora_B", inner, constants[codes.name][1])
            add_node(body, "Add", [base, side_output], names=names, stem=f"{node.name}/lora_Add", outputs=[y])
    sort(graph)
    return factors


def _codes(node: Node) -> Constant | None:
    """Return the stored values of a linear layer with quantized weight."""
    tensor = None
    if node.op == PACKED:
        tensor = node.inputs[1]
    elif node.op in PLAIN:
        maker = producer(node.inputs[1])
        tensor = maker.inputs[0] if maker is not None and maker.op == DEQUANTIZE else None
    return tensor if isinstance(tensor, Constant) else None


def _factor_name(node: Node, side: str) -> str:
    """Return the name of a factor as onnxruntime-genai's builder forms it: model.layers.0.attn.o_proj.lora_A.weight."""
    parts = [part for part in str(node.name).split("/") if part]
    parts = parts[:-1] if len(parts) > 1 and parts[-1].startswith("MatMul") else parts
    return ".".join([*parts, f"lora_{side}", "weight"])


def _product(body: Body, names: Names, stem: str, x: Any, matrix: Constant) -> Any:
    """Add ``x @ matrix`` to a scope and return its output."""
    node: Node = add_node(body, "MatMul", [x, matrix], names=names, stem=f"{stem}/MatMul")
    node.outputs[0].dtype = matrix.dtype
    rank_0 = 0 in matrix.shape
    node.outputs[0].shape = None if x.shape is None or rank_0 else (*x.shape[:-1], matrix.shape[1])
    return node.outputs[0]


def train_adapters(  # noqa: PLR0913 - network, data, loss and settings of one training
    module: fx.GraphModule,
    feeds: Iterable[Mapping[str, Array]],
    *,
    tokens: str,
    logits: str,
    teacher: Graph | None = None,
    fixed: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    resampled: float = 0.0,
) -> Trained:
    """Train the adapters of `adapted`, in place.

    The loss is the mean Kullback-Leibler divergence of the predicted distributions from those of `teacher`, or, without
    a teacher, the mean negative log likelihood of the next token.

    Args:
        module: result of `adapted`.
        feeds: inputs of the decoder by name, one window of tokens each, with empty caches.
        tokens, logits: names of the input with the token ids and of the output.
        teacher: the float decoder, with the same inputs.
        fixed: inputs of the teacher that become constants; see `adapted`. Feeds need no values for them.
        settings: default: `DEFAULTS`.
        progress: progress display.
        resampled: share of the tokens of a batch that are replaced by samples of what the teacher predicts there.

    Raises:
        ModelError: the teacher has an op that is not supported, or other inputs.
        NumericError: the loss is NaN or infinite.
    """
    names = {source: name for name, source in module.meta[META]["inputs"].items()}
    if teacher is None:
        objective = Objective(_targets(names[tokens]), _next_token(logits), agree={"loss": "next token"})
    else:
        given = {tensor.name for tensor in teacher.inputs} - set(fixed or {})
        if given != set(names):
            other = sorted(given ^ set(names))
            raise ModelError(f"the two decoders have different inputs ({', '.join(other)}): use exports of one form")
        device = next(module.parameters()).device
        twin = reimport(widened(teacher), device=device, fixed=fixed).eval().requires_grad_(False)
        theirs = {names[source]: name for name, source in twin.meta[META]["inputs"].items()}

        def wanted(**batch: Tensor) -> Mapping[str, Tensor]:
            return {logits: twin(**{theirs[name]: value for name, value in batch.items()})[logits]}

        augment = _resampling(wanted, names[tokens], logits, resampled) if resampled else None
        objective = Objective(wanted, _divergence(logits), augment=augment, agree={"loss": "divergence"})
    renamed = [
        {names[name]: _wide(values) for name, values in feed.items() if name not in (fixed or {})} for feed in feeds
    ]
    quant = [scales for scales in changed_scales(module) if scales.requires_grad]
    return loop.train(module, renamed, objective, settings or DEFAULTS, quant=quant, progress=progress)


def _wide(values: Array) -> Array:
    """Return floats as float32, the type of the module; integers as they are."""
    return values if values.dtype.kind in "iub" else values.astype(np.float32)


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


def _resampling(teacher: Callable[..., Outputs], tokens: str, logits: str, share: float) -> Augment:
    """Return an augmentation that replaces tokens by samples of the teacher's prediction from the given tokens."""

    def augment(batch: dict[str, Tensor], chance: torch.Generator) -> dict[str, Tensor]:
        ids = batch[tokens]
        with torch.no_grad():
            rows = teacher(**batch)[logits][:, :-1].float().softmax(-1).cpu()
        drawn = torch.multinomial(rows.flatten(0, 1), 1, generator=chance).reshape(rows.shape[:2]).to(ids)
        chosen = (torch.rand(rows.shape[:2], generator=chance) < share).to(ids.device)
        return {**batch, tokens: torch.cat([ids[:, :1], torch.where(chosen, drawn, ids[:, 1:])], dim=1)}

    return augment


def _divergence(logits: str) -> Callable[[Outputs, Outputs], Tensor]:
    def loss(outputs: Outputs, targets: Outputs) -> Tensor:
        return divergence(outputs[logits].flatten(0, 1).float(), targets[logits].flatten(0, 1).float())

    return loss
