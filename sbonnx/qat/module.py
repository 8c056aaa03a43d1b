"""`trainable`: a calibrated plan as a torch module, with a fake-quant module where the file will have a Q/DQ pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx.calib.qparams.safe_scales import limits_for
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import constant, tensors_by_name
from sbonnx.ops import STANDARD_DOMAINS
from sbonnx.plan import Site, Solution
from sbonnx.prepare import Prepared, Source
from sbonnx.qat.biases import BiasCodes
from sbonnx.qat.fakequant import FakeQuant, Role, make_fake_quant
from sbonnx.qat.fakequant.pact import Pact
from sbonnx.qat.methods import LearningMethod, Methods
from sbonnx.qat.onnx_to_torch.operators import Op
from sbonnx.qat.onnx_to_torch.reimport import parameter_name, reimport, site_of
from sbonnx.spec import Array, QParams, ScaleLimits

KEPT: Final = "sbonnx"
"""Key of ``module.meta`` under which all of this package lies."""

ORIGIN: Final = "origin"
SOURCE: Final = "source"

QUANTIZERS: Final = "quantizers"
"""Name of the submodule that holds the fake-quant modules."""

INSIDE: Final = 0.1
"""How far from its code, in codes, a weight may begin that was rounded elsewhere than to its nearest: at half a code
the first step of training would round it back, and with all others what the rounding had gained."""


@dataclass(frozen=True)
class Origin:
    """Where a module comes from, and so where it goes back to. Copies of the module share it.

    Attributes:
        prepared: graph and plan, as calibrated.
        solution: what calibration found.
        sites: the sites that have a fake-quant module, by its name among the modules; several where they share a scale.
        inputs: what the module calls each input of the graph; not those that are fixed.
        settled: what `reimport` was told beside the graph: `fixed` and `shapes`.
    """

    prepared: Prepared
    solution: Solution
    sites: Mapping[str, tuple[Site, ...]]
    inputs: Mapping[str, str]
    settled: Mapping[str, Any] = field(default_factory=dict)

    def feed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the module takes of a feed: by its own names, without what is fixed.

        Raises:
            DataError: an input that is fixed has another value.
        """
        for name, value in (self.settled.get("fixed") or {}).items():
            if name in values and not np.array_equal(np.asarray(values[name]), np.asarray(value)):
                raise DataError(f"'{name}' is fixed to {value}, and a feed has {values[name]}: leave such feeds out")
        return {self.inputs[name]: value for name, value in values.items() if name in self.inputs}

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The graph as bytes: its weights may lie mapped in a file."""
        model = graphs.to_proto(self.prepared.graph).SerializeToString()
        rest = {each.name: getattr(self.prepared, each.name) for each in fields(Prepared) if each.name != "graph"}
        return _unpacked, (model, rest, self.solution, self.sites, self.inputs, self.settled)


def _unpacked(model: bytes, rest: Mapping[str, Any], *others: Any) -> Origin:
    """An origin from what was pickled of it."""
    proto = onnx.ModelProto.FromString(model)
    own = next(entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS)
    return Origin(Prepared(graph=graphs.load(proto, opset=own), **rest), *others)


def trainable(
    prepared: Prepared,
    solution: Solution,
    *,
    weights: str | None = None,
    activations: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    device: str = "cpu",
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> fx.GraphModule:
    """The float graph in torch, and a fake-quant module in front of every read that the plan quantizes.

    It begins where calibration ended: at its scales and zero points, its corrected biases, and its codes. A weight
    that was rounded to another code than the nearest begins at the value within that code which is nearest to it.

    Args:
        prepared, solution: of one calibration; not changed.
        weights, activations: a method of `sbonnx.qat.fakequant.METHODS` each, for all layers; None: by QUANTIZER.TYPE
            of the recipe, its entries of SPECIFIC included, and "lsq" where that names none that learns.
        options: of methods, by their name.
        device: torch's name.
        fixed, shapes: values and shapes of inputs, which decide branches: see `settle`. What is quantized in a branch
            that is not taken stays as calibrated.

    Raises:
        ModelError: an op that torch cannot compute here, a branch that is not decided, or a read that the plan
            quantizes and the reimported graph does not have; named.
        RecipeError: a method that there is not, or one that does not take such a tensor.
    """
    graph = graphs.copy(prepared.graph)
    begin_at(graph, prepared, solution)
    settled = {"fixed": fixed, "shapes": shapes}
    module = reimport(graph, device=device, **settled)
    planned = _still_read(prepared.plan.sites, module) if fixed or shapes else prepared.plan.sites
    tensors = tensors_by_name(prepared.graph)
    module.add_submodule(QUANTIZERS, nn.ModuleDict())
    methods = Methods(prepared, weights, activations)
    shared: dict[tuple[str, str], str] = {}
    sites: dict[str, tuple[Site, ...]] = {}
    for site in planned:
        qparams = solution.qparams.get(site.key)
        if site.role == "bias" or qparams is None:
            continue
        key = (site.group, qparams.spec.label())
        if key not in shared:
            shared[key] = f"{QUANTIZERS}.{_plain(site.key, len(shared))}"
            limits = limits_for(prepared.plan, tensors[site.tensor])
            made = _made(site, qparams, methods.of(site), limits, options or {})
            module.add_submodule(shared[key], made.to(device))
        sites[shared[key]] = (*sites.get(shared[key], ()), site)
        _read_through(module, site, shared[key], solution)
    _with_biases(module, [site for site in planned if site.role == "bias"], solution, sites)
    module.graph.lint()
    module.recompile()
    _begin_latent(module, sites)
    inputs = {source: name for name, source in module.meta[KEPT]["inputs"].items()}
    told = replace(prepared, refusals=(*prepared.refusals, *methods.refusals))
    module.meta[KEPT][ORIGIN] = Origin(told, solution, sites, inputs, settled)
    return module.eval()


def _made(
    site: Site, qparams: QParams, method: LearningMethod, limits: ScaleLimits, options: Mapping[str, Mapping[str, Any]]
) -> FakeQuant:
    """The fake-quant module that a site begins with."""
    role: Role = "weight" if site.role == "weight" else "activation"
    chosen = options.get(method.name, {})
    made = make_fake_quant(method.name, qparams.spec, qparams, name=site.key, role=role, limits=limits, **chosen)
    if method.alpha is not None and isinstance(made, Pact):
        made.clip_at(method.alpha)
    return made


def keep_source(module: fx.GraphModule, model: Source) -> None:
    """Remember the float model that a file is to be held against."""
    module.meta[KEPT][SOURCE] = model


def source_of(module: nn.Module) -> Source:
    """The float model that was remembered.

    Raises:
        ModelError: none was, or the module is none of `trainable`'s.
    """
    held = unwrapped(module).meta[KEPT]
    if SOURCE not in held:
        raise ModelError("the module does not know its float model: make it with sbonnx.qat.prepare, or keep_source")
    found: Source = held[SOURCE]
    return found


def unwrapped(module: nn.Module) -> fx.GraphModule:
    """The module that `trainable` made, out of what wraps it: DistributedDataParallel, AveragedModel, torch.compile.

    Raises:
        ModelError: there is none inside.
    """
    inner = module
    while hasattr(inner, "_orig_mod") or ORIGIN not in getattr(inner, "meta", {}).get(KEPT, {}):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)  # a compiled one lends its meta
        if inner is None:
            raise ModelError("this module was not made by sbonnx.qat: there is no graph to write it back into")
    return inner


def origin_of(module: nn.Module) -> Origin:
    """Where a module comes from; wrappers are looked through.

    Raises:
        ModelError: it is none of `trainable`'s.
    """
    found: Origin = unwrapped(module).meta[KEPT][ORIGIN]
    return found


def float_twin(module: nn.Module, *, device: str = "cpu") -> fx.GraphModule:
    """The float network that `module` is quantized from, for its outputs to be learned from; in eval mode."""
    origin = origin_of(module)
    twin = reimport(origin.prepared.graph, device=device, **origin.settled).eval()
    return twin.requires_grad_(False)


def weight_parameter(module: fx.GraphModule, site: Site) -> torch.Tensor:
    """The parameter that stands for the weight of `site`."""
    found: torch.Tensor = module.get_parameter(parameter_name(module, site.tensor))
    return found


def _plain(key: str, number: int) -> str:
    """A name that torch takes, unique by its number."""
    return f"{''.join(letter if letter.isalnum() else '_' for letter in key)}_{number}"


def _still_read(sites: Sequence[Site], module: fx.GraphModule) -> list[Site]:
    """The sites as far as they have readers in the module: a branch that is not taken has none."""
    here = {part.call.name for part in module.modules() if isinstance(part, Op)}
    left = [replace(site, readers=tuple(reader for reader in site.readers if reader.node in here)) for site in sites]
    return [site for site in left if site.readers]


def _read_through(module: fx.GraphModule, site: Site, name: str, solution: Solution) -> None:
    """Put a call of the fake-quant module `name` between the tensor of `site` and its readers."""
    reads: list[tuple[fx.Node, int]] = [
        site_of(module, reader.node, reader.index) for reader in site.readers if reader not in solution.unread
    ]
    sources: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node, place in reads:
        source = node.args[place]
        if not isinstance(source, fx.Node):
            raise ModelError(f"'{site.tensor}' is quantized where torch has a number in its place: exclude that node")
        sources.setdefault(source, []).append((node, place))
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for source, uses in sources.items():
        first = min((node for node, _ in uses), key=order.__getitem__)
        with module.graph.inserting_before(first):
            call = module.graph.call_module(name, (source,))
        for node, place in uses:
            node.update_arg(place, call)


def _with_biases(
    module: fx.GraphModule, biases: Sequence[Site], solution: Solution, sites: Mapping[str, Sequence[Site]]
) -> None:
    """Biases that the file will have as codes are rounded to them in eval mode."""
    names = {site.key: name for name, some in sites.items() for site in some}
    for number, site in enumerate(biases):
        if site.key not in solution.bias_scales or site.follows is None:
            continue
        activation, weight = (module.get_submodule(names[key]) for key in site.follows)
        assert isinstance(activation, FakeQuant) and isinstance(weight, FakeQuant)
        name = f"{QUANTIZERS}.{_plain(site.key, len(sites) + number)}"
        module.add_submodule(name, BiasCodes(activation, weight))
        _read_through(module, site, name, solution)


def _begin_latent(module: fx.GraphModule, sites: Mapping[str, Sequence[Site]]) -> None:
    """Weights of methods that reshape them begin where their reshaped values are the float ones."""
    with torch.no_grad():
        for name, some in sites.items():
            fake_quant = module.get_submodule(name)
            assert isinstance(fake_quant, FakeQuant)
            for site in some:
                if site.role == "weight":
                    weight = weight_parameter(module, site)
                    weight.copy_(fake_quant.latent_weight(weight))


def begin_at(graph: Graph, prepared: Prepared, solution: Solution) -> None:
    """In place. The constants of `graph` take the values that training begins at."""
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
    """The value nearest to each weight that is rounded to its code: the weight itself where that is its nearest code.

    Args:
        weight: float; `codes`: of its shape.
    """
    near = qparams.quantize(weight) == codes
    middle = qparams.dequantize(codes).astype(np.float64)
    reach = INSIDE * qparams.along(qparams.scale, weight.shape).astype(np.float64)
    inside = np.clip(weight.astype(np.float64), middle - reach, middle + reach)
    return np.where(near, weight, inside).astype(weight.dtype)


def set_values(tensor: Any, values: Array) -> None:
    """In place. A constant takes other values, of its own type and shape."""
    if not isinstance(tensor, Constant):
        raise ModelError(f"'{getattr(tensor, 'name', tensor)}' is no constant of the graph: nothing to write into")
    known = np.asarray(constant(tensor))
    tensor.values = np.asarray(values, known.dtype).reshape(known.shape)


__all__ = [
    "Origin",
    "float_twin",
    "keep_source",
    "origin_of",
    "source_of",
    "trainable",
    "unwrapped",
    "weight_parameter",
    "within_codes",
]
