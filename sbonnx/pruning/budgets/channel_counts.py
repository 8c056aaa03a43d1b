"""Numbers of channels that the kernels of a backend compute without waste."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from sbonnx.backends import Backend
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension


def multiples_of(found: Dependencies, backend: Backend, *, integers: bool = False) -> tuple[int, ...]:
    """Return, by dimension, the number of which its remaining groups should be a multiple.

    It is the largest that one of its layers asks for, see `Placement.channel_multiple`. Layers with several channels in
    a group need fewer groups.

    Args:
        integers: the model will be quantized.
    """
    ops = {linear.node.name: linear.node.op for linear in found.linears}
    return tuple(max(_multiples(dimension, backend, ops, integers)) for dimension in found.dimensions)


def _multiples(dimension: Dimension, backend: Backend, ops: dict[str, str], integers: bool) -> Iterator[int]:
    for side, channels in dimension.channels.items():
        multiple = backend.placement.channel_multiple(ops[side.layer], channels.size, integers=integers)
        yield multiple // gcd(multiple, channels.shape[1])
