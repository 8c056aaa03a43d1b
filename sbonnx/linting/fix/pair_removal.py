"""Fixes that remove pairs. Without a pair a tensor keeps its float values: never wrong, at most slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sbonnx.graph import Node, Tensor, edit, query
from sbonnx.linting.fix.edit_context import Bench, Fixed
from sbonnx.linting.model_view import Quantizer
from sbonnx.linting.ort import kernel_choice
from sbonnx.linting.ort import read as ort_read
from sbonnx.linting.tensorrt import pair_placement
from sbonnx.ops import ADDS, LINEAR

DEPTH: Final = 10_000
"""Limit of nodes for computing the depth of a branch."""


def removed(bench: Bench, rule: str, back: Quantizer, what: str) -> Fixed:
    """Remove the pair of a DequantizeLinear, and return the row with the result."""
    name, tensor = back.name, str(back.output.name)
    why = bench.remove(back)
    return Fixed(rule, name, tensor, what) if why is None else Fixed(rule, name, tensor, why, done=False)


def bypassed(bench: Bench, rule: str, node: Node, index: int, what: str, *, exact: bool = False) -> Fixed:
    """Bypass the pair at one input of a node, and return the row with the result."""
    tensor = str(node.inputs[index].name)
    why = bench.bypass(node, index)
    name = str(node.name)
    return Fixed(rule, name, tensor, what, exact=exact) if why is None else Fixed(rule, name, tensor, why, done=False)


def duplicates(bench: Bench) -> Iterator[Fixed]:
    """P05: Merge QuantizeLinear nodes of one tensor with equal parameters."""
    first: dict[int, list[Quantizer]] = {}
    for quantizer in bench.view.quantizers:
        if not quantizer.quantizes or not bench.view.is_activation_pair(quantizer):
            continue
        earlier = first.setdefault(id(quantizer.data), [])
        same = next((other for other in earlier if _alike(quantizer, other)), None)
        if same is None:
            if earlier:
                why = (
                    f"'{earlier[0].name}' quantizes it with other numbers: calibrate again to determine which are right"
                )
                yield Fixed("P05", quantizer.name, str(quantizer.data.name), why, done=False)
            earlier.append(quantizer)
            continue
        edit.replace_all_uses(quantizer.output, same.output, graph=bench.scope_of(quantizer.node))
        yield Fixed("P05", quantizer.name, str(quantizer.data.name), f"merged into '{same.name}'", exact=True)


def _alike(quantizer: Quantizer, other: Quantizer) -> bool:
    same = quantizer.same_numbers(other) and quantizer.codes == other.codes and quantizer.block == other.block
    return same and (not quantizer.many or quantizer.channel_axis == other.channel_axis)


def interface(bench: Bench) -> Iterator[Fixed]:
    """P10: Remove pairs on outputs of the graph."""
    leaving = {id(tensor) for tensor in bench.view.graph.outputs}
    for quantizer in bench.view.quantizers:
        if id(quantizer.output) not in leaving:
            if not quantizer.quantizes and any(quantizer.data is tensor for tensor in bench.view.graph.inputs):
                why = "the input of the model is codes: the caller decides"
                yield Fixed("P10", quantizer.name, str(quantizer.data.name), why, done=False)
        elif quantizer.quantizes:
            why = "the output of the model is codes: the caller decides"
            yield Fixed("P10", quantizer.name, str(quantizer.output.name), why, done=False)
        else:
            yield removed(bench, "P10", quantizer, "the pair on the output is removed")


def splitting(bench: Bench) -> Iterator[Fixed]:
    """P02: Bypass pairs between a weighted op and the ops that fuse into it."""
    for _, source, node, index in pair_placement.split_fusions(bench.view):
        yield bypassed(bench, "P02", node, index, f"{node.op} reads {source.op} '{source.name}' directly")


def needless(bench: Bench) -> Iterator[Fixed]:
    """P03: Remove pairs on outputs of weighted ops that benefit no reader."""
    named = {name for name, _, _ in pair_placement.needless_outputs(bench.view)}
    for quantizer in bench.view.quantizers:
        if quantizer.quantizes and quantizer.name in named:
            for back in bench.view.dequantizers_of(quantizer):
                yield removed(bench, "P03", back, "the pair is removed")


def residual(bench: Bench) -> Iterator[Fixed]:
    """P04: Keep only the pair on the skip branch of an Add with pairs on both branches."""
    view = bench.view
    named = {name for name, _, _ in pair_placement.residual_adds(view)}
    for node in view.nodes:
        if node.op not in ADDS or str(node.name) not in named:
            continue
        backs = [view.dequantizer(tensor) for tensor in node.inputs]
        convs = [
            pair_placement.conv_branch(view, tensor, back) for tensor, back in zip(node.inputs, backs, strict=True)
        ]
        if None in backs:
            why = "the skip branch has no pair: its scale requires calibration"
            yield Fixed("P04", str(node.name), str(node.outputs[0].name), why, done=False)
            continue
        main = max((at for at in (0, 1) if convs[at]), key=lambda at: _depth(node.inputs[at]))
        what = f"the branch of Conv '{convs[main]}' enters the Add without a pair"
        yield bypassed(bench, "P04", node, main, what)


def _depth(tensor: Tensor) -> int:
    seen: dict[int, int] = {}
    stack: list[tuple[Tensor, bool]] = [(tensor, False)]
    while stack and len(seen) < DEPTH:
        current, ready = stack.pop()
        node = query.producer(current)
        if node is None or (id(node) in seen and not ready):
            continue
        if ready:
            before = [seen.get(id(maker), 0) for maker in map(query.producer, node.inputs) if maker is not None]
            seen[id(node)] = 1 + max(before, default=0)
        else:
            stack.append((current, True))
            stack.extend((read, False) for read in node.inputs)
    top = query.producer(tensor)
    return 0 if top is None else seen.get(id(top), DEPTH)


def rescaled(bench: Bench) -> Iterator[Fixed]:
    """P07, P09: Keep only the later of two consecutive pairs, with or without data movement in between."""
    for rule, check in (("P09", pair_placement.requantized), ("P07", pair_placement.rescaled_moves)):
        named = {name for name, _, _ in check(bench.view)}
        for quantizer in bench.view.quantizers:
            if quantizer.quantizes and quantizer.name in named:
                yield bypassed(bench, rule, quantizer.node, 0, "the pair before it is removed on this path")


def half_fused(bench: Bench) -> Iterator[Fixed]:
    """P08: Let pools, Add and Resize read floats if their output is not quantized."""
    yield from _at_inputs(
        bench, "P08", pair_placement.half_fused, lambda node: range(len(node.inputs)) if node.op in ADDS else (0,)
    )


def delicate(bench: Bench) -> Iterator[Fixed]:
    """P11: Let softmax, norms, masks and one-sided products read floats."""
    yield from _at_inputs(bench, "P11", pair_placement.high_precision, lambda node: range(min(2, len(node.inputs))))


def tiny(bench: Bench) -> Iterator[Fixed]:
    """P12: Convert weighted ops that are too small for integer kernels to float, with dequantized weights."""
    yield from _at_inputs(bench, "P12", pair_placement.tiny, lambda node: sorted({0, 1, LINEAR[node.op].weight}))


def one_sided(bench: Bench) -> Iterator[Fixed]:
    """P01: Remove the pair of weighted ops that have only one; a weight is dequantized."""
    yield from _at_inputs(bench, "P01", pair_placement.one_sided, lambda node: (0, 1))


def scalars(bench: Bench) -> Iterator[Fixed]:
    """T13: Remove pairs on tensors without dimensions."""
    for quantizer in bench.view.quantizers:
        if not quantizer.quantizes and query.rank(quantizer.data) == 0:
            yield removed(bench, "T13", quantizer, "the pair is removed")


def _at_inputs(
    bench: Bench,
    rule: str,
    check: Callable[..., Iterator[tuple[str, str, str]]],
    indices: Callable[[Node], Iterable[int]],
) -> Iterator[Fixed]:
    """Bypass the pairs at the given inputs of every node that a rule names."""
    named = {name for name, _, _ in check(bench.view)}
    for node in bench.view.nodes:
        if str(node.name) not in named:
            continue
        for index in indices(node):
            back = bench.view.dequantizer(node.inputs[index])
            if back is not None:
                stored = bench.view.is_constant(back.data)
                what = "the weight is stored as floats" if stored else "the pair before it is removed"
                yield bypassed(bench, rule, node, index, what, exact=stored)


# --- onnxruntime ------------------------------------------------------------------------------------------------------


def weights_alone(bench: Bench) -> Iterator[Fixed]:
    """O15: Store weights as dequantized floats if their op reads float activations."""
    named = {name for name, _, _ in kernel_choice.weight_only(bench.view)}
    for linear in ort_read.weighted(bench.view):
        if str(linear.node.name) in named:
            what = "the weight is stored as floats"
            yield bypassed(bench, "O15", linear.node, LINEAR[linear.node.op].weight, what, exact=True)


def activations_alone(bench: Bench) -> Iterator[Fixed]:
    """O16: Remove pairs before ops with a float weight."""
    named = {name for name, _, _ in kernel_choice.float_weight(bench.view)}
    for linear in ort_read.weighted(bench.view):
        if str(linear.node.name) in named:
            yield bypassed(bench, "O16", linear.node, 0, "the pair before it is removed")


def useless(bench: Bench) -> Iterator[Fixed]:
    """O23, O24: Remove pairs that serve no integer kernel."""
    for rule, check in (("O23", kernel_choice.useless_pair), ("O24", kernel_choice.output_pair)):
        named = {name for name, _, _ in check(bench.view)}
        for quantizer in bench.view.quantizers:
            if not quantizer.quantizes and quantizer.name in named:
                yield removed(bench, rule, quantizer, "the pair is removed")
