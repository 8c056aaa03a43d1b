"""Choice of the few layers of a network without a head that stay float because the outputs are lost otherwise.

The error at the outputs is measured with the inputs of some layers quantized and the others in float, in one session:
codes and corrected biases suit the errors of the layers before, and would be wrong without them. Blocks of
successive layers are halved, the one with the largest error first, until the costly layers are alone. The first ones
in that order stay float: as many as gain most beyond what their time is worth, and no more than good outputs need.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sbonnx.calib.quantized.switched_network import SwitchedNetwork
from sbonnx.graph import Graph
from sbonnx.heads.losses import Quantized
from sbonnx.planning.types import Reader
from sbonnx.spec import Array

MOST_RUNS: Final = 64
"""Maximum number of measurements with which costly layers are looked for."""

MOST_LAYERS: Final = 12
"""Maximum number of layers that stay float."""


def costly_layers(
    graph: Graph,
    network: Quantized,
    outputs: Sequence[str],
    feeds: Sequence[Mapping[str, Array]],
    device: str,
    whole: Callable[[frozenset[str]], frozenset[str]],
    excess_db: Callable[[frozenset[str], float, float], float],
) -> frozenset[str]:
    """Return the nodes that stay float; none if that does not pay.

    Args:
        graph: simplified and fused; not changed.
        network: the plan of the graph and its solution.
        outputs: names of the tensors to judge by.
        feeds: the samples to run.
        device: see `LayerRunner`.
        whole: adds the nodes without which the inputs of some nodes stay quantized.
        excess_db: gain of nodes in float beyond what their time must bring, by the SQNR before and after.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    uses = defaultdict[str, list[Reader]](list)
    for site in network.plan.of_role("activation"):
        for reader in site.readers:
            uses[reader.node].append(reader)
    switches = {node.name: uses[node.name] for node in graph.nodes if node.name in uses}
    own = replace(network.solution, constants={})  # biases that suit the errors of all layers before
    with SwitchedNetwork(graph, network.plan, own, switches, outputs, feeds, device) as switched:
        layers = largest_first(tuple(switches), lambda names: 10 ** (-switched.error(names) / 10))
        sets = [whole(frozenset(layers[:size])) for size in range(1, len(layers) + 1)]
        before = switched.error(switches)
        gains = [excess_db(nodes, before, switched.error(switches.keys() - nodes)) for nodes in sets]
    best, nodes = max(zip(gains, sets, strict=True), key=lambda pair: pair[0], default=(-1.0, frozenset()))
    return nodes if best > 0 else frozenset()


def largest_first(names: Sequence[str], error: Callable[[Sequence[str]], float]) -> list[str]:
    """Return up to `MOST_LAYERS` names with the largest errors, in about `MOST_RUNS` measurements.

    Args:
        names: in an order in which neighbours are measured together.
        error: of several names together, about the sum of their errors.
    """
    largest: list[str] = []
    blocks = [(0.0, 0, len(names))] if names else []
    runs = 0
    while blocks and len(largest) < MOST_LAYERS and runs < MOST_RUNS:
        _, start, stop = heapq.heappop(blocks)
        if stop - start == 1:
            largest.append(names[start])
            continue
        middle = (start + stop) // 2
        for half in ((start, middle), (middle, stop)):
            heapq.heappush(blocks, (-error(names[slice(*half)]), *half))
        runs += 2
    return largest
