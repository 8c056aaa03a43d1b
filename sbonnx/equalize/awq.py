"""Activation-aware weight quantization (AWQ): scales input channels so that important ones are rounded more finely.

A product y = x W keeps its value as ``(x / s) (s W)``. Rounding ``s W`` in blocks reduces the error of rows with a
large s by 1 / s, as long as they do not determine the range of their block. Candidates are

    s = m ^ a           (m: root mean square of each input channel; a from 0, no scaling, to 1)
    s = m ^ a / w ^ (1 - a)     (w: mean absolute weight of the channel, relative to the largest of its block)

The candidate with the least output error by the second moments of the inputs is used, for all weights that read one
tensor together; it is never worse than no scaling. 1 / s is folded into the node that computes the input if nothing
else reads that input (weights, biases, gains of norms), else into one Mul before the products.

Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", section 3.2,
and the second form as in its authors' code. They measure outputs; here moments are used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sbonnx.calib.engine.layerwise import sum_inputs
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.engine.threads import one_blas_thread, within
from sbonnx.calib.qparams.solve import weight_bounds
from sbonnx.equalize.channel_scales import apply
from sbonnx.equalize.rules import RULES
from sbonnx.equalize.scale_trace import ConstantEditor, Traced, trace
from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.graph.constant_edits import ConstantEdit
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.ops import LINEAR, MATRIX_PRODUCTS
from sbonnx.planning.types import Plan, RoundingChoice, Site
from sbonnx.reconstruct.layer_inputs import Layer, Watched, in_budget, layers_of, watched
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array, ScaleRule, params_from_bounds

STEP: Final = "scale by activations"

GRID: Final = 20
"""Number of steps of the exponent from 0 to 1, as in the paper."""

COARSE: Final = 4
"""Step between the exponents of the coarse search, which is then refined around the best one with halved steps."""

LARGEST: Final = 1e3
"""Limit of scales and of their inverses."""

WORTH: Final = 0.95
"""Maximum relative error for which a scale is used, because an additional Mul or a changed weight has a cost."""

WRITES_OUTPUT: Final = (
    "writes an output of the model, for which squared error is no measure; the paper leaves it out too"
)
"""With scaling, the classifier of a small Llama has 0.83 of the squared error, but KL from float 0.0102, not 0.0088."""

SHARED: Final = "the weight of '{}' is read by other nodes too, whose inputs need other scales"

FakeQuant = Callable[[Array], Array]
"""Maps a weight in its file layout to its dequantized nearest values, in the same shape.

It must use the ranges of the file's observer: a scale that helps min-max ranges can harm least-error ranges.
"""


@dataclass(frozen=True)
class Aware:
    """A product whose weight will be rounded.

    Attributes:
        moments: second moments of its inputs in the float network; one stream, one group.
        fake_quant: quantizes and dequantizes a weight of its shape.
    """

    moments: Moments
    fake_quant: FakeQuant


@dataclass(frozen=True)
class Scaled:
    """A scaled tensor.

    Attributes:
        tensor: its name.
        share: relative output error of its readers after scaling, by their moments with nearest rounding.
        multiplied: scaled by a Mul before its readers, not in the node that computes it.
    """

    tensor: str
    share: float
    multiplied: bool


@dataclass(frozen=True)
class _ProductSet:
    """Products that read one tensor."""

    tensor: Tensor
    body: Body
    nodes: tuple[Node, ...]


def awq(graph: Graph, layers: Mapping[str, Aware], *, multiply: bool = True) -> tuple[list[Scaled], list[Refusal]]:
    """Scale the inputs of matrix products by their second moments, in place. The function is unchanged up to rounding.

    Args:
        graph: float, sorted.
        layers: by node name; MatMul and Gemm with a constant matrix on the right.
        multiply: allow a Mul before products whose input scale cannot be folded.

    Returns:
        The scaled tensors; refusals with the reason for all others.
    """
    done: list[Scaled] = []
    refusals: list[Refusal] = []
    traced = trace(graph, RULES)
    log = np.zeros(len(traced.groups.fixed))
    taken = traced.groups.fixed.copy()
    editor = ConstantEditor(graph)
    multiplied: list[tuple[_ProductSet, Array]] = []
    ends = query.output_names(graph)
    for product_set in _sets(graph, layers):
        last = next((node.name for node in product_set.nodes if node.outputs[0].name in ends), None)
        if last is not None:
            refusals.append(Refusal(STEP, product_set.tensor.name, Reason("awq-output", f"'{last}' {WRITES_OUTPUT}")))
            continue
        s, share = _search(product_set, layers)
        if s is None:
            refusals.append(
                Refusal(
                    STEP,
                    product_set.tensor.name,
                    Reason("no-scale-lowers-error", f"no scale lowers the error below {WORTH:.0%}"),
                )
            )
            continue
        groups = _groups(traced, product_set, len(s))
        if groups is not None and not taken[groups].any():
            log[groups] = np.log(s)
            taken[groups] = True
            done.append(Scaled(product_set.tensor.name, share, False))
        elif multiply:
            multiplied.append((product_set, s))
            done.append(Scaled(product_set.tensor.name, share, True))
        else:
            refusals.append(
                Refusal(
                    STEP,
                    product_set.tensor.name,
                    Reason("no-constant-absorbs-scale", "no constant before it absorbs the scale"),
                )
            )
    why = apply(graph, traced, np.exp(log))
    if why is not None:
        refusals += [Refusal(STEP, product_set.tensor, why) for product_set in done if not product_set.multiplied]
        done = [product_set for product_set in done if product_set.multiplied]
    for product_set, s in multiplied:
        _multiply(product_set, s, editor)
    edit.sort(graph)
    return done, refusals


def _sets(graph: Graph, layers: Mapping[str, Aware]) -> list[_ProductSet]:
    """Group the products by the tensor that they read, in order."""
    products: dict[int, tuple[Tensor, Body, list[Node]]] = {}
    for _, body in query.scopes(graph):
        for node in body.nodes:
            aware = layers.get(node.name)
            if aware is None or node.op not in MATRIX_PRODUCTS or aware.moments.layout.groups != 1:
                continue
            tensor = node.inputs[1 - LINEAR[node.op].weight]
            products.setdefault(id(tensor), (tensor, body, []))[2].append(node)
    return [_ProductSet(tensor, body, tuple(nodes)) for tensor, body, nodes in products.values()]


def _weight(node: Node) -> Array:
    values = query.constant(node.inputs[LINEAR[node.op].weight])
    assert values is not None
    return values


def _search(product_set: _ProductSet, layers: Mapping[str, Aware]) -> tuple[Array | None, float]:
    """Search the best scale of a tensor, float64 (K,), and the remaining error share; None if the gain is too small."""
    size = np.zeros(0)
    wide = np.zeros(0)
    parts = []
    for node in product_set.nodes:
        aware = layers[node.name]
        matrix = aware.moments.layout.matrices(_weight(node)).astype(np.float32)[0]
        a = aware.moments.a[0]
        size = np.sqrt(np.maximum(np.diagonal(a), 0) / (aware.moments.rows or 1.0))
        mean = np.abs(matrix).mean(axis=0, dtype=np.float64)
        wide = mean if not wide.size else np.maximum(wide, mean)
        parts.append((aware, matrix, a.astype(np.float32)))
    base = sum(_error(aware, matrix, a, None) for aware, matrix, a in parts)
    if not (size > 0).any():
        return None, 1.0
    size = np.maximum(size, size[size > 0].min())
    wide = np.maximum(wide, wide[wide > 0].min(initial=1.0)) / max(float(wide.max(initial=0.0)), 1e-30)

    def tried(form: int, step: int) -> tuple[float, int, int]:
        s = _candidate(size, wide, form, step)
        return sum(_error(aware, matrix, a, s) for aware, matrix, a in parts), form, step

    error, form, step = min(tried(form, step) for form in (0, 1) for step in range(COARSE, GRID + 1, COARSE))
    length = COARSE // 2
    while length:
        near = [tried(form, strength) for strength in (step - length, step + length) if 0 < strength <= GRID]
        error, form, step = min((error, form, step), *near)
        length //= 2
    return (_candidate(size, wide, form, step), error / base) if error < WORTH * base else (None, 1.0)


def _candidate(size: Array, wide: Array, form: int, step: int) -> Array:
    """Return a candidate scale, centred on 1: from inputs only (form 0), or from inputs and weights (form 1)."""
    share = step / GRID
    s = size**share / (wide ** (1 - share) if form else 1.0)
    scales: Array = np.clip(s / np.sqrt(s.max() * s.min()), 1 / LARGEST, LARGEST)
    return scales


def _error(aware: Aware, matrix: Array, a: Array, s: Array | None) -> float:
    """Return the squared output error of one product, summed over rows and outputs, with its inputs divided by `s`.

    Args:
        matrix: (O, K) float32.
        a: sum of x x^T, (K, K) float32.
    """
    layout = aware.moments.layout
    factor = np.ones(matrix.shape[1], np.float32) if s is None else s.astype(np.float32)
    rounded = layout.matrices(aware.fake_quant(layout.from_matrices((matrix * factor)[None])))[0] / factor
    d = matrix - rounded
    return float(np.einsum("ok,ok->", d @ a, d, dtype=np.float64))


def _groups(traced: Traced, one: _ProductSet, length: int) -> Array | None:
    """Return the groups of a tensor's channels, (K,); None if they are shared or read by weights of other nodes."""
    ids = traced.ids.get(one.tensor.name)
    if ids is None or ids.shape[-1] != length or ids.size != length:
        return None
    groups: Array = traced.groups.of[ids.reshape(-1)]
    if len(np.unique(groups)) < length:
        return None
    readers = {id(node) for node in one.nodes}
    others = (w for w in traced.weights if id(w.node) not in readers)
    return None if any(np.isin(traced.groups.of[w.inputs], groups).any() for w in others) else groups


def _multiply(one: _ProductSet, s: Array, editor: ConstantEditor) -> None:
    """Insert a Mul so that the products read the tensor times 1 / s, and multiply their weights by s, in place."""
    kind = query.dtype(one.tensor)
    inverse = edit.add_constant(one.body, f"{one.tensor.name}_inverse_scale", (1 / s).astype(kind), editor.names)
    scaled = Variable(editor.names.fresh(f"{one.tensor.name}_scaled"), kind, one.tensor.shape)
    stem = f"{one.tensor.name}_Mul"
    edit.add_node(one.body, "Mul", [one.tensor, inverse], names=editor.names, stem=stem, outputs=[scaled])
    exact = 1 / np.asarray(query.constant(inverse), np.float64)
    for node in one.nodes:
        index, weight = LINEAR[node.op].weight, _weight(node)
        layer = LinearLayer.of_rows(node)
        assert layer is not None
        scales = ConstantEdit("channels", inputs=exact)
        editor.replace(node, index, layer.scale_inputs(weight, exact), scales)
        edit.replace_input(node, 1 - index, scaled)


LOOKS: Final = RoundingChoice("gptq")
"""Any rounding that uses inputs, so that `layers_of` returns the layers of all weights."""

ROWS: Final = 256
"""Maximum number of rows per sample and product: scales depend on means over all rows."""


def scale_by_activations(
    graph: Graph,
    plan: Plan,
    samples: Samples,
) -> tuple[list[Scaled], list[Refusal]]:
    """Scale the inputs of the matrix products that `plan` rounds, by their input activations on the data, in place.

    The data are processed once, or several times if the moments of all products exceed the memory budget. A Mul is
    inserted before products only if no activation is quantized, because the plan fixes the position of Q/DQ pairs. See
    `awq`.

    Args:
        graph, plan: a graph and its plan; the plan remains valid.
        samples: of the graph.

    Returns:
        The scaled tensors; refusals with the reason for all others.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    sites = tuple(
        replace(site, rounding=replace(LOOKS, scale=site.rounding.scale)) if site.role == "weight" else site
        for site in plan.sites
    )
    layers, _ = layers_of(graph, replace(plan, sites=sites), correct=False)
    layers = [layer for layer in layers if layer.node.op in MATRIX_PRODUCTS and layer.layout.groups == 1]
    budget = samples.options.memory_bytes
    shared = [
        Refusal(STEP, layer.tensor, Reason("weight-is-shared", SHARED.format(layer.node.name)))
        for layer in layers
        if layer.others
    ]
    layers, refusals = in_budget((layer for layer in layers if not layer.others), budget, two_streams=False)
    refusals = [*shared, *refusals]
    scaled: list[Scaled] = []
    if not layers:
        return scaled, refusals
    with one_blas_thread(), samples.canonical() as units:
        for number, some in enumerate(_passes(layers, budget)):
            samples.options.progress.start(f"scaling by activations, pass {number + 1}", samples.data.count)
            seen = watched(some, two_streams=False, rows=lambda layer: ROWS, seed=0)
            sums = [watched_input for watched_input in seen if isinstance(watched_input, Watched)]
            sum_inputs(graph, sums, units)
            aware = {
                layer.node.name: Aware(watched_input.moments(layer), _fake_quant(layer.site, plan.scale_rule))
                for watched_input in sums
                for layer in watched_input.layers
            }
            done, declined = awq(graph, aware, multiply=not plan.of_role("activation"))
            scaled += done
            refusals += declined
    return scaled, refusals


def _fake_quant(site: Site, rule: ScaleRule) -> Callable[[Array], Array]:
    """Return the fake quantization of a weight, as in the exported file."""

    def fake_quant(weight: Array) -> Array:
        return params_from_bounds(weight_bounds(site, weight, rule), site.spec, rule=rule).fake_quant(weight)

    return fake_quant


def _passes(layers: Sequence[Layer], memory: int) -> Iterator[list[Layer]]:
    """Yield groups of layers whose moments fit into `memory` together. Layers that read one tensor stay together."""
    by_tensor: dict[str, list[Layer]] = {}
    for layer in layers:
        by_tensor.setdefault(layer.tensor, []).append(layer)

    def size(group: Sequence[Layer]) -> int:
        return max(layer.bytes_of_moments(two_streams=False) for layer in group)

    for groups in within(by_tensor.values(), size, memory):
        yield [layer for group in groups for layer in group]
