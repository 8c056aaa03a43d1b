"""Patterns for nodes and tensors, and their resolution to the names of one model.

================ =========================================================================================
pattern          matches
================ =========================================================================================
``conv*``        nodes by name, with the wildcards ``*``, ``?`` and ``[...]`` (a name matches itself)
``node:conv*``   nodes by name, explicit form of ``conv*``
``op:*Pool``     nodes by operator type, wildcards allowed
``re:.*/ffn/.``  nodes by a regular expression that must cover the whole name
``tensor:x*``    tensors by name, wildcards allowed
``after:x``      nodes that a path from ``x`` leads to, without ``x``
``before:x``     nodes from which a path leads to ``x``, without ``x``
``between:x..y`` nodes on the paths from ``x`` to ``y``, both included
``head``         nodes from the last shared feature to the outputs; ``stem``, ``tail``: `sbonnx.recipe.regions`
================ =========================================================================================

``x`` and ``y`` are patterns for nodes, or names of torch modules. A node or module called ``head`` takes precedence.
Names are those of the original file, before simplification and fusion; case counts. A bare name that no node has is
resolved as the name of a torch module (`sbonnx.recipe.torch_modules`).
"""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, Literal

from sbonnx.recipe.problem import OMITTED, Path, Wrong, most_similar
from sbonnx.recipe.regions import REGIONS, Flow
from sbonnx.recipe.torch_modules import Modules, NodeInfo, candidates
from sbonnx.system.isolation import python_command

PatternKind = Literal["name", "node", "op", "re", "tensor", "after", "before", "between"]

MAX_WILDCARDS: Final = 2000
"""Maximum characters of a pattern with wildcards, or of a regular expression. Plain names may be longer."""

TIME_LIMIT: Final = 10.0
"""Seconds for matching regular expressions with all names of a model. Normal expressions take milliseconds, some take
exponential time, and Python's `re` has no limit."""

SKIPPED: Final = "SKIP_TRACE_MODULES"
"""Key whose patterns are module paths first, and may name modules without a node in the file."""

_PREFIXES: Final[tuple[PatternKind, ...]] = ("node", "op", "re", "tensor", "after", "before", "between")

FLOW: Final = ("after", "before", "between")
"""Prefixes of patterns for nodes by data flow. They match no name: `resolve_patterns` resolves them to names."""

PATH: Final = ".."
"""Separator of the ends of a ``between:`` pattern."""

_WILDCARD: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Matcher:
    """Parsed pattern: its kind, the part after the prefix, and that part as a regular expression."""

    kind: PatternKind
    body: str
    regex: re.Pattern[str]

    def _covers(self, name: str) -> bool:
        return name == self.body or self.regex.fullmatch(name) is not None

    def hits_node(self, name: str, op: str) -> bool:
        """Whether the pattern matches the node `name` of operator type `op`."""
        if self.kind == "tensor" or self.kind in FLOW:
            return False
        return self._covers(op if self.kind == "op" else name)

    def hits_tensor(self, name: str) -> bool:
        """Whether the pattern has the prefix ``tensor:`` and matches the tensor `name`."""
        return self.kind == "tensor" and self._covers(name)

    def is_tensor(self, name: str) -> bool:
        """Whether the pattern matches the tensor `name`, for keys that accept tensors only (no prefix needed)."""
        return self._covers(name)


def _split(pattern: str) -> tuple[PatternKind, str]:
    for prefix in _PREFIXES:
        if pattern[: len(prefix) + 1].lower() == f"{prefix}:":
            return prefix, pattern[len(prefix) + 1 :]
    return "name", pattern


@lru_cache(maxsize=4096)
def matcher(pattern: str) -> Matcher:
    """Parse and compile `pattern`.

    Raises:
        re.error: a regular expression after ``re:`` does not parse (`check_pattern` finds that first).
    """
    kind, body = _split(pattern)
    if kind == "re":
        return Matcher(kind, body, re.compile(body))
    if kind in FLOW:
        return Matcher(kind, body, re.compile(re.escape(body)))
    return Matcher(kind, body, re.compile(fnmatch.translate(body) if _WILDCARD.search(body) else re.escape(body)))


def pattern_of(name: str, kind: str) -> str:
    """Return a pattern that matches exactly one node or tensor name."""
    if _WILDCARD.search(name):
        escaped = _WILDCARD.sub(lambda match: f"[{match[0]}]", name)
        return f"re:{re.escape(name)}" if kind == "node" else f"tensor:{escaped}"
    return f"{kind}:{name}"


def check_pattern(pattern: str) -> str | None:
    """Return the problem of `pattern`, as the end of a sentence, or None."""
    kind, body = _split(pattern)
    if not body:
        return "must not be an empty pattern"
    if kind in FLOW:
        return _check_ends(kind, body)
    if len(body) > MAX_WILDCARDS and (kind == "re" or _WILDCARD.search(body)):
        return f"must be a pattern of at most {MAX_WILDCARDS} characters"
    try:
        matcher(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression ({error})"
    return None


def _check_ends(kind: PatternKind, body: str) -> str | None:
    """Return the problem of a pattern by data flow, or None."""
    ends = _ends(kind, body)
    if kind == "between" and len(ends) != 2:
        return f"must have the form between:FIRST{PATH}LAST, with one '{PATH}'"
    for end in ends:
        if _split(end)[0] == "tensor" or _split(end)[0] in FLOW:
            return f"must name nodes after '{kind}:', not another pattern with a prefix for tensors or paths"
        fault = check_pattern(end)
        if fault is not None:
            return fault
    return None


def _ends(kind: PatternKind, body: str) -> list[str]:
    """Return the patterns of nodes inside a pattern by data flow: one, or two for ``between:``."""
    return body.split(PATH) if kind == "between" else [body]


def first_slow(expressions: Sequence[str], names: Collection[str]) -> str | None:
    """Return the first regular expression that takes longer than `TIME_LIMIT` over all names, or None.

    They are matched in a child process, which can be killed. Only expressions with two or more repetitions can be slow:
    for others no process is started. If the system cannot start one, nothing is measured.
    """
    suspects = [text for text in dict.fromkeys(expressions) if sum(map(text.count, "*+{")) > 1]
    if not suspects or not names:
        return None
    command = python_command(__name__, "match_all")
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with process:
        try:
            process.communicate(json.dumps([suspects, sorted(set(names))]).encode(), timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            done = process.communicate()[0].count(b"\n")
            return suspects[done] if done < len(suspects) else None
        except BaseException:
            process.kill()
            raise
    return None


def match_all() -> None:
    """Match regular expressions with names, both from stdin; print a line for each finished expression."""
    expressions, names = json.loads(sys.stdin.buffer.read())
    for expression in expressions:
        matches = re.compile(expression).fullmatch
        for name in names:
            matches(name)
        print(flush=True)


@dataclass(frozen=True)
class PatternUse:
    """Pattern in a recipe: its key path, and whether a bare name means nodes, tensors or either."""

    path: Path
    pattern: str
    bare: str

    def problem(self, text: str, hint: str) -> Wrong:
        """Return a problem of the pattern; the message has the pattern once."""
        return Wrong(text, hint, path=self.path, value=OMITTED if self.path[-1] == self.pattern else self.pattern)


@dataclass
class ResolvedPatterns:
    """Node names that the patterns of a recipe select in a model.

    Attributes:
        named: by key of the recipe, node names by pattern, for patterns that name torch modules.
        wrong: patterns that match nothing, or are ambiguous.
        nothing: patterns of SKIP_TRACE_MODULES without a node, with the nearest names.
    """

    named: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)
    nothing: dict[str, str] = field(default_factory=dict)


def _simple(pattern: str) -> list[Matcher]:
    """Return the matchers of names that a pattern consists of: those of its ends if it is one by data flow."""
    kind, body = _split(pattern)
    return [matcher(end) for end in _ends(kind, body)] if kind in FLOW else [matcher(pattern)]


def slow_problem(uses: Sequence[PatternUse], nodes: Sequence[NodeInfo], tensors: Collection[str]) -> Wrong | None:
    """Return the first regular expression that takes too long to match the names of a model, or None."""
    by_regex = {pattern.body: use for use in reversed(uses) for pattern in _simple(use.pattern) if pattern.kind == "re"}
    slow = first_slow(list(by_regex), {*(node.name for node in nodes), *tensors}) if by_regex else None
    if slow is None:
        return None
    text = f"takes longer than {TIME_LIMIT:.0f} s to match the names of the model"
    hint = "Do not repeat a part that contains a repetition, as in (a+)+, or use wildcards"
    return Wrong(text, hint, path=by_regex[slow].path, value=by_regex[slow].pattern)


def resolve_patterns(
    uses: Sequence[PatternUse], nodes: Sequence[NodeInfo], tensors: Collection[str]
) -> ResolvedPatterns:
    """Resolve each pattern by the node names of the file, else by the names of torch modules or regions.

    Args:
        uses: all patterns of a recipe.
        nodes: every node of the file, of all scopes.
        tensors: original names of all tensors.
    """
    resolver = _Resolver(nodes, frozenset(tensors))
    for use in uses:
        if use.bare != "tensors" and matcher(use.pattern).kind in FLOW:
            resolver.resolve_flow(use)
        elif not _matches(use, nodes, resolver.tensors):
            resolver.resolve_module(use)
    return resolver.found


@dataclass
class _Resolver:
    """Resolution of patterns that match no node or tensor by name."""

    nodes: Sequence[NodeInfo]
    tensors: frozenset[str]
    found: ResolvedPatterns = field(default_factory=ResolvedPatterns)

    def __post_init__(self) -> None:
        self.modules = Modules(self.nodes)

    @cached_property
    def flow(self) -> Flow:
        """Data flow of the file, computed when a pattern needs it."""
        return Flow(self.nodes)

    def resolve_module(self, use: PatternUse) -> None:
        """Resolve the name of a torch module or region, or record the problem."""
        resolved = self.found
        bare = matcher(use.pattern).kind == "name" and use.bare != "tensors"
        layers = self.modules.find(use.pattern, containers_first=use.path[0] == SKIPPED) if bare else []
        several = candidates(use.pattern, layers)
        if several:
            resolved.wrong.append(self._ambiguous(use, several))
        elif layers:
            self._select(use, frozenset(node for layer in layers for node in layer.nodes))
        elif bare and use.pattern in REGIONS and (region := self.flow.region(use.pattern)):
            self._select(use, region)
        elif bare and use.pattern in REGIONS and self.nodes:
            resolved.wrong.append(use.problem("is no part of the model", "It has no layer with a constant weight"))
        elif bare and use.path[0] == SKIPPED and "/" not in use.pattern:
            resolved.nothing[use.pattern] = _unmatched(use, self.nodes, self.tensors).hint
        else:
            resolved.wrong.append(_unmatched(use, self.nodes, self.tensors))

    def resolve_flow(self, use: PatternUse) -> None:
        """Resolve a pattern by data flow, or record the problem."""
        kind, body = _split(use.pattern)
        ends = []
        for end in _ends(kind, body):
            names = self._named(use, end)
            if names is None:
                return
            ends.append(names)
        if kind == "between":
            selected = self.flow.between(*ends)
            text, hint = (
                "connects nothing",
                "No path leads from the first to the last; exchange them, or check the names",
            )
        elif kind == "after":
            selected = self.flow.after(ends[0])
            text, hint = "matches no node", "Nothing follows it: it writes outputs of the model only"
        else:
            selected = self.flow.before(ends[0])
            text, hint = "matches no node", "Nothing precedes it: it reads inputs of the model and constants only"
        if selected:
            self._select(use, selected)
        else:
            self.found.wrong.append(use.problem(text, hint))

    def _named(self, use: PatternUse, end: str) -> frozenset[str] | None:
        """Return the nodes that an end of a path names; None, with a problem recorded, if there are none."""
        pattern = matcher(end)
        names = frozenset(node.name for node in self.nodes if pattern.hits_node(node.name, node.op))
        if names:
            return names
        layers = self.modules.find(end) if pattern.kind == "name" else []
        several = candidates(end, layers)
        if layers and not several:
            return frozenset(node for layer in layers for node in layer.nodes)
        if end in REGIONS and not several and (region := self.flow.region(end)):
            return region
        self.found.wrong.append(
            self._ambiguous(use, several)
            if several
            else _unmatched(PatternUse(use.path, end, "nodes"), self.nodes, self.tensors, use)
        )
        return None

    def _select(self, use: PatternUse, nodes: frozenset[str]) -> None:
        self.found.named.setdefault(str(use.path[0]), {})[use.pattern] = nodes

    @staticmethod
    def _ambiguous(use: PatternUse, several: Sequence[str]) -> Wrong:
        hint = f"Write the path with dots, or the name of a node: {', '.join(several[:8])}"
        return use.problem(f"is the name of {len(several)} modules", hint)


def _matches(use: PatternUse, nodes: Sequence[NodeInfo], tensors: Collection[str]) -> bool:
    """Whether a pattern matches a node or tensor by its name in the file."""
    pattern = matcher(use.pattern)
    if use.bare == "tensors":
        return any(pattern.is_tensor(name) for name in tensors)
    if use.bare == "either" and use.pattern in tensors:
        return True
    return any(pattern.hits_node(node.name, node.op) for node in nodes) or any(map(pattern.hits_tensor, tensors))


def _nearest_names(body: str, what: str, pool: Sequence[str]) -> str:
    """Return the hint of a pattern without matches: similar names, else the first ones."""
    if not pool:
        return f"The model has no {what}"
    if "," in body:
        return "A comma is part of the name: give each pattern in an option or list entry of its own"
    close = most_similar(body, pool, count=3, fallback=False)
    if close:
        return f"Nearest: {', '.join(map(repr, close))}"
    return f"No name is similar; the names begin with {', '.join(map(repr, pool[:3]))}"


def _unmatched(
    use: PatternUse, nodes: Sequence[NodeInfo], names: Collection[str], whole: PatternUse | None = None
) -> Wrong:
    """Return the problem of a pattern that matches nothing, with the nearest names.

    Args:
        whole: the pattern that `use` is an end of, for ``after:``, ``before:`` and ``between:``.
    """
    pattern = matcher(use.pattern)
    is_name = pattern.kind in ("name", "node", "re") and use.bare != "tensors"
    if pattern.kind == "op":
        what, pool = "operator type", sorted({node.op for node in nodes})
    elif is_name:
        what, pool = "node", [node.name for node in nodes]
    else:
        what, pool = "tensor", list(names)
    if is_name and any(pattern.is_tensor(name) for name in names):
        hint = f"For tensors write 'tensor:{pattern.body}'"
    elif is_name and pattern.body in {node.op for node in nodes}:
        hint = f"For an operator type write 'op:{pattern.body}'"
    elif is_name and (below := sum(name.startswith(f"{pattern.body.rstrip('/')}/") for name in pool)):
        hint = f"For the {below} node{'s' * (below > 1)} below it write '{pattern.body.rstrip('/')}/*'"
    elif is_name and pattern.kind == "name" and re.search(r"[|()^$\\]", pattern.body):
        hint = f"For a regular expression write 're:{pattern.body}'"
    else:
        hint = _nearest_names(pattern.body, what, pool)
    if whole is not None:
        return whole.problem(f"matches no {what} of the model with {pattern.body!r}", hint)
    return use.problem(f"matches no {what} of the model", hint)
