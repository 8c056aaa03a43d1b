"""`Recipe`: all settings of a user, parsed and validated once."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, final

from sbonnx.backends import BACKENDS, backend_for
from sbonnx.backends.mode_limits import STATIC
from sbonnx.recipe import defaults as default_values
from sbonnx.recipe import names, value_types
from sbonnx.recipe.backend_limits import BackendLimits
from sbonnx.recipe.names import is_per_channel
from sbonnx.recipe.node_patterns import PatternUse, resolve_patterns, slow_problem
from sbonnx.recipe.problem import KeyOrigin, ManyWrong, Wrong, key_path
from sbonnx.recipe.resolve import (
    Part,
    TensorSettings,
    changed,
    changes,
    effective,
    first_hit,
    tensor_hit,
)
from sbonnx.recipe.sections.base import canonical, key
from sbonnx.recipe.sections.sparsity import modern_section
from sbonnx.recipe.sections.whole import RecipeKeys
from sbonnx.recipe.torch_modules import NodeInfo


def key_paths(data: Mapping[str, Any]) -> frozenset[str]:
    """Return the paths of all keys of nested mappings, joined with dots: "W", "W.QUANTIZER", "W.QUANTIZER.BIT"."""
    inner = (
        {f"{name}.{path}" for path in key_paths(value)} for name, value in data.items() if isinstance(value, Mapping)
    )
    return frozenset(data).union(*inner)


@final
class Recipe(RecipeKeys):
    """All settings of the user: every key has a value, and the backend accepts them.

    Created by `sbonnx.recipe.load`. Attributes are the keys of the YAML in lower case. Two recipes are equal if
    their values are equal, wherever they were written.
    """

    backend: Annotated[str, value_types.AnyCase(BACKENDS)] = key(
        default_values.BACKEND, "the runtime that the model is made for", ", ".join(BACKENDS)
    )

    _source: ClassVar[dict[str, Any]] = {}
    _origin: ClassVar[KeyOrigin] = KeyOrigin()
    _named: ClassVar[Mapping[str, Mapping[str, frozenset[str]]]] = {}

    @classmethod
    def _rename(cls, data: dict[str, Any]) -> dict[str, Any]:
        return modern_section(data)

    @classmethod
    def read(cls, data: Any) -> Recipe:
        """Create the recipe from a mapping, see `Section.read`. All other keys have their defaults.

        Raises:
            Wrong, ManyWrong: unknown keys, invalid values, or ones that the backend does not support.
        """
        if isinstance(data, cls):
            return data
        given = canonical(cls, data)
        return super().read(default_values.complete(given))._with(_source=given)

    def _with(self, **private: Any) -> Recipe:
        recipe = copy.copy(self)
        recipe.__dict__.update(private)
        return recipe

    def _check(self) -> None:
        problems = tuple(self._limit_problems())
        if problems:
            raise ManyWrong(problems)

    def _limit_problems(self) -> Iterator[Wrong]:
        yield from self.verify.problems()
        limits = BackendLimits(backend_for(self.backend, self.version), self.mode, self.version)
        yield from limits.search_problems(auto=self.auto.enable, mixed=self.mixed.wanted)
        yield from limits.tuning_problems(self.tune.goal, self.float_nodes)
        unsupported = tuple(limits.mode_problems(self.format, self.weights))
        if unsupported:
            yield from unsupported
            return
        seen = set()
        for part in self._parts:
            for problem in limits.part_problems(part):
                problem_key = (part.side, problem.path[len(part.path) :], problem.value)
                if problem_key not in seen:  # a problem of the whole side recurs in each entry of its SPECIFIC
                    yield problem
                if not part.pattern:
                    seen.add(problem_key)
        ends = {"FIRST_BITS": self.first_bits, "LAST_BITS": self.last_bits}
        for name, bits in ends.items():
            yield from limits.ends_problems(name, bits)
        if self.embedding_bits is not None:
            yield from limits.bits_problems("W", ("EMBEDDING_BITS",), self.embedding_bits)
        yield from limits.precision_problems(
            self.high_precision, integers=not all(part.is_float for part in self._parts)
        )
        yield from limits.override_problems(self.tensor_overrides)
        yield from limits.graph_end_problems(self.quantize_io)
        yield from limits.type_problems(self._parts, ends)
        if self.schedule.bn_tuning and not is_per_channel(self.w.qscheme):
            text = "must be per-channel-symmetric or per-channel-affine when SCHEDULE.BN_TUNING is true"
            yield Wrong(text, path=("W", "QSCHEME"), value=self.w.qscheme)

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        """Values of both sides, each followed by those of its entries of SPECIFIC."""
        parts = []
        for name, side in (("W", self.w), ("A", self.a)):
            parts.append(Part(name, (name,), "", side, self._narrowest, self._widths))
            for index, pattern, change in changes(side):
                path = (name, "SPECIFIC", index, pattern)
                parts.append(Part(name, path, pattern, effective(side, change), self._narrowest, self._widths))
        return tuple(parts)

    @property
    def usual_level(self) -> int:
        """Accuracy level of products of which nothing else is known: 4 if ACCURACY_LEVEL is auto."""
        return 4 if self.accuracy_level == "auto" else self.accuracy_level

    @property
    def _widths(self) -> default_values.Widths:
        return default_values.widths_of(self.effort, self.mode)

    @property
    def rounding_samples(self) -> int | None:
        """Number of samples that the rounding of weights and the correction of biases see; None: all."""
        chosen = self.calibration.moments.samples
        if chosen is None:
            return default_values.by_width(self._narrowest, self._widths).samples
        return chosen or None

    @property
    def _narrowest(self) -> int:
        """Least width of the sides that are quantized."""
        sides = (self.w, self.a) if self.mode == STATIC else (self.w,)
        widths = (side.quantizer.bit for side in sides if not side.quantizer.disable)
        return min(filter(None, widths), default=value_types.MAX_BITS)

    @property
    def weight_settings(self) -> TensorSettings:
        """Settings of weights that no entry of SPECIFIC and no other key changes."""
        return self._parts[0].settings

    def corrects_biases(self, ops: Collection[str], *, depthwise: bool) -> bool:
        """Whether biases are corrected by measured mean errors.

        Args:
            ops: types of the linear operators of the network.
            depthwise: it has depthwise convolutions, whose few weights per output shift its mean most.
        """
        if self.bias_correction != "auto":
            return self.bias_correction == "empirical"
        measured = self.mode == STATIC and self.weight_settings.enabled
        return (depthwise and measured) or self._rounds_by_inputs(ops)

    def _rounds_by_inputs(self, ops: Collection[str]) -> bool:
        """Whether the rounding of some weight uses the input activations of its layer."""
        wished = [part.settings for part in self._parts if part.side == "W"]
        ends = [ends.w for ends in (self.first_bits, self.last_bits) if ends.w is not None]
        wished += [wished[0].of_bits(bits, wished[0].why) for bits in ends]
        return any(
            replace(effective_keys, op=op).rounds_by_inputs
            for effective_keys in wished
            if effective_keys.enabled
            for op in ops
        )

    def settings(
        self,
        side: names.SideName,
        *,
        node: str,
        op: str,
        tensor: str,
        place: names.Place = "",
        embedding: bool = False,
    ) -> TensorSettings:
        """Return the settings of `tensor` as weight ("w") or activation ("a") of one node that reads it.

        In increasing precedence: the values of the whole side; EMBEDDING_BITS; FIRST_BITS or LAST_BITS; the first entry
        of SPECIFIC that matches; INCLUDE, EXCLUDE and SKIP_TRACE_MODULES.

        Args:
            node, op, tensor: original name and operator type of the reader, original name of the tensor.
            place: "first" or "last" if the node is the first or last linear layer of the model.
            embedding: the node reads rows of a table, or is the head with an output for each row.
        """
        keys = replace(self._wished(side, node, op, tensor, place, embedding), op=op)
        for name, patterns in (("SKIP_TRACE_MODULES", self.skip_trace_modules), ("EXCLUDE", self.exclude)):
            index = first_hit(patterns, node, op, tensor, self.nodes_of(name))
            if index is not None:
                return keys.off(f"{name}[{index}]")
        if self.include and first_hit(self.include, node, op, tensor, self.nodes_of("INCLUDE")) is None:
            return keys.off("INCLUDE")
        return keys

    def _wished(
        self, side: names.SideName, node: str, op: str, tensor: str, place: names.Place, embedding: bool
    ) -> TensorSettings:
        whole, *entries = (part for part in self._parts if part.side == side.upper())
        for part in entries:
            if changed(part.pattern, node, op, tensor, self.nodes_of(part.side)):
                return part.settings
        ends = {"": None, "first": self.first_bits, "last": self.last_bits}[place]
        bits = None if ends is None else ends.w if side == "w" else ends.a
        if bits is None and embedding and side == "w" and self.embedding_bits is not None and not whole.is_float:
            wide = whole.settings.of_bits(self.embedding_bits, "EMBEDDING_BITS")
            return replace(wide, narrowest=self.embedding_bits or value_types.MAX_BITS)
        if bits is None or whole.is_float:
            return whole.settings
        why = f"{place.upper()}_BITS.{whole.side}"
        return whole.settings.of_bits(bits, why)

    def fixed_range(self, tensor: str) -> tuple[float, float] | None:
        """Return the range of `tensor` fixed in RANGES, or None. The first pattern that matches wins."""
        pattern = tensor_hit(self.ranges, tensor)
        return None if pattern is None else self.ranges[pattern]

    def quantizes_graph(self, ends: Literal["inputs", "outputs"]) -> bool:
        """Whether inputs, or outputs, of the graph may have pairs."""
        return self.quantize_io in (None, "both", ends)

    def shared_group(self, tensor: str) -> int | None:
        """Return the position in SHARED_SCALES of the first group that contains `tensor`, or None."""
        return next((i for i, group in enumerate(self.shared_scales) if tensor_hit(group, tensor)), None)

    def sparse_pattern_hits(self, pattern: str, node: str, op: str) -> bool:
        """Whether a pattern of SPARSE.SPECIFIC matches a node."""
        return first_hit((pattern,), node, op, "", self.nodes_of("SPARSE")) is not None

    def _uses(self) -> Iterator[PatternUse]:
        for name, patterns in (
            ("SKIP_TRACE_MODULES", self.skip_trace_modules),
            ("INCLUDE", self.include),
            ("EXCLUDE", self.exclude),
        ):
            yield from (PatternUse((name, index), pattern, "nodes") for index, pattern in enumerate(patterns))
        for name, side in (("W", self.w), ("A", self.a)):
            yield from (
                PatternUse((name, "SPECIFIC", i, pattern), pattern, "either") for i, pattern, _ in changes(side)
            )
        for i, pattern, _ in self.sparse.entries():
            yield PatternUse(("SPARSE", "SPECIFIC", i, pattern), pattern, "nodes")
        yield from (PatternUse(("RANGES", pattern), pattern, "tensors") for pattern in self.ranges)
        yield from (PatternUse(("OWN_SCALES", i), pattern, "tensors") for i, pattern in enumerate(self.own_scales))
        for group, patterns in enumerate(self.shared_scales):
            yield from (
                PatternUse(("SHARED_SCALES", group, i), pattern, "tensors") for i, pattern in enumerate(patterns)
            )

    def for_model(self, nodes: Sequence[NodeInfo], tensors: Collection[str]) -> tuple[Recipe, Mapping[str, str]]:
        """Resolve patterns that name torch modules to the nodes of one model.

        Args:
            nodes: every node of the file, of all scopes.
            tensors: original names of all tensors.

        Returns: the recipe, and the patterns of SKIP_TRACE_MODULES that match no node, with the nearest names.

        Raises:
            RecipeError: a pattern matches nothing, with the nearest names, or names several modules, or
                matching takes too long.
        """
        uses = tuple(self._uses())
        slow = slow_problem(uses, nodes, tensors)
        if slow is not None:
            raise self._origin.error(slow)
        resolved = resolve_patterns(uses, nodes, tensors)
        if resolved.wrong:
            raise self._origin.error(*resolved.wrong)
        return self._with(_named=resolved.named), resolved.nothing

    def nodes_of(self, key: str) -> Mapping[str, frozenset[str]]:
        """Return the node names by pattern, for patterns under `key` that name torch modules; see `for_model`."""
        return self._named.get(key, {})

    def check_types(
        self,
        *,
        observers: Collection[str] | None = None,
        quantizers: Collection[str] | None = None,
        roundings: Collection[str] | None = None,
    ) -> None:
        """Check that the requested types exist. None: that kind is not checked.

        Raises:
            RecipeError: a side that is quantized, or an entry of SPECIFIC, names an unknown type.
        """
        for part in self._parts:
            for problem in part.missing_types(observers, quantizers, roundings):
                raise self._origin.error(problem)

    def learned_types(self) -> Iterator[tuple[str, str]]:
        """Yield key and value of each quantizer type that needs training, once for each side."""
        seen = set()
        for part in self._parts:
            kind = part.keys.quantizer.type
            if kind in names.LEARNED and not part.is_float and (part.side, kind) not in seen:
                seen.add((part.side, kind))
                yield key_path((*part.path, "QUANTIZER", "TYPE")), kind

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as plain values in the keys of the YAML; `load` restores an equal recipe."""
        out = self.to_keys(empty=False)
        entries = {"W": changes(self.w), "A": changes(self.a), "SPARSE": self.sparse.entries()}
        for name, specific in entries.items():
            out[name]["SPECIFIC"] = [{pattern: change.to_keys(given=True)} for _, pattern, change in specific]
        return out

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_dict`, in hexadecimal: equal recipes have equal digests."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()

    @property
    def given(self) -> dict[str, Any]:
        """Copy of the keys that some source sets, in the keys of the YAML; `load` restores an equal recipe."""
        return copy.deepcopy(self._source)

    @property
    def decided(self) -> frozenset[str]:
        """Key paths that some source sets, sections included, in upper case; see `key_paths`."""
        return key_paths(self._source)

    @property
    def origin(self) -> KeyOrigin:
        """Source of the keys, for error messages."""
        return self._origin

    def written_in(self, origin: KeyOrigin) -> Recipe:
        """Return the recipe with another origin in its error messages."""
        return self._with(_origin=origin)

    def on_device(self, device: str) -> Recipe:
        """Return a copy of the recipe for another device. Resolved patterns are kept."""
        return Recipe.read({**self._source, "DEVICE": device})._with(_origin=self._origin, _named=self._named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
