"""Low-rank adapters (LoRA): weights stay frozen, and the product of two small matrices is trained for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from sbonnx.errors import ModelError, RecipeError
from sbonnx.ops import CONVOLUTIONS, LINEAR
from sbonnx.plan import Site
from sbonnx.qat.adapters.lora import Inside, LowRank, Outside, low_ranks
from sbonnx.qat.fakequant import FakeQuant, quant_parameters
from sbonnx.qat.module import QUANTIZERS, origin_of, weight_parameter
from sbonnx.qat.onnx_to_torch.operators import Op
from sbonnx.qat.onnx_to_torch.reimport import HELD, Read, parameter_name, site_of

Mode = Literal["inside", "outside"]

MODES: Final = ("inside", "outside")

ADAPTERS: Final = "adapters"
"""Name of the submodule that holds the adapters."""

FEWEST_AXES: Final = 2


@dataclass(frozen=True)
class Adapters:
    """Which layers get an adapter, and what else is trained; all other parameters are frozen.

    Attributes:
        rank: rank of the product. A layer whose two factors have at least as many elements as its weight gets no
            adapter.
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

    rank: int = 8
    alpha: float | None = None
    targets: str | tuple[str, ...] | None = None
    mode: Mode = "inside"
    scales: bool = True
    norms: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise RecipeError(f"'rank' of adapters must be a whole number of 1 or more, got {self.rank!r}")
        if self.alpha is not None and not 0.0 < self.alpha < float("inf"):
            raise RecipeError(f"'alpha' of adapters must be positive and finite, got {self.alpha!r}")
        if self.mode not in MODES:
            raise RecipeError(f"'mode' of adapters must be inside or outside, got {self.mode!r}")

    @property
    def gain(self) -> float:
        """`alpha`, or the rank if it is None."""
        return float(self.rank if self.alpha is None else self.alpha)

    @property
    def globs(self) -> tuple[str, ...] | None:
        """`targets` as a tuple of globs, or None."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets


class Target(NamedTuple):
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
    reads: tuple[Read, ...]


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
    wishes = Adapters(rank=adapters) if isinstance(adapters, int) else adapters
    origin_of(module)
    if low_ranks(module):
        raise ModelError("the module has adapters already: merge them with sbonnx.qat.merge, or prepare it anew")
    chosen = _chosen(module, wishes)
    module.requires_grad_(False)
    chance = torch.Generator().manual_seed(wishes.seed)
    for target in chosen:
        (_add_inside if wishes.mode == "inside" else _add_outside)(module, target, wishes, chance)
    module.graph.lint()
    module.recompile()
    for parameter in _trained_beside(module, wishes):
        parameter.requires_grad_(True)
    return tuple(target.initializer for target in chosen)


def _add_inside(module: fx.GraphModule, target: Target, wishes: Adapters, chance: torch.Generator) -> None:
    """Insert the adapter between a weight and all its readers, in place."""
    name = _placed(
        module,
        target,
        Inside(target.weight, target.initializer, axis=target.axis, chance=chance, rank=wishes.rank, alpha=wishes.gain),
    )
    held = next(node for node in module.graph.nodes if node.op == HELD and node.target == _plain(module, target))
    with module.graph.inserting_after(held):
        call = module.graph.call_module(name, (held,))
    held.replace_all_uses_with(call, delete_user_cb=_other_than(call))


def _add_outside(module: fx.GraphModule, target: Target, wishes: Adapters, chance: torch.Generator) -> None:
    """Add the adapter as a branch parallel to the layer that reads the weight, in place."""
    node = target.reads[0].node
    operator = module.get_submodule(str(node.target))
    assert isinstance(operator, Op)
    made = Outside(
        target.weight,
        target.initializer,
        call=operator.call,
        axis=target.axis,
        chance=chance,
        rank=wishes.rank,
        alpha=wishes.gain,
    )
    name = _placed(module, target, made)
    with module.graph.inserting_after(node):
        call = module.graph.call_module(name, (node, node.args[0]))
    node.replace_all_uses_with(call, delete_user_cb=_other_than(call))


def _other_than(call: fx.Node) -> Callable[[fx.Node], bool]:
    """Return a predicate that is true for every reader except `call`."""
    return lambda reader: reader is not call


def _plain(module: fx.GraphModule, target: Target) -> str:
    return parameter_name(module, target.initializer)


def _placed(module: fx.GraphModule, target: Target, made: LowRank) -> str:
    """Register the adapter as a submodule, in place, and return its name."""
    made.train(module.training)
    name = f"{ADAPTERS}.{_plain(module, target)}"
    if not hasattr(module, ADAPTERS):
        module.add_submodule(ADAPTERS, nn.ModuleDict())
    module.add_submodule(name, made)
    return name


def _trained_beside(module: fx.GraphModule, wishes: Adapters) -> Iterator[nn.Parameter]:
    """Yield the trained parameters: the adapters and, if enabled, scales, biases and norms."""
    for _, parameter in adapter_parameters(module):
        yield parameter
    if wishes.scales:
        for name, parameter in quant_parameters(module):
            quantizer = module.get_submodule(name.rpartition(".")[0])
            if wishes.mode == "inside" or (isinstance(quantizer, FakeQuant) and quantizer.role == "activation"):
                yield parameter
    if wishes.norms:
        matrices = {parameter_name(module, initializer) for initializer in _quantized_weights(module)}
        for name, parameter in module.named_parameters():
            ours = name.startswith((f"{QUANTIZERS}.", f"{ADAPTERS}.")) or name in matrices
            if not ours and parameter.numel() == max(parameter.shape):
                yield parameter


def _chosen(module: fx.GraphModule, wishes: Adapters) -> list[Target]:
    """Return the weights that get an adapter, in the order of the layers."""
    found: list[Target] = []
    refused: dict[str, str] = {}
    for initializer, sites in _quantized_weights(module).items():
        if wishes.globs is not None and not any(fnmatchcase(initializer, glob) for glob in wishes.globs):
            continue
        target = _target(module, initializer, sites)
        reason = target if isinstance(target, str) else _unfit(module, target, wishes)
        if reason is not None:
            refused[initializer] = reason
        elif isinstance(target, Target):
            found.append(target)
    for glob in wishes.globs or ("*",):
        if any(fnmatchcase(target.initializer, glob) for target in found):
            continue
        why = [f"'{name}' {reason}" for name, reason in refused.items() if fnmatchcase(name, glob)]
        said = "; ".join(why[:3]) if why else "no quantized weight has such a name"
        raise RecipeError(
            f"adapters of rank {wishes.rank} find no weight that can have one for '{glob}': {said}. Give other "
            f"targets, or a lower rank"
        )
    return found


def _quantized_weights(module: fx.GraphModule) -> dict[str, list[Site]]:
    """Return the sites of weights, by initializer."""
    found: dict[str, list[Site]] = {}
    for sites in origin_of(module).sites.values():
        for site in sites:
            if site.role == "weight":
                found.setdefault(site.tensor, []).append(site)
    return found


def _target(module: fx.GraphModule, initializer: str, sites: list[Site]) -> Target | str:
    """Return the weight as a target, or the reason why it cannot be one."""
    weight = weight_parameter(module, sites[0])
    unread, reads, axes = origin_of(module).solution.unread, [], set()
    for reader in (one for site in sites for one in site.readers if one not in unread):
        read = site_of(module, reader.node, reader.index)
        call = _call(module, read)
        if call.op not in LINEAR or reader.index != LINEAR[call.op].weight or weight.dim() < FEWEST_AXES:
            return f"is no matrix of a linear layer: node '{reader.node}' ({call.op}) reads it"
        axis = LINEAR[call.op].out_axis
        if call.op == "Gemm" and call.integer("transB", 0):
            axis = 0
        if call.op == "ConvTranspose" and call.integer("group", 1) > 1:
            return f"belongs to a ConvTranspose of several groups ('{reader.node}')"
        reads.append(read)
        axes.add(axis % weight.dim())
    if len(axes) != 1:
        return "has its outputs along another axis for each of its readers"
    return Target(initializer, weight, axes.pop(), tuple(reads))


def _call(module: fx.GraphModule, read: Read) -> Any:
    operator = module.get_submodule(str(read.node.target))
    assert isinstance(operator, Op)
    return operator.call


def _unfit(module: fx.GraphModule, target: Target, wishes: Adapters) -> str | None:
    """Return the reason why a weight cannot have an adapter of this rank and mode, or None."""
    outputs = target.weight.shape[target.axis]
    inputs = target.weight.numel() // max(outputs, 1)
    if wishes.rank * (outputs + inputs) >= outputs * inputs:
        return f"has {outputs} x {inputs} numbers, no more than the two factors"
    if wishes.mode == "inside":
        return None
    if len(target.reads) > 1:
        return f"is read by {len(target.reads)} layers, and a branch outside belongs to one"
    call = _call(module, target.reads[0])
    grouped = call.op in CONVOLUTIONS and call.integer("group", 1) > 1
    if grouped or call.op == "ConvTranspose":
        return f"belongs to a {call.op} of {call.integer('group', 1)} groups, which only mode 'inside' takes"
    if call.op == "MatMul" and target.weight.dim() != FEWEST_AXES:
        return f"is a stack of matrices of shape {tuple(target.weight.shape)}, which only mode 'inside' takes"
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

        adapters.<weight>.A, .B, .unit    of each adapter (see `sbonnx.qat.adapters.lora.LowRank`)
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
            f"these adapters are of another module: {'; '.join(wrong[:SHOWN])}{more}. Prepare it from the same "
            f"model with the same targets, rank and methods"
        )
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(state[name])


SHOWN: Final = 4
"""Maximum number of differences that an error message lists."""


def _state(module: nn.Module, *, beside: bool) -> dict[str, Tensor]:
    """Return the trained tensors, not copied."""
    inner = getattr(module, "module", module)
    parts = {path: part for path, part in inner.named_modules() if isinstance(part, LowRank)}
    if not parts:
        raise ModelError("the module has no adapters: make it with sbonnx.qat.prepare(..., adapters=8)")
    found = {f"{path}.{name}": value for path, part in parts.items() for name, value in part.state_dict().items()}
    state = inner.state_dict(keep_vars=True)
    found = {name: state[name] for name in found}
    if beside:
        found |= {name: value for name, value in inner.named_parameters() if value.requires_grad}
    return found


__all__ = ["Adapters", "adapter_parameters", "adapter_state", "add_adapters", "load_adapters"]
