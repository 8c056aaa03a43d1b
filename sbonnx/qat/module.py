"""`trainable`: a calibrated plan as a torch module, with a fake-quant module for each Q/DQ pair of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, cast

import numpy as np
import onnx
import torch
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx.calib.qparams.safe_scales import limits_for
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import Graph
from sbonnx.graph.query import constant, node_by_name, tensors_by_name
from sbonnx.ops import STANDARD_DOMAINS
from sbonnx.planning import Site, Solution
from sbonnx.qat.fakequant import METHODS, BiasCodes, FakeQuant, Role, make_fake_quant
from sbonnx.qat.fakequant.methods import ParameterizedClipping
from sbonnx.recipe import TensorSettings
from sbonnx.recipe.names import LEARNED, UNIFORM, SideName
from sbonnx.report import Reason, Refusal
from sbonnx.rounding.base import SPARSE
from sbonnx.spec import Array, QParams, ScaleLimits
from sbonnx.stages.state import Prepared, PrunedModel, Source
from sbonnx.torchnet.onnx_to_torch.operators import NodeModule
from sbonnx.torchnet.onnx_to_torch.reimport import META, parameter_name, reimport, site_of
from sbonnx.torchnet.onnx_to_torch.write_back import set_values
from sbonnx.training.distillation import require_same_interface
from sbonnx.training.fixed_zeros import keep_zeros

DEFAULT: Final = "lsq"
"""Default method, if neither the call nor the recipe names one."""

ORIGIN: Final = "origin"
SOURCE: Final = "source"

QUANTIZERS: Final = "quantizers"
"""Name of the submodule that holds the fake-quant modules."""

INSIDE: Final = 0.1
"""Largest initial distance of a weight from its quantized value, in quantization steps, if calibration did not round
it to nearest. At a distance of half a step, the first training step could round it back and undo the gain of the
weight rounding (GPTQ, AdaRound)."""


@dataclass(frozen=True)
class ModuleOrigin:
    """Calibration that a module was made from, needed for the export. Copies of the module share it.

    Attributes:
        prepared: graph and plan, as calibrated.
        solution: result of the calibration.
        sites: sites by the name of their fake-quant module; several if they share a scale.
        inputs: name in the module of each input of the graph, without fixed inputs.
        specialization: arguments `fixed` and `shapes` of `reimport`.
        teacher: float graph to learn from, with the same inputs and outputs; None: that of `prepared`.
    """

    prepared: Prepared
    solution: Solution
    sites: Mapping[str, tuple[Site, ...]]
    inputs: Mapping[str, str]
    specialization: Mapping[str, Any] = field(default_factory=dict)
    teacher: Graph | None = None

    def feed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a feed of the model to arguments of the module: renamed, without fixed inputs.

        Raises:
            DataError: the feed has another value for a fixed input.
        """
        for name, value in (self.specialization.get("fixed") or {}).items():
            if name in values and not np.array_equal(np.asarray(values[name]), np.asarray(value)):
                raise DataError(f"'{name}' is fixed to {value}, but a feed has {values[name]}: leave such feeds out")
        return {self.inputs[name]: value for name, value in values.items() if name in self.inputs}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleOrigin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the graph as bytes, because its weights may be memory-mapped from a file."""
        model = _packed(self.prepared.graph)
        rest = {field.name: getattr(self.prepared, field.name) for field in fields(Prepared) if field.name != "graph"}
        teacher = None if self.teacher is None else _packed(self.teacher)
        return _unpacked, (model, teacher, rest, self.solution, self.sites, self.inputs, self.specialization)


PackedGraph = tuple[bytes, frozenset[str]]
"""A serialized graph, and the names of the tensors whose types its file states."""


def _packed(graph: Graph) -> PackedGraph:
    return graphs.to_proto(graph).SerializeToString(), graph.info.declared


def _unpacked(model: PackedGraph, teacher: PackedGraph | None, rest: Mapping[str, Any], *others: Any) -> ModuleOrigin:
    origin = ModuleOrigin(Prepared(graph=_unpacked_graph(model), **rest), *others)
    return origin if teacher is None else replace(origin, teacher=_unpacked_graph(teacher))


def _unpacked_graph(packed: PackedGraph) -> Graph:
    model, declared = packed
    proto = onnx.ModelProto.FromString(model)
    own = next(entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS)
    graph = graphs.load(proto, opset=own)
    graph.info.declared = declared
    return graph


@dataclass(frozen=True)
class LearningMethod:
    """A key of `METHODS`, and the initial clipping level of PACT (None: from the calibration)."""

    name: str
    alpha: float | None = None


@dataclass
class Methods:
    """Selects the method of each site and creates its fake-quant module.

    Attributes:
        prepared: graph, plan and recipe.
        weights, activations: method of every site of that role; None: from the recipe.
        options: options of methods, by method name.
        refusals: methods that were not used because layers that share a fake-quant module ask for different ones.
    """

    prepared: Prepared
    weights: str | None = None
    activations: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nodes = node_by_name(self.prepared.graph)

    def make(self, site: Site, qparams: QParams, limits: ScaleLimits) -> FakeQuant:
        """Create the fake-quant module of a site, initialized with the calibrated `qparams`."""
        method, role = self.of(site), cast("Role", site.role)
        options = self.options.get(method.name, {})
        fake_quant = make_fake_quant(method.name, qparams, name=site.key, role=role, limits=limits, **options)
        if method.alpha is not None and isinstance(fake_quant, ParameterizedClipping):
            fake_quant.clip_at(method.alpha)
        return fake_quant

    def of(self, site: Site) -> LearningMethod:
        """Return the method of one site; if the recipe has different ones for its readers, that of the first reader."""
        side: SideName = "w" if site.role == "weight" else "a"
        given = self.weights if side == "w" else self.activations
        if given is not None:
            return LearningMethod(given)
        asked: dict[LearningMethod, str] = {}
        for reader in site.readers:
            node = self._nodes[reader.node]
            settings = self.prepared.recipe.settings(side, node=node.name, op=node.op, tensor=site.tensor)
            asked.setdefault(self._named(side, settings), node.name)
        first, *others = asked or {LearningMethod(DEFAULT): ""}
        for other in others:
            why = Reason(
                "one-method-for-readers",
                f"'{asked[other]}' reads the same tensor as '{asked[first]}', which asks for {first.name}",
            )
            self.refusals.append(Refusal(f"train with {other.name}", site.tensor, why))
        return first

    def _named(self, side: SideName, settings: TensorSettings) -> LearningMethod:
        """Return the method of these settings; `uniform` only if the recipe's type for this side is a learned one."""
        recipe = self.prepared.recipe
        learned = (recipe.w if side == "w" else recipe.a).quantizer.type in LEARNED
        if settings.quantizer not in METHODS or (settings.quantizer == UNIFORM and not learned):
            return LearningMethod(DEFAULT)
        alpha = settings.quantizer_arguments.get("alpha")
        return LearningMethod(settings.quantizer, None if alpha is None else float(alpha))


def trainable(  # noqa: PLR0913 - public entry point
    prepared: Prepared,
    solution: Solution,
    *,
    weights: str | None = None,
    activations: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    device: str = "cpu",
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    zeros: float = SPARSE,
) -> fx.GraphModule:
    """Import the float graph into torch, with a fake-quant module before every input that the plan quantizes.

    The module is initialized with the result of the calibration: scales, zero points, corrected biases and quantized
    weights. A weight that was not rounded to nearest is moved close to its quantized value; see `within_codes`. Zeros
    of sparse weights stay zero in training, as they do in rounding.

    Args:
        prepared, solution: result of one calibration; not changed.
        weights, activations, options, device, fixed, shapes: see `sbonnx.qat.prepare`. Sites in branches that are not
            taken stay as calibrated.
        zeros: share of zeros from which a weight is sparse; 0: any zero is kept.

    Raises:
        ModelError: an op is not supported in torch, the condition of a branch is not constant, or the plan quantizes
            an input that the imported graph does not have; the message names it.
        RecipeError: an unknown method, or a method that does not support the tensor.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    graph = graphs.copy(prepared.graph)
    _set_initial_values(graph, prepared, solution)
    specialization = {"fixed": fixed, "shapes": shapes}
    module = reimport(graph, device=device, **specialization)
    keep_zeros(module, zeros)
    planned = _without_missing_readers(prepared.plan.sites, module) if fixed or shapes else prepared.plan.sites
    tensors = tensors_by_name(prepared.graph)
    module.add_submodule(QUANTIZERS, nn.ModuleDict())
    methods = Methods(prepared, weights, activations, options or {})
    shared: dict[tuple[str, str], str] = {}
    sites: dict[str, tuple[Site, ...]] = {}
    for site in planned:
        qparams = solution.qparams.get(site.key)
        if site.role == "bias" or qparams is None:
            continue
        key = (site.group, qparams.spec.label())
        if key not in shared:
            shared[key] = f"{QUANTIZERS}.{_submodule_name(site.key, len(shared))}"
            limits = limits_for(prepared.plan, tensors[site.tensor])
            module.add_submodule(shared[key], methods.make(site, qparams, limits).to(device))
        sites[shared[key]] = (*sites.get(shared[key], ()), site)
        _insert_call(module, site, shared[key], solution)
    _quantize_biases(module, planned, solution, sites)
    module.graph.lint()
    module.recompile()
    _set_latent_weights(module, sites)
    inputs = {source: name for name, source in module.meta[META]["inputs"].items()}
    refusals = [refusal for refusal in prepared.refusals if refusal.code != "needs-training"]
    calibrated = replace(prepared, refusals=(*refusals, *methods.refusals))
    module.meta[META][ORIGIN] = ModuleOrigin(calibrated, solution, sites, inputs, specialization)
    return module.eval()


def keep_source(module: fx.GraphModule, model: Source, pruned: PrunedModel | None = None) -> None:
    """Store the float model that the exported file is compared with, and the pruned one that was quantized."""
    module.meta[META][SOURCE] = model, pruned


def source_of(module: nn.Module) -> tuple[Source, PrunedModel | None]:
    """Return what `keep_source` stored.

    Raises:
        ModelError: no model was stored, or the module was not made by `trainable`.
    """
    stored = unwrapped(module).meta[META]
    if SOURCE not in stored:
        raise ModelError("the module has no float model: make it with sbonnx.qat.prepare, or call keep_source")
    source: tuple[Source, PrunedModel | None] = stored[SOURCE]
    return source


def unwrapped(module: nn.Module) -> fx.GraphModule:
    """Return the module that `trainable` made, without wrappers: DistributedDataParallel, AveragedModel, torch.compile.

    Raises:
        ModelError: there is no such module inside.
    """
    inner = module
    while hasattr(inner, "_orig_mod") or ORIGIN not in getattr(inner, "meta", {}).get(META, {}):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)  # a compiled module forwards `meta`
        if inner is None:
            raise ModelError("this module was not made by sbonnx.qat: it has no ONNX graph to export to")
    return inner


def origin_of(module: nn.Module) -> ModuleOrigin:
    """Return the origin of a module, wrapped or not.

    Raises:
        ModelError: the module was not made by `trainable`.
    """
    origin: ModuleOrigin = unwrapped(module).meta[META][ORIGIN]
    return origin


def set_teacher(module: fx.GraphModule, teacher: Graph) -> None:
    """Let the module learn from another float graph than its own, such as the model before pruning.

    Raises:
        ModelError: the graph has other inputs or outputs.
    """
    origin = origin_of(module)
    require_same_interface(origin.prepared.graph, teacher)
    module.meta[META][ORIGIN] = replace(origin, teacher=teacher)


def teacher_graph(origin: ModuleOrigin) -> Graph:
    """Return the float graph that the module learns from."""
    return origin.prepared.graph if origin.teacher is None else origin.teacher


def float_twin(module: nn.Module, *, device: str = "cpu") -> fx.GraphModule:
    """Return the float network that `module` learns from, frozen and in eval mode, as teacher for distillation."""
    origin = origin_of(module)
    twin = reimport(teacher_graph(origin), device=device, **origin.specialization).eval()
    return twin.requires_grad_(False)


def weight_parameter(module: fx.GraphModule, site: Site) -> torch.Tensor:
    """Return the parameter of the weight of `site`."""
    weight: torch.Tensor = module.get_parameter(parameter_name(module, site.tensor))
    return weight


def _submodule_name(key: str, number: int) -> str:
    """Return a valid submodule name, made unique by the number."""
    return f"{''.join(letter if letter.isalnum() else '_' for letter in key)}_{number}"


def _without_missing_readers(sites: Sequence[Site], module: fx.GraphModule) -> list[Site]:
    """Return the sites with only those readers that exist in the module; branches that are not taken have none."""
    nodes = {part.call.name for part in module.modules() if isinstance(part, NodeModule)}
    left = [replace(site, readers=tuple(reader for reader in site.readers if reader.node in nodes)) for site in sites]
    return [site for site in left if site.readers]


def _insert_call(module: fx.GraphModule, site: Site, name: str, solution: Solution) -> None:
    """Insert a call of the fake-quant module `name` between the tensor of `site` and its readers."""
    reads: list[tuple[fx.Node, int]] = [
        site_of(module, reader.node, reader.index) for reader in site.readers if reader not in solution.unread
    ]
    sources: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node, place in reads:
        source = node.args[place]
        if not isinstance(source, fx.Node):
            raise ModelError(f"'{site.tensor}' is quantized, but a Python number in torch: exclude its reader")
        sources.setdefault(source, []).append((node, place))
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for source, uses in sources.items():
        first = min((node for node, _ in uses), key=order.__getitem__)
        with module.graph.inserting_before(first):
            call = module.graph.call_module(name, (source,))
        for node, place in uses:
            node.update_arg(place, call)


def _quantize_biases(
    module: fx.GraphModule, planned: Sequence[Site], solution: Solution, sites: Mapping[str, Sequence[Site]]
) -> None:
    names = {site.key: name for name, some in sites.items() for site in some}
    for number, site in enumerate(site for site in planned if site.role == "bias"):
        if site.key not in solution.bias_scales or site.follows is None:
            continue
        activation, weight = (module.get_submodule(names[key]) for key in site.follows)
        assert isinstance(activation, FakeQuant) and isinstance(weight, FakeQuant)
        name = f"{QUANTIZERS}.{_submodule_name(site.key, len(sites) + number)}"
        module.add_submodule(name, BiasCodes(activation, weight))
        _insert_call(module, site, name, solution)


def _set_latent_weights(module: fx.GraphModule, sites: Mapping[str, Sequence[Site]]) -> None:
    """Initialize the latent weights of methods that reshape weights so that the reshaped weights are the float ones."""
    with torch.no_grad():
        for name, some in sites.items():
            fake_quant = module.get_submodule(name)
            assert isinstance(fake_quant, FakeQuant)
            for site in some:
                if site.role == "weight":
                    weight = weight_parameter(module, site)
                    weight.copy_(fake_quant.latent_weight(weight))


def _set_initial_values(graph: Graph, prepared: Prepared, solution: Solution) -> None:
    tensors = tensors_by_name(graph)
    for name, values in solution.constants.items():
        set_values(tensors[name], values)
    for site in prepared.plan.of_role("weight"):
        codes, qparams = solution.codes.get(site.key), solution.qparams.get(site.key)
        if codes is not None and qparams is not None:
            tensor = tensors[site.tensor]
            value = np.asarray(constant(tensor))
            set_values(tensor, within_codes(value, codes, qparams))


def within_codes(weight: Array, codes: Array, qparams: QParams) -> Array:
    """Move each weight that does not round to its code to at most `INSIDE` steps from it; the others stay unchanged.

    Args:
        weight: float weights.
        codes: integer codes of the same shape.
        qparams: scale and zero point of the codes.
    """
    near = qparams.quantize(weight) == codes
    middle = qparams.dequantize(codes).astype(np.float64)
    reach = INSIDE * qparams.along(qparams.scale, weight.shape).astype(np.float64)
    inside = np.clip(weight.astype(np.float64), middle - reach, middle + reach)
    return np.where(near, weight, inside).astype(weight.dtype)
