"""onnxruntime: rules for pairs around integer kernels, from the graph and from the optimized graph that it creates.

Outside integer kernels, pairs cost time and accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final
from weakref import WeakKeyDictionary

import onnx

from sbonnx import graph as graphs
from sbonnx.backends.kernel_costs import IMAGE_RANK
from sbonnx.backends.onnxruntime.float_kernels import after_pairs, before_quantize
from sbonnx.backends.onnxruntime.float_kernels import reason as float_reason
from sbonnx.backends.onnxruntime.graph_transformers import blame, broken_rewrites, failing_node, original_name
from sbonnx.backends.onnxruntime.kernel_variants import DOT, LANES, float_conv
from sbonnx.backends.onnxruntime.model_index import Body, bodies
from sbonnx.backends.onnxruntime.ort_nbits import slow_path
from sbonnx.calib.data.dataset import input_specs
from sbonnx.calib.data.random_feeds import guessed_feeds
from sbonnx.calib.data.validate import Feed
from sbonnx.errors import DataError, DeviceError, SbonnxError
from sbonnx.graph import Constant, Graph, Node, query
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.linting.model_view import View
from sbonnx.linting.ort import read
from sbonnx.ops import (
    CONTRIB,
    CONTROL_FLOW,
    MATRIX_PRODUCTS,
    PICKS_MAX,
    QDQ,
    QUANTIZE,
    RECTIFIERS,
    RESIZES,
    SOFTMAX,
)
from sbonnx.qdq.integer_products import BLOCKED
from sbonnx.system.runtime import open_session, session_options

Found = Iterator[tuple[str, str, str]]
Check = Callable[[View], Iterable[tuple[str, str, str]]]

UNIT_RANGE: Final = (SOFTMAX & {"Softmax"}) | {"Sigmoid"}
"""Ops whose output is always between 0 and 1."""

SPARE: Final = 1.05
"""Largest upper end of a range above 1 for which codes do not count as wasted."""


def _interpolates(node: Node) -> bool:
    return node.op in RESIZES and query.attribute(node, "mode", "nearest") not in ("nearest", b"nearest")


def _has_kernel(node: Node) -> bool:
    """Return whether onnxruntime can run the op on codes, regardless of the surrounding nodes."""
    return node.op in read.INTEGER and not _interpolates(node)


def _name(node: Node) -> tuple[str, str]:
    return str(node.name), str(node.outputs[0].name)


def weight_only(view: View) -> Found:
    """Find quantized weights whose op reads float activations."""
    for linear in read.weighted(view):
        w = linear.w
        if w is None or linear.x is not None or not read.is_stored(view, w):
            continue
        if linear.node.op in MATRIX_PRODUCTS and w.blocked:  # MatMulNBits multiplies the weight as stored
            continue
        why = f"{linear.node.op} reads float activations: the weight is dequantized in every run, the op stays float"
        yield str(linear.node.name), str(linear.node.inputs[0].name), why


def float_weight(view: View) -> Found:
    """Find float weights whose op reads quantized activations."""
    for linear in read.weighted(view):
        weight = linear.node.inputs[1]
        if linear.x is not None and linear.w is None and isinstance(weight, Constant):
            why = f"{linear.node.op} reads a pair, but its weight is float: it stays float and the pair only costs"
            yield str(linear.node.name), str(weight.name), why


def conv_output(view: View) -> Found:
    """Find convolutions that read pairs but whose output is not quantized."""
    for linear in read.weighted(view):
        node = linear.node
        if node.op != "Conv" or not linear.quantized or read.written(view, node):
            continue
        rectifier = read.rectified(view, node)
        if rectifier is not None and read.only_quantized(view, rectifier.outputs[0]):
            continue  # the rule for Relu and Clip reports it
        if _pooled(view, node):
            continue
        readers = sorted({reader.op for reader, _ in query.readers(node.outputs[0])})
        where = ", ".join(readers) or "the graph's output"
        yield *_name(node), f"the output goes to {where} as float, so the convolution runs in float"


def _pooled(view: View, node: Node) -> bool:
    """Return whether the only reader of the output is a quantized MaxPool: onnxruntime moves the pair before it."""
    readers = [reader for reader, _ in query.readers(node.outputs[0])]
    if len(readers) != 1 or readers[0].op not in PICKS_MAX & read.ONE_SCALE or view.leaves(node.outputs[0]):
        return False
    return bool(read.only_quantized(view, readers[0].outputs[0]))


def rectifier_stays(view: View) -> Found:
    """Find Relu and Clip between integer ops that the following zero point does not replace."""
    for node in view.nodes:
        if node.op not in RECTIFIERS or not node.outputs:
            continue
        behind = read.only_quantized(view, node.outputs[0])
        maker = query.producer(node.inputs[0])
        fed = view.quantizer_of(node.inputs[0]) is not None or (maker is not None and read.reads_pairs(view, maker))
        if fed and behind and not all(read.folds(view, node, pair) for pair in behind):
            reach = read.reach(behind[0])
            spans = "codes that are not known" if reach is None else f"values from {reach[0]:.4g} to {reach[1]:.4g}"
            why = f"{behind[0].name} keeps {spans}, more than the {node.op} lets through: it stays, in float"
            yield *_name(node), why


def slow_blocks(view: View) -> Found:
    """Find MatMulNBits whose bit width, block size, accuracy level and zero points have no fast CPU kernel."""
    for node in view.nodes:
        if node.op != BLOCKED or node.domain != CONTRIB:
            continue
        zero = query.optional_input(node, 3)
        kind = None if zero is None else query.dtype(zero)
        slow = slow_path(
            int(node.attrs.get("bits", 4)),
            int(node.attrs["block_size"]),
            int(node.attrs.get("accuracy_level", 0)),
            float_zero_points=kind is not None and kind.kind == "f",
        )
        if slow is not None:
            yield *_name(node), slow.text()


def no_kernel(view: View) -> Found:
    """Find ops without an integer kernel between pairs."""
    for node in view.nodes:
        if _has_kernel(node) or node.op in QDQ | CONTROL_FLOW or not node.outputs or not node.inputs:
            continue
        if _reads_activation(view, node) and read.only_quantized(view, node.outputs[0]):
            what = "an interpolating Resize" if _interpolates(node) else node.op
            yield (
                *_name(node),
                f"{what} has no integer kernel: it stays between a DequantizeLinear and a QuantizeLinear",
            )


def _reads_activation(view: View, node: Node) -> bool:
    pairs = (read.dequantized(view, tensor) for tensor in node.inputs)
    return any(pair is not None and view.is_activation_pair(pair) for pair in pairs)


def softmax(view: View) -> Found:
    """Find Softmax between pairs."""
    for node in view.nodes:
        if node.op in SOFTMAX and _has_kernel(node) and _reads_activation(view, node) and read.written(view, node):
            yield *_name(node), "the integer Softmax is several times slower than the float one, and less accurate"


def float_side(view: View) -> Found:
    """Find ops between pairs with both quantized and float inputs."""
    for node in view.nodes:
        if node.op not in read.JOINS or not read.written(view, node) or read.reads_pairs(view, node):
            continue
        if _reads_activation(view, node):
            floats = [tensor for tensor in read.data_inputs(node) if read.dequantized(view, tensor) is None]
            what = "constant" if isinstance(floats[0], Constant) else "tensor"
            why = f"{node.op} reads the float {what} '{floats[0].name}' next to pairs: it stays float"
            yield str(node.name), str(floats[0].name), why


def two_scales(view: View) -> Found:
    """Find ops that only move or pick codes, with different parameters before and after."""
    for node in view.nodes:
        if node.op not in read.ONE_SCALE or _interpolates(node) or not node.outputs:
            continue
        pair = read.dequantized(view, node.inputs[0])
        if pair is None or not view.is_activation_pair(pair):
            continue
        if any(not pair.same_numbers(other) for other in read.only_quantized(view, node.outputs[0])):
            why = f"the pairs before and after the {node.op} have different numbers: it runs in float between them"
            yield *_name(node), why


def useless_pair(view: View) -> Found:
    """Find pairs between ops that all run in float."""
    for pair in view.quantizers:
        quantize = None if pair.quantizes else read.before(view, pair)
        if quantize is None or not view.is_activation_pair(pair) or view.leaves(pair.output):
            continue
        readers = [node for node, _ in query.readers(pair.output)]
        maker = query.producer(quantize.data)
        if maker is not None and maker.op in RECTIFIERS:
            maker = query.producer(maker.inputs[0])
        if not readers or any(_explained(view, node) for node in readers):
            continue
        if maker is None or not (maker.op == "Conv" or read.runs_in_integers(view, maker)):
            names = ", ".join(sorted({node.op for node in readers}))
            yield pair.name, pair.output.name, f"the pair is read by {names} in float, and nothing before needs it"


def _explained(view: View, node: Node) -> bool:
    """Return whether a reader of a pair runs in integers, or is reported by another rule."""
    if node.op in read.WEIGHTED | QDQ | CONTROL_FLOW or read.runs_in_integers(view, node):
        return True
    return bool(node.outputs) and bool(read.only_quantized(view, node.outputs[0]))


def output_pair(view: View) -> Found:
    """Find pairs at the graph's outputs that no kernel requires."""
    for pair in view.quantizers:
        quantize = None if pair.quantizes else read.before(view, pair)
        if quantize is None or not view.leaves(pair.output):
            continue
        maker = query.producer(quantize.data)
        chain = [] if maker is None else [maker, *filter(None, map(query.producer, read.data_inputs(maker)))]
        # Other producers need the pair to run in integers, or another rule reports why they do not.
        product = bool(chain) and (chain[0] if chain[0].op not in RECTIFIERS else chain[-1]).op in MATRIX_PRODUCTS
        if product or not any(_reads_activation(view, node) for node in chain):
            yield pair.name, pair.output.name, "the output is rounded to codes, and no integer kernel needs it"


def rescale(view: View) -> Found:
    """Find pairs whose two nodes have different parameters."""
    for pair in view.quantizers:
        quantize = None if pair.quantizes else read.before(view, pair)
        if quantize is not None and not pair.same_numbers(quantize):
            yield pair.name, pair.scale_name, f"it does not have the numbers of {quantize.name}: the values are changed"


def requantized(view: View) -> Found:
    """Find codes that are requantized without an op in between."""
    for pair in view.quantizers:
        source = read.dequantized(view, pair.data) if pair.quantizes else None
        if source is not None and not source.same_numbers(pair):
            yield pair.name, pair.data.name, f"the values of {source.name} are quantized again, with other numbers"


def grouped_conv(view: View) -> Found:
    """Find grouped convolutions in integers."""
    for linear in read.weighted(view):
        if linear.node.op == "Conv" and linear.quantized and linear.groups > 1 and not linear.depthwise:
            yield *_name(linear.node), f"{linear.groups} groups: the integer kernel took 1.3 times the float one's time"


def unblocked_channels(view: View) -> Found:
    """Find float convolutions whose numbers of channels have no kernel on blocks of channels."""
    for linear in read.weighted(view):
        sizes = query.shape(linear.node.inputs[1])
        if linear.node.op != "Conv" or linear.quantized or sizes is None or len(sizes) != IMAGE_RANK:
            continue
        if any(not isinstance(size, int) for size in sizes) or (linear.groups > 1 and not linear.depthwise):
            continue
        outputs, inner, *taps = (int(size or 1) for size in sizes)
        if float_conv(inner, outputs, prod(taps), linear.groups, LANES).endswith("plain"):
            count, kind = (linear.groups, "depthwise ") if linear.depthwise else (inner, "input ")
            why = f"{count} {kind}channels are no multiple of {DOT}: no kernel on blocks of channels, which is slower"
            yield *_name(linear.node), why


def unit_range(view: View) -> Found:
    """Find outputs of Sigmoid and Softmax with codes for values outside their range."""
    for node in view.nodes:
        if node.op in UNIT_RANGE and node.outputs:
            for pair in read.only_quantized(view, node.outputs[0]):
                reach = read.reach(pair)
                if reach is not None and (reach[1] > SPARE or reach[0] < 1 - SPARE):
                    why = f"codes reach from {reach[0]:.4g} to {reach[1]:.4g}, the values of {node.op} from 0 to 1"
                    yield *_name(node), why


@dataclass(frozen=True)
class Counted:
    """Result of loading a model in onnxruntime and reading its optimized graph.

    Attributes:
        model: the optimized graph, or None.
        refused: reason why onnxruntime rejects the model as stored, or "".
        broken: its own rewrites that break the model, with node and way out, or "".
        node: at which they do, or "".
        skipped: reason why nothing could be counted, or "".
    """

    model: onnx.ModelProto | None = None
    refused: str = ""
    broken: str = ""
    node: str = ""
    skipped: str = ""


_COUNTED: Final[WeakKeyDictionary[View, Counted]] = WeakKeyDictionary()
"""Cache: three rules share one session."""


def counted(view: View) -> Counted:
    """Return the optimized graph of the model, cached per view."""
    if view not in _COUNTED:
        _COUNTED[view] = _count(view)
    return _COUNTED[view]


def _count(view: View) -> Counted:
    try:
        # kernels are selected at this level; the next one also converts data layouts, which hides ops that stay float
        options = session_options("extended")
    except DeviceError as error:
        return Counted(skipped=str(error))
    with temporary_folder() as folder:
        source, target = folder / "model.onnx", folder / "optimised.onnx"
        options.optimized_model_filepath = str(target)
        try:
            graphs.save(view.graph, source)
        except SbonnxError as error:
            return Counted(skipped=str(error))
        outcome = _broken(view.graph, str(source))
        try:
            open_session(str(source), options)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            return outcome if outcome.broken else Counted(refused=_said(error, str(source)))
        try:
            return replace(outcome, model=graphs.read_proto(target))
        except SbonnxError as error:
            return replace(outcome, skipped=str(error))


def _broken(graph: Graph, source: str) -> Counted:
    """Find rewrites of onnxruntime after which the model at `source` does not load or run, although it does as stored.

    It is run on feeds of guessed sizes; those that it cannot run as stored say nothing.
    """

    def opened(level: str, names: tuple[str, ...] = ()) -> Any:
        return open_session(source, session_options(level), disabled=names)

    def blamed(error: Exception, feed: Feed | None) -> Counted:
        def attempt(names: tuple[str, ...]) -> None:
            session = opened("all", names)
            if feed is not None:
                session.run(None, feed)

        said = _said(error, source)
        return Counted(broken=blame(broken_rewrites(attempt), said), node=failing_node(said)[1])

    try:
        session = opened("all")
    except Exception as error:  # onnxruntime's own exceptions share no base class
        try:
            opened("off")
        except Exception:  # the stored model does not load either: no rewrite is to blame
            return Counted()
        return blamed(error, None)
    plain = None
    for feed in _feeds(graph):
        try:
            session.run(None, feed)
            break
        except Exception as error:
            plain = plain or opened("off")
            try:
                plain.run(None, feed)
            except Exception:  # the stored model does not run on these guessed sizes either: try the next
                continue
            return blamed(error, feed)
    return Counted()


def _feeds(graph: Graph) -> Iterator[Feed]:
    """Yield feeds of guessed sizes; none if an integer division by zero could end the process."""
    for node in query.all_nodes(graph):
        kind = query.dtype(node.inputs[1]) if node.op in ("Div", "Mod") and len(node.inputs) > 1 else None
        if kind is not None and kind.kind in "iu" and not isinstance(node.inputs[1], Constant):
            return
    try:
        yield from (feeds[0] for feeds in guessed_feeds(input_specs(graph)))
    except DataError:  # an input is too large
        return


def _said(error: Exception, source: str) -> str:
    """Return onnxruntime's message on one line, without the path of the temporary file."""
    said = " ".join(str(error).replace(f"Load model from {source} failed:", "").split())
    return said.replace(source, "the model")


def refused(view: View) -> Found:
    """Report that onnxruntime does not load the model."""
    why = counted(view).refused
    if why:
        yield "", "", why


def broken_by_rewrites(view: View) -> Found:
    """Report rewrites of onnxruntime after which the model does not load or run."""
    outcome = counted(view)
    if outcome.broken:
        yield outcome.node, "", outcome.broken


def not_counted(view: View) -> Found:
    """Report that the kernels could not be counted."""
    why = counted(view).skipped
    if why:
        yield "", "", f"the kernels were not counted: {why}"


def stays_float(checks: tuple[Check, ...]) -> Check:
    """Create the rule for ops left between pairs in the optimized graph for which none of `checks` gives a reason."""

    def check(view: View) -> Found:
        model = counted(view).model
        left = [] if model is None else list(_between_pairs(model))
        if not left:
            return
        makers = {tensor.name: node for node in view.nodes for tensor in node.outputs}
        named = {name for rule in checks for name, _, _ in rule(view) if name}
        for body, node, output in left:
            origin = makers.get(output)
            chain = [] if origin is None else _chain(origin)
            if not named & {original_name(node.name), *(str(linked.name) for linked in chain)}:
                kernel = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
                why = f"onnxruntime runs {kernel} in float, after a DequantizeLinear: {float_reason(body, node, node)}"
                if any(_signed(view, linked) for linked in chain[:1]):
                    why += "; it rewrites some int8 pairs to uint8, which splits the types around an op"
                yield str(node.name if origin is None else origin.name), output, why

    return check


def _chain(node: Node) -> list[Node]:
    """Return a node, the ops that may have been fused into it, and the pairs before it, which other rules may name."""
    chain, stack, seen = [], [node], {id(node)}
    while stack:
        current = stack.pop()
        chain.append(current)
        for tensor in () if current.op in QUANTIZE else current.inputs:
            maker = query.producer(tensor)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                stack.append(maker)
    return chain


def _signed(view: View, node: Node) -> bool:
    read = (view.quantizer_of(tensor) for tensor in node.inputs)
    return any(pair is not None and pair.codes == "int8" and view.is_activation_pair(pair) for pair in read)


def _between_pairs(model: onnx.ModelProto) -> Iterator[tuple[Body, onnx.NodeProto, str]]:
    """Yield float ops of an optimized graph that read a dequantized activation and either a constant or write to a Q.

    Each has an output by which its op in the file is known.
    """
    for body, node in after_pairs(bodies(model)):
        written = before_quantize(body, node)
        pairs = [pair for name in node.input if (pair := body.pair(name)) is not None]
        if written or any(body.stored(pair) is not None for pair in pairs):
            yield body, node, (written or node.output)[0]
