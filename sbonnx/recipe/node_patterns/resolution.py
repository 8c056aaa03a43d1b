"""Resolution of the patterns of a recipe to nodes and tensors of one model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sbonnx.recipe.node_patterns.matching import Matcher, matcher
from sbonnx.recipe.node_patterns.time_limit import LIMIT, first_slow
from sbonnx.recipe.node_patterns.torch_modules import Modules, NodeInfo, candidates
from sbonnx.recipe.problem import UNSAID, Path, Wrong, likest

SKIPPED = "SKIP_TRACE_MODULES"
"""Key whose patterns are module paths first, and may name modules that left no node in the file."""


@dataclass(frozen=True)
class Use:
    """Pattern in a recipe: its key path, and whether a bare name means nodes, tensors or either."""

    path: Path
    pattern: str
    bare: str


@dataclass
class Meant:
    """Node names that the patterns of a recipe select in a model.

    Attributes:
        named: by key of the recipe, node names by pattern, for patterns that name torch modules.
        wrong: patterns that match nothing, or are ambiguous.
        nothing: patterns of SKIP_TRACE_MODULES without a node, with the nearest names.
    """

    named: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)
    nothing: Mapping[str, str] = field(default_factory=dict)


def slow_problem(uses: Sequence[Use], nodes: Sequence[NodeInfo], tensors: Collection[str]) -> Wrong | None:
    """Return the first regular expression that takes too long to match the names of a model, or None."""
    by_regex = {found.body: use for use in reversed(uses) if (found := matcher(use.pattern)).kind == "re"}
    slow = first_slow(list(by_regex), {*(node.name for node in nodes), *tensors}) if by_regex else None
    if slow is None:
        return None
    text = f"takes longer than {LIMIT:.0f} s to match the names of the model"
    hint = "Repeat nothing that holds a repetition, as (a+)+ does, or use wildcards"
    return Wrong(text, hint, path=by_regex[slow].path, value=by_regex[slow].pattern)


def find_meant(uses: Sequence[Use], nodes: Sequence[NodeInfo], tensors: Collection[str]) -> Meant:
    """Resolve each pattern by the node names of the file, else by the names of torch modules.

    Args:
        uses: all patterns of a recipe.
        nodes: every node of the file, of all scopes.
        tensors: original names of all tensors.
    """
    names, modules = frozenset(tensors), Modules(nodes)
    found, nothing = Meant(), {}
    for use in uses:
        if _by_name(use, nodes, names):
            continue
        kind = matcher(use.pattern).kind
        bare = kind == "name" and use.bare != "tensors"
        layers = modules.find(use.pattern, containers_first=use.path[0] == SKIPPED) if bare else []
        several = candidates(use.pattern, layers)
        if several:
            hint = f"Write the path with dots, or the name of a node: {', '.join(several[:8])}"
            found.wrong.append(Wrong(f"is the name of {len(several)} modules", hint, path=use.path, value=_said(use)))
        elif layers:
            nodes_meant = frozenset(node for layer in layers for node in layer.nodes)
            found.named.setdefault(str(use.path[0]), {})[use.pattern] = nodes_meant
        elif bare and use.path[0] == SKIPPED and "/" not in use.pattern:
            nothing[use.pattern] = _unmatched(use, nodes, names).hint
        else:
            found.wrong.append(_unmatched(use, nodes, names))
    found.nothing = nothing
    return found


def _by_name(use: Use, nodes: Sequence[NodeInfo], tensors: Collection[str]) -> bool:
    """Whether a pattern matches a node or tensor by its name in the file."""
    found: Matcher = matcher(use.pattern)
    if use.bare == "tensors":
        return any(found.is_tensor(name) for name in tensors)
    if use.bare == "either" and use.pattern in tensors:
        return True
    return any(found.hits_node(node.name, node.op) for node in nodes) or any(map(found.hits_tensor, tensors))


def _said(use: Use) -> object:
    """Return the pattern, unless its key repeats it."""
    return UNSAID if use.path[-1] == use.pattern else use.pattern


def _unmatched(use: Use, nodes: Sequence[NodeInfo], names: Collection[str]) -> Wrong:
    """Return the problem of a pattern that matches nothing, with the nearest names."""
    found = matcher(use.pattern)
    is_name = found.kind in ("name", "node", "re") and use.bare != "tensors"
    if found.kind == "op":
        what, pool = "operator type", sorted({node.op for node in nodes})
    elif is_name:
        what, pool = "node", [node.name for node in nodes]
    else:
        what, pool = "tensor", list(names)
    if is_name and any(found.is_tensor(name) for name in names):
        hint = f"For tensors write 'tensor:{found.body}'"
    elif is_name and found.body in {node.op for node in nodes}:
        hint = f"For an operator type write 'op:{found.body}'"
    else:
        close = likest(found.body, pool, count=3)
        hint = f"Nearest: {', '.join(map(repr, close))}" if close else f"The model has no {what}"
    return Wrong(f"matches no {what} of the model", hint, path=use.path, value=_said(use))
