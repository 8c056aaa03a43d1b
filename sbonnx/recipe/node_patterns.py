"""Patterns for nodes and tensors, and their resolution to the names of one model.

=============== ==========================================================================================
pattern         matches
=============== ==========================================================================================
``conv*``       nodes by name, with the wildcards ``*``, ``?`` and ``[...]`` (a name matches itself)
``node:conv*``  nodes by name, explicit form of ``conv*``
``op:*Pool``    nodes by operator type, wildcards allowed
``re:.*/ffn/.`` nodes by a regular expression that must cover the whole name
``tensor:x*``   tensors by name, wildcards allowed
=============== ==========================================================================================

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
from functools import lru_cache
from typing import Final, Literal

from sbonnx.isolation import python_command
from sbonnx.recipe.problem import OMITTED, Path, Wrong, most_similar
from sbonnx.recipe.torch_modules import Modules, NodeInfo, candidates

PatternKind = Literal["name", "node", "op", "re", "tensor"]

MAX_WILDCARDS: Final = 2000
"""Maximum characters of a pattern with wildcards, or of a regular expression. Plain names may be longer."""

TIME_LIMIT: Final = 10.0
"""Seconds for matching regular expressions with all names of a model. Normal expressions take milliseconds, some take
exponential time, and Python's `re` has no limit."""

SKIPPED: Final = "SKIP_TRACE_MODULES"
"""Key whose patterns are module paths first, and may name modules without a node in the file."""

_PREFIXES: Final[tuple[PatternKind, ...]] = ("node", "op", "re", "tensor")

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
        if self.kind == "tensor":
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
    return Matcher(kind, body, re.compile(fnmatch.translate(body) if _WILDCARD.search(body) else re.escape(body)))


def check_pattern(pattern: str) -> str | None:
    """Return the problem of `pattern`, as the end of a sentence, or None."""
    kind, body = _split(pattern)
    if not body:
        return "must not be an empty pattern"
    if len(body) > MAX_WILDCARDS and (kind == "re" or _WILDCARD.search(body)):
        return f"must be a pattern of at most {MAX_WILDCARDS} characters"
    try:
        matcher(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression ({error})"
    return None


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


def slow_problem(uses: Sequence[PatternUse], nodes: Sequence[NodeInfo], tensors: Collection[str]) -> Wrong | None:
    """Return the first regular expression that takes too long to match the names of a model, or None."""
    by_regex = {found.body: use for use in reversed(uses) if (found := matcher(use.pattern)).kind == "re"}
    slow = first_slow(list(by_regex), {*(node.name for node in nodes), *tensors}) if by_regex else None
    if slow is None:
        return None
    text = f"takes longer than {TIME_LIMIT:.0f} s to match the names of the model"
    hint = "Do not repeat a part that contains a repetition, as in (a+)+, or use wildcards"
    return Wrong(text, hint, path=by_regex[slow].path, value=by_regex[slow].pattern)


def resolve_patterns(
    uses: Sequence[PatternUse], nodes: Sequence[NodeInfo], tensors: Collection[str]
) -> ResolvedPatterns:
    """Resolve each pattern by the node names of the file, else by the names of torch modules.

    Args:
        uses: all patterns of a recipe.
        nodes: every node of the file, of all scopes.
        tensors: original names of all tensors.
    """
    names, modules = frozenset(tensors), Modules(nodes)
    found = ResolvedPatterns()
    for use in uses:
        if _matches(use, nodes, names):
            continue
        bare = matcher(use.pattern).kind == "name" and use.bare != "tensors"
        layers = modules.find(use.pattern, containers_first=use.path[0] == SKIPPED) if bare else []
        several = candidates(use.pattern, layers)
        if several:
            hint = f"Write the path with dots, or the name of a node: {', '.join(several[:8])}"
            found.wrong.append(use.problem(f"is the name of {len(several)} modules", hint))
        elif layers:
            selected = frozenset(node for layer in layers for node in layer.nodes)
            found.named.setdefault(str(use.path[0]), {})[use.pattern] = selected
        elif bare and use.path[0] == SKIPPED and "/" not in use.pattern:
            found.nothing[use.pattern] = _unmatched(use, nodes, names).hint
        else:
            found.wrong.append(_unmatched(use, nodes, names))
    return found


def _matches(use: PatternUse, nodes: Sequence[NodeInfo], tensors: Collection[str]) -> bool:
    """Whether a pattern matches a node or tensor by its name in the file."""
    found = matcher(use.pattern)
    if use.bare == "tensors":
        return any(found.is_tensor(name) for name in tensors)
    if use.bare == "either" and use.pattern in tensors:
        return True
    return any(found.hits_node(node.name, node.op) for node in nodes) or any(map(found.hits_tensor, tensors))


def _unmatched(use: PatternUse, nodes: Sequence[NodeInfo], names: Collection[str]) -> Wrong:
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
        close = most_similar(found.body, pool, count=3)
        hint = f"Nearest: {', '.join(map(repr, close))}" if close else f"The model has no {what}"
    return use.problem(f"matches no {what} of the model", hint)
