"""Low-rank adapters (LoRA): weights stay frozen, and the product of two small matrices is trained for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from sbonnx.errors import ModelError, RecipeError
from sbonnx.linear.layer import channel_axes
from sbonnx.ops import CONVOLUTIONS, LINEAR
from sbonnx.planning import Site
from sbonnx.qat.fakequant import FakeQuant, quant_parameters
from sbonnx.qat.lora import ADAPTERS, Inside, LowRank, Outside, low_ranks
from sbonnx.qat.module import QUANTIZERS, origin_of, weight_parameter
from sbonnx.torchnet import Call
from sbonnx.torchnet.onnx_to_torch.fx_conversion import GET_ATTR
from sbonnx.torchnet.onnx_to_torch.operators import NodeModule
from sbonnx.torchnet.onnx_to_torch.reimport import NodeInput, parameter_name, site_of

Mode = Literal["inside", "outside"]

MODES: Final = ("inside", "outside")

FEWEST_AXES: Final = 2

SHOWN: Final = 4
"""Maximum number of differences that an error message lists."""


@dataclass(frozen=True)
class Adapters:
    """Which layers get an adapter, and what else is trained; all other parameters are frozen.

    Attributes:
        rank: rank of the product. A layer whose two factors have at least as many elements as its weight gets no
            adapter. None, with mode "inside": no limit, every value of the weight is trained.
        alpha: the product is multiplied by ``alpha / rank``; None: alpha is the rank.
        targets: one or more globs over names of weights; None: each linear layer whose weight is quantized.
        mode: "inside": the product is added to the weight before rounding (Bondarenko et al. 2024), so that the
            module computes the same as the exported file. "outside": a float branch parallel to the layer with its
            frozen quantized weight (Dettmers et al. 2023); the module must be merged before export.
        scales: train scales, zero points and clipping levels too; with "outside" only those of activations.
        norms: train biases and norms too.
        seed: seed of the factors that are initialized at random.

    Raises:
        RecipeError: an invalid value; the message names it.
    """

    rank: int | None = 8
    alpha: float | None = None
    targets: str | tuple[str, ...] | None = None
    mode: Mode = "inside"
    scales: bool = True
    norms: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank is not None and (isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1):
            raise RecipeError(f"'rank' of adapters must be a whole number of 1 or more, got {self.rank!r}")
        if self.rank is None and self.mode != "inside":
            raise RecipeError("adapters without a rank change whole weights: use mode 'inside'")
        if self.alpha is not None and not 0.0 < self.alpha < float("inf"):
            raise RecipeError(f"'alpha' of adapters must be positive and finite, got {self.alpha!r}")
        if self.mode not in MODES:
            raise RecipeError(f"'mode' of adapters must be inside or outside, got {self.mode!r}")

    @property
    def gain(self) -> float:
        """`alpha`, or the rank if it is None."""
        return float((self.rank or 1) if self.alpha is None else self.alpha)

    def unfit(self, rows: int, columns: int) -> str | None:
        """Return the reason why a weight of this size gets no adapter, or None."""
        if self.rank is None or self.rank * (rows + columns) < rows * columns:
            return None
        return f"has {rows} x {columns} elements, no more than the two factors"

    @property
    def globs(self) -> tuple[str, ...] | None:
        """`targets` as a tuple of globs, or None."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets


class AdapterTarget(NamedTuple):
    """A weight that can have an adapter.

    Attributes:
        initializer: name of the weight in the graph.
        weight: parameter of the module.
        axis: output axis, non-negative.
        reads: reads of the weight by linear layers.
    """

    initializer: str
    weight: Tensor
    axis: int
    reads: tuple[NodeInput, ...]


def add_adapters(module: fx.GraphModule, adapters: Adapters | int) -> tuple[str, ...]:
    """Freeze the parameters of `module` in place, add adapters to its weights and return the names of these weights.

    The outputs of the module do not change: the products are initialized to 0.

    Args:
        module: result of `prepare` or `trainable`, without adapters.
        adapters: configuration of the adapters, or only their rank.

    Raises:
        RecipeError: a glob matches no weight that can have an adapter (with the reasons), or no weight can have one.
        ModelError: the module was not made by `sbonnx.qat`, or already has adapters.
    """
    config = Adapters(rank=adapters) if isinstance(adapters, int) else adapters
    origin_of(module)
    if low_ranks(module):
        raise ModelError("the module has adapters already: merge them with sbonnx.qat.merge, or prepare it again")
    targets = _targets(module, config)
    module.requires_grad_(False)
    chance = torch.Generator().manual_seed(config.seed)
    for target in targets:
        _add(module, target, config, chance)
    module.graph.lint()
    module.recompile()
    for parameter in _trained_parameters(module, config):
        parameter.requires_grad_(True)
    return tuple(target.initializer for target in targets)


def _add(module: fx.GraphModule, target: AdapterTarget, config: Adapters, chance: torch.Generator) -> None:
    """Add an adapter, in place: between the weight and all its readers, or as a branch parallel to the layer."""
    name = parameter_name(module, target.initializer)
    shared = {"axis": target.axis, "chance": chance, "rank": config.rank, "alpha": config.gain}
    if config.mode == "inside":
        adapter: LowRank = Inside(target.weight, target.initializer, **shared)
        source = next(node for node in module.graph.nodes if node.op == GET_ATTR and node.target == name)
        arguments: tuple[fx.Node, ...] = (source,)
    else:
        source = target.reads[0].node
        adapter = Outside(target.weight, target.initializer, call=_call(module, target.reads[0]), **shared)
        arguments = (source, source.args[0])
    adapter.train(module.training)
    if not hasattr(module, ADAPTERS):
        module.add_submodule(ADAPTERS, nn.ModuleDict())
    module.add_submodule(f"{ADAPTERS}.{name}", adapter)
    with module.graph.inserting_after(source):
        call = module.graph.call_module(f"{ADAPTERS}.{name}", arguments)
    source.replace_all_uses_with(call, delete_user_cb=lambda reader: reader is not call)


def _trained_parameters(module: fx.GraphModule, config: Adapters) -> Iterator[nn.Parameter]:
    for _, parameter in adapter_parameters(module):
        yield parameter
    if config.scales:
        for name, parameter in quant_parameters(module):
            quantizer = module.get_submodule(name.rpartition(".")[0])
            if config.mode == "inside" or (isinstance(quantizer, FakeQuant) and quantizer.role == "activation"):
                yield parameter
    if config.norms:
        matrices = {parameter_name(module, initializer) for initializer in _quantized_weights(module)}
        for name, parameter in module.named_parameters():
            ours = name.startswith((f"{QUANTIZERS}.", f"{ADAPTERS}.")) or name in matrices
            if not ours and parameter.numel() == max(parameter.shape):
                yield parameter


def _targets(module: fx.GraphModule, config: Adapters) -> list[AdapterTarget]:
    targets: list[AdapterTarget] = []
    refused: dict[str, str] = {}
    for initializer, sites in _quantized_weights(module).items():
        if config.globs is not None and not any(fnmatchcase(initializer, glob) for glob in config.globs):
            continue
        target = _target(module, initializer, sites)
        reason = target if isinstance(target, str) else _unfit(module, target, config)
        if reason is not None:
            refused[initializer] = reason
        elif isinstance(target, AdapterTarget):
            targets.append(target)
    for glob in config.globs or ("*",):
        if any(fnmatchcase(target.initializer, glob) for target in targets):
            continue
        reasons = [f"'{name}' {reason}" for name, reason in refused.items() if fnmatchcase(name, glob)]
        why = "; ".join(reasons[:3]) if reasons else "no quantized weight has such a name"
        raise RecipeError(
            f"no weight that matches '{glob}' can have an adapter of rank {config.rank}: {why}. Use other targets, or "
            f"a lower rank"
        )
    return targets


def _quantized_weights(module: fx.GraphModule) -> dict[str, list[Site]]:
    weights: dict[str, list[Site]] = {}
    for sites in origin_of(module).sites.values():
        for site in sites:
            if site.role == "weight":
                weights.setdefault(site.tensor, []).append(site)
    return weights


def _target(module: fx.GraphModule, initializer: str, sites: list[Site]) -> AdapterTarget | str:
    weight = weight_parameter(module, sites[0])
    unread, reads, axes = origin_of(module).solution.unread, [], set()
    for reader in (reader for site in sites for reader in site.readers if reader not in unread):
        read = site_of(module, reader.node, reader.index)
        call = _call(module, read)
        if call.op not in LINEAR or reader.index != LINEAR[call.op].weight or weight.dim() < FEWEST_AXES:
            return f"is not a matrix of a linear layer: node '{reader.node}' ({call.op}) reads it"
        if call.op == "ConvTranspose" and call.integer("group", 1) > 1:
            return f"is of a grouped ConvTranspose ('{reader.node}')"
        reads.append(read)
        axes.add(channel_axes(call.op, call.attributes, weight.dim())[0] or 0)
    if len(axes) != 1:
        return "has readers with different output axes"
    return AdapterTarget(initializer, weight, axes.pop(), tuple(reads))


def _call(module: fx.GraphModule, read: NodeInput) -> Call:
    operator = module.get_submodule(str(read.node.target))
    assert isinstance(operator, NodeModule)
    return operator.call


def _unfit(module: fx.GraphModule, target: AdapterTarget, config: Adapters) -> str | None:
    outputs = target.weight.shape[target.axis]
    inputs = target.weight.numel() // max(outputs, 1)
    reason = config.unfit(outputs, inputs)
    if reason is not None or config.mode == "inside":
        return reason
    if len(target.reads) > 1:
        return f"is read by {len(target.reads)} layers, and mode 'outside' supports one"
    call = _call(module, target.reads[0])
    grouped = call.op in CONVOLUTIONS and call.integer("group", 1) > 1
    if grouped or call.op == "ConvTranspose":
        return f"is of a {call.op} with {call.integer('group', 1)} groups, which only mode 'inside' supports"
    if call.op == "MatMul" and target.weight.dim() != FEWEST_AXES:
        return f"is a stack of matrices of shape {tuple(target.weight.shape)}, which only mode 'inside' supports"
    return None


def adapter_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the factors of all adapters as (dotted name, parameter); empty if there are none."""
    return [
        (f"{path}.{name}" if path else name, parameter)
        for path, part in module.named_modules()
        if isinstance(part, LowRank)
        for name, parameter in part.named_parameters(recurse=False)
    ]


def adapter_state(module: nn.Module, *, beside: bool = True) -> dict[str, Tensor]:
    """Return the trained tensors as a small dict on the CPU, for `torch.save` and `load_adapters`.

        adapters.<weight>.A, .B, .unit    of each adapter (see `sbonnx.qat.lora.LowRank`)
        <name of the parameter>           other trained parameters: scales, biases, norms

    Args:
        beside: include the other trained parameters; False: the adapters only.

    Raises:
        ModelError: the module has no adapters.
    """
    return {name: value.detach().cpu().clone() for name, value in _state(module, beside=beside).items()}


def load_adapters(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state of `adapter_state` in place. The adapters must be of the same weights and ranks.

    Args:
        state: complete, or of the adapters only; then scales, biases and norms stay unchanged.

    Raises:
        ModelError: the module has no adapters, or names or shapes differ. One message names all differences, and
            nothing is changed.
    """
    alone = _state(module, beside=False)
    wanted = alone if set(state) == set(alone) else _state(module, beside=True)
    wrong = [f"'{name}' is missing" for name in wanted if name not in state]
    wrong += [f"the module has no '{name}'" for name in state if name not in wanted]
    wrong += [
        f"'{name}' is {tuple(state[name].shape)}, and {tuple(value.shape)} in the module"
        for name, value in wanted.items()
        if name in state and state[name].shape != value.shape
    ]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ModelError(
            f"these adapters are of another module: {'; '.join(wrong[:SHOWN])}{more}. Prepare the module from the "
            f"same model with the same targets, rank and methods"
        )
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(state[name])


def _state(module: nn.Module, *, beside: bool) -> dict[str, Tensor]:
    inner = getattr(module, "module", module)
    parts = {path: part for path, part in inner.named_modules() if isinstance(part, LowRank)}
    if not parts:
        raise ModelError("the module has no adapters: make it with sbonnx.qat.prepare(..., adapters=8)")
    state = inner.state_dict(keep_vars=True)
    tensors = {f"{path}.{name}": state[f"{path}.{name}"] for path, part in parts.items() for name in part.state_dict()}
    if beside:
        tensors |= {name: value for name, value in inner.named_parameters() if value.requires_grad}
    return tensors
