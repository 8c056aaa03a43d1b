"""Fixed zeros: entries of weights that pruning set to zero, and that training keeps at zero."""

from __future__ import annotations

from typing import Final, cast, final

from torch import Tensor, fx, nn

from sbonnx.torchnet.onnx_to_torch.fx_conversion import GET_ATTR
from sbonnx.torchnet.onnx_to_torch.reimport import META

MASKS: Final = "masks"
"""Name of the submodule that holds the masks."""


@final
class ZeroMask(nn.Module):  # type: ignore[misc]
    """Multiplies a weight by its mask.

    The weight itself is zero wherever the mask is, and its gradient is zero there, so that optimizers with or without
    momentum, weight decay and averaging leave these entries at exactly 0: the weight needs no mask when it is exported.

    Attributes:
        mask: 1 where the weight was not zero, else 0; dtype and shape of the weight.
    """

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (weight.detach() != 0).to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        return weight * self.mask

    def extra_repr(self) -> str:
        return f"{1.0 - float(self.mask.mean()):.3f} zero"


def keep_zeros(module: fx.GraphModule, least: float = 0.0) -> tuple[str, ...]:
    """Insert a `ZeroMask` after every weight with zeros, so that training does not change the zeros.

    Call it before fake-quant modules are inserted. Only parameters with two or more axes get a mask: a bias of 0 is
    a value, not a removed connection.

    Args:
        module: result of `reimport`; changed in place.
        least: share of zeros from which a weight gets a mask; 0: any zero.

    Returns:
        The initializers with a mask, in the order of the module.
    """
    names: dict[str, str] = module.meta[META]["parameters"]
    masked = []
    for node in [node for node in module.graph.nodes if node.op == GET_ATTR and str(node.target) in names]:
        weight = module.get_parameter(str(node.target))
        zeros = int((weight == 0).sum())
        if weight.dim() < 2 or zeros == 0 or zeros < least * weight.numel():
            continue
        if not hasattr(module, MASKS):
            module.add_submodule(MASKS, nn.ModuleDict())
        name = f"{MASKS}.{node.target}"
        module.add_submodule(name, ZeroMask(weight))
        with module.graph.inserting_after(node):
            call = module.graph.call_module(name, (node,))
        node.replace_all_uses_with(call, delete_user_cb=lambda user, call=call: user is not call)
        masked.append(names[str(node.target)])
    module.graph.lint()
    module.recompile()
    return tuple(masked)


def masked(module: nn.Module, parameter: str, weight: Tensor) -> Tensor:
    """Return values of a parameter with its zeros kept, as its readers get them: unchanged if it has no mask.

    Args:
        module: module that `keep_zeros` may have changed.
        parameter: dotted name in `module`.
        weight: values, in the shape of the parameter.
    """
    try:
        mask = module.get_submodule(f"{MASKS}.{parameter}")
    except AttributeError:
        return weight
    return cast("Tensor", mask(weight))
