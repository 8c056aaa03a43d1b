"""``sbonnx explain``: the meaning of a lint rule, recipe key, pattern or reason, and the treatment of a node."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sbonnx.stages.state import Prepared

HELP: Final = (
    "Explain a lint rule, recipe key, pattern or reason. With --model: why a node or tensor is quantized or not."
)


def _subjects(typed: str) -> Iterable[str]:
    from sbonnx.recipe.loading import all_keys
    from sbonnx.report.explanations import EXPLANATIONS

    keys = (name.lower() if typed.islower() else name for name in all_keys())
    return (*_rules(), *_patterns(), *keys, *(row.id for row in EXPLANATIONS))


SUBJECT: Final[CommandOption[str]] = CommandOption(
    "subject",
    (),
    str,
    "Id of a lint rule (T04), key of the recipe (W.ROUNDING.TYPE), name of a pattern (fuse_bn), code of a "
    "reason or note (slower-in-integers, R02); with --model: name of a node or tensor.",
    "CODE|KEY|NODE",
    inspect.Parameter.empty,
    choices=_subjects,
)
MODEL: Final = options.option("--model FILE", Path, "The float model whose node or tensor is explained.")

OPTIONS: Final = (
    SUBJECT,
    MODEL,
    *options.BASIC,
    options.SET,
    *options.NODES,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    printer, subject, model = given.printer(), given[SUBJECT], given[MODEL]
    facts = _general(subject) if model is None else _node(given, model, subject)
    printer.value("explain", facts)
    shown = {
        name.replace("_", " "): "; ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in facts.items()
        if name not in ("kind", "subject") and value not in (None, [], "")
    }
    printer.facts(f"{facts['subject']}: {facts['kind']}", shown)
    return 0


def _rules() -> dict[str, tuple[Any, list[str]]]:
    """Return each lint rule by its id, with the targets that it applies to."""
    from sbonnx.lint import TARGETS, rules_for

    rules: dict[str, tuple[Any, list[str]]] = {}
    for target in TARGETS:
        for rule in rules_for(target):
            rules.setdefault(rule.id, (rule, []))[1].append(target)
    return rules


def _patterns() -> dict[str, tuple[str, str]]:
    """Return step and source of each pattern by its name."""
    from sbonnx.patterns import FUSE, SIMPLIFY

    steps = {"simplification": SIMPLIFY, "fusion": FUSE}
    return {pattern.name: (step, pattern.source) for step, patterns in steps.items() for pattern in patterns}


def _general(subject: str) -> dict[str, Any]:
    """Explain a rule, key or pattern.

    Raises:
        RecipeError: nothing of this name.
    """
    from sbonnx.recipe import key_facts
    from sbonnx.recipe.loading import all_keys
    from sbonnx.recipe.names import SHORT_FORMS
    from sbonnx.recipe.problem import suggestion
    from sbonnx.report.explanations import explanation_of

    rules, patterns = _rules(), _patterns()
    by_id = {name.lower(): rule for name, rule in rules.items()}
    if subject.lower() in by_id:
        rule, targets = by_id[subject.lower()]
        facts = {"severity": rule.severity, "must_hold": rule.title, "fix": rule.mend, "targets": targets}
        return {"subject": rule.id, "kind": "lint rule", **facts}
    if subject.lower() in patterns:
        step, source = patterns[subject.lower()]
        return {"subject": subject.lower(), "kind": f"pattern of the {step}", "valid_because": source}
    key = key_facts(subject)
    if key is not None:
        flags = [
            row.flags[0]
            for row in vars(options).values()
            if isinstance(row, CommandOption) and row.key and _full(row.key) == key["key"]
        ]
        kind = "section of the recipe" if "keys" in key else "key of the recipe"
        return {"subject": key.pop("key"), "kind": kind, **key, "option": flags}
    if (reason := explanation_of(subject)) is not None:
        facts = {"meaning": reason.meaning, "fix": reason.fix, "page": reason.page}
        return {"subject": reason.id, "kind": "reason of a refusal or note", **facts}
    hint = suggestion(subject, (*rules, *patterns, *all_keys(), *SHORT_FORMS), count=3)
    raise RecipeError(
        f"'{subject}' is no lint rule, recipe key, pattern or known reason. {hint}{' ' if hint else ''}"
        "For a node of a model, give --model"
    )


def _full(key: str) -> str:
    from sbonnx.recipe.names import SHORT_FORMS

    return SHORT_FORMS.get(key.lower(), key).upper()


def _node(given: Arguments, model: Path, subject: str) -> dict[str, Any]:
    """Explain how the plan treats a node or tensor of a model.

    Raises:
        RecipeError: the model has no node or tensor of this name.
    """
    from sbonnx import graph as graphs
    from sbonnx.graph import query
    from sbonnx.pipeline import prepare
    from sbonnx.recipe.problem import most_similar
    from sbonnx.stages.state import read_recipe

    recipe, backend = read_recipe(given[options.RECIPE], given[options.BACKEND], given.overrides())
    nodes = {node.name: node for node in query.all_nodes(graphs.load(model))}
    node = nodes.get(subject)
    tensors = {tensor.name for each in nodes.values() for tensor in (*each.inputs, *each.outputs)}
    if node is None and subject not in tensors:
        close = most_similar(subject, (*nodes, *sorted(tensors)), count=3, fallback=False)
        hint = f"Nearest: {', '.join(map(repr, close))}" if close else "sbonnx plan lists the names"
        raise RecipeError(f"{model} has no node or tensor '{subject}'. {hint}")
    prepared = prepare(model, recipe, backend)
    names = {subject} if node is None else {subject, *(tensor.name for tensor in node.outputs)}
    sites = [
        f"{site.tensor} ({site.role}, {site.spec.label()}): {site.why} (rule {site.rule})"
        for site in prepared.plan.sites
        if site.tensor == subject or any(reader.node == subject for reader in site.readers)
    ]
    refusals = [f"{row.what}: {row.why}{_code(row.code)}" for row in prepared.refusals if row.where in names]
    return {
        "subject": subject,
        "kind": f"{'tensor' if node is None else node.op} in {model}, for {prepared.plan.backend}",
        "verdict": _verdict(prepared, subject, is_node=node is not None, quantized=bool(sites), refused=bool(refusals)),
        "quantized": sites,
        "not_done": refusals,
        "applied_here": [fired.pattern for fired in prepared.applied if fired.node == subject],
    }


def _code(code: str) -> str:
    from sbonnx.report.explanations import explanation_of

    reason = explanation_of(code)
    return "" if reason is None else f" ({reason.id})"


def _verdict(prepared: Prepared, subject: str, *, is_node: bool, quantized: bool, refused: bool) -> str:
    from sbonnx.graph import query

    if quantized:
        return "its quantized inputs are listed below" if is_node else "quantized"
    if is_node and subject not in {node.name for node in query.all_nodes(prepared.graph)}:
        return "removed or fused into another node before quantization"
    if refused:
        return "stays float, for the reasons below"
    return "stays float: no rule of the backend quantizes it"
