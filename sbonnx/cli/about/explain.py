"""``sbonnx explain``: the meaning of a lint rule, recipe key, pattern or reason, and the treatment of a node."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sbonnx.cli import options
from sbonnx.cli.about.rule_examples import RuleExample, example_of
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError
from sbonnx.values import INLINE, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sbonnx.stages.state import Prepared

HELP: Final = (
    "Explain a lint rule, recipe key, pattern or reason. With --model: why a node or tensor is quantized or not."
)


def _subjects(typed: str) -> Iterable[str]:
    from sbonnx.recipe.sections.whole import KEYS
    from sbonnx.report.explanations import EXPLANATIONS

    keys = (name.lower() if typed.islower() else name for name in KEYS)
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


@dataclass(frozen=True)
class RuleFacts:
    """Facts of a lint rule."""

    severity: Literal["error", "warning", "info"]
    must_hold: str
    fix: str
    targets: tuple[str, ...]
    example: RuleExample | None


@dataclass(frozen=True)
class PatternFacts:
    """Facts of a pattern: why it does not change what the network computes."""

    valid_because: str


@dataclass(frozen=True)
class KeyFacts:
    """Facts of a key of the recipe."""

    short_forms: tuple[str, ...]
    description: str
    values: Any
    default: Any
    example: Any
    option: tuple[str, ...]


@dataclass(frozen=True)
class SectionFacts:
    """Facts of a section of the recipe: other names, keys, and options of the command line."""

    short_forms: tuple[str, ...]
    keys: tuple[str, ...]
    option: tuple[str, ...]


@dataclass(frozen=True)
class ReasonFacts:
    """Facts of a reason of a refusal or note: meaning, what to do, and a page of the documentation."""

    meaning: str
    fix: str
    page: str


@dataclass(frozen=True)
class NodeFacts:
    """Treatment of a node or tensor of a model."""

    verdict: str
    quantized: tuple[str, ...]
    not_done: tuple[str, ...]
    applied_here: tuple[str, ...]


@dataclass(frozen=True)
class ExplainOutput:
    """Output of explain; keys depend on the kind.

    Attributes:
        subject: what is explained.
        kind: its kind, such as "lint rule".
        severity, must_hold, fix, targets, example: of a lint rule; the example is a model with the fault.
        valid_because: of a pattern.
        meaning, page: of a reason, with `fix`.
        short_forms, description, values, default, example, option, keys: of a recipe key or section.
        verdict, quantized, not_done, applied_here: of a node or tensor of a model.
    """

    subject: str
    kind: str
    facts: RuleFacts | PatternFacts | KeyFacts | SectionFacts | ReasonFacts | NodeFacts = field(metadata=INLINE)


def run(given: Arguments) -> int:
    printer, subject, model = given.printer(), given[SUBJECT], given[MODEL]
    explanation = general(subject) if model is None else _node(given, model, subject)
    printer.value("explain", explanation)
    printer.facts(f"{explanation.subject}: {explanation.kind}", shown_facts(explanation))
    if isinstance(explanation.facts, RuleFacts) and explanation.facts.example is not None:
        printer.text(example_text(explanation.facts.example))
    return 0


def shown_facts(explanation: ExplainOutput) -> dict[str, Any]:
    """Return the facts by the names that people read, without empty ones and without the example."""
    return {
        name.replace("_", " "): "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for name, value in plain(explanation.facts).items()
        if name != "example" and value not in (None, [], (), "")
    }


def example_text(example: RuleExample) -> str:
    """Return the example of a lint rule as text: finding, model, and the lines that differ without the fault."""
    parts = [f"For example, {example.command} finds\n{example.finding}\nin\n{example.model}"]
    if example.change:
        parts.append(f"and nothing after\n{example.change}")
    return "\n\n".join(parts)


def _rules() -> dict[str, tuple[Any, list[str]]]:
    """Return each lint rule by its id, with the targets that it applies to."""
    from sbonnx.linting import TARGETS, rules_for

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


def general(subject: str) -> ExplainOutput:
    """Explain a rule, key or pattern.

    Raises:
        RecipeError: nothing of this name.
    """
    from sbonnx.recipe import key_facts
    from sbonnx.recipe.problem import suggestion
    from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS
    from sbonnx.report.explanations import explanation_of

    rules, patterns = _rules(), _patterns()
    by_id = {name.lower(): rule for name, rule in rules.items()}
    if subject.lower() in by_id:
        rule, targets = by_id[subject.lower()]
        facts = RuleFacts(rule.severity, rule.title, rule.mend, tuple(targets), example_of(rule.id))
        return ExplainOutput(rule.id, "lint rule", facts)
    if subject.lower() in patterns:
        step, source = patterns[subject.lower()]
        return ExplainOutput(subject.lower(), f"pattern of the {step}", PatternFacts(source))
    key = key_facts(subject)
    if key is not None:
        name, short_forms = key.pop("key"), tuple(key.pop("short_forms"))
        flags = tuple(
            row.flags[0]
            for row in vars(options).values()
            if isinstance(row, CommandOption) and row.key and _full(row.key) == name
        )
        if "keys" in key:
            return ExplainOutput(name, "section of the recipe", SectionFacts(short_forms, tuple(key["keys"]), flags))
        return ExplainOutput(name, "key of the recipe", KeyFacts(short_forms, **key, option=flags))
    if (reason := explanation_of(subject)) is not None:
        meaning = ReasonFacts(reason.meaning, reason.fix, reason.page)
        return ExplainOutput(reason.id, "reason of a refusal or note", meaning)
    hint = suggestion(subject, (*rules, *patterns, *KEYS, *SHORT_FORMS), count=3)
    raise RecipeError(
        f"'{subject}' is no lint rule, recipe key, pattern or known reason. {hint}{' ' if hint else ''}"
        "For a node of a model, give --model"
    )


def _full(key: str) -> str:
    from sbonnx.recipe.sections.whole import SHORT_FORMS

    return SHORT_FORMS.get(key.lower(), key).upper()


def _node(given: Arguments, model: Path, subject: str) -> ExplainOutput:
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
    tensors = {tensor.name for holder in nodes.values() for tensor in (*holder.inputs, *holder.outputs)}
    if node is None and subject not in tensors:
        close = most_similar(subject, (*nodes, *sorted(tensors)), count=3, fallback=False)
        hint = f"Nearest: {', '.join(map(repr, close))}" if close else "sbonnx plan lists the names"
        raise RecipeError(f"{model} has no node or tensor '{subject}'. {hint}")
    prepared = prepare(model, recipe, backend)
    names = {subject} if node is None else {subject, *(tensor.name for tensor in node.outputs)}
    sites = tuple(
        f"{site.tensor} ({site.role}, {site.spec.label()}): {site.why} (rule {site.rule})"
        for site in prepared.plan.sites
        if site.tensor == subject or any(reader.node == subject for reader in site.readers)
    )
    refusals = tuple(f"{row.what}: {row.why}{_code(row.code)}" for row in prepared.refusals if row.where in names)
    verdict = _verdict(prepared, subject, is_node=node is not None, quantized=bool(sites), refused=bool(refusals))
    applied = tuple(fired.pattern for fired in prepared.applied if fired.node == subject)
    kind = f"{'tensor' if node is None else node.op} in {model}, for {prepared.plan.backend}"
    return ExplainOutput(subject, kind, NodeFacts(verdict, sites, refusals, applied))


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
