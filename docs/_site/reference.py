"""Reference pages of the documentation site, generated from the code while the site is built.

Command line options, recipe keys with their defaults, a page for each lint rule with a model that breaks it, and the
pages of the repository's root. Pages that exist as files contain the introduction; the generated part follows it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final

import mkdocs_gen_files
import typer

from docs._site.drawing import drawing
from docs._site.links import COPIED, ROOT, copied
from sbonnx import cli
from sbonnx.cli.about.explain import RuleFacts, example_text, general, shown_facts
from sbonnx.cli.app import build
from sbonnx.cli.examples import EXAMPLES
from sbonnx.cli.schemas.published import SCHEMAS, json_schema
from sbonnx.linting import RULES
from tests.lint.examples import rule_models

MARKUP: Final = re.compile(r"\[/?(?:bold|dim|italic|cyan|yellow)[^\]]*\]")


def command_line() -> str:
    """Return usage, description and options of every verb."""
    return "\n".join(_verb("sbonnx", typer.main.get_command(build())))


def _verb(path: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=path)
    inner = getattr(command, "commands", None)
    if inner is not None:
        for name in sorted(inner):
            if not inner[name].hidden:
                yield from _verb(f"{path} {name}", inner[name])
        return
    yield f"\n## {path}\n\n{_plain(command.help or '')}\n"
    yield f"\n```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    rows = [_option(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    yield '<div class="options" markdown>\n\n| argument or option | value | default | meaning |\n|---|---|---|---|'
    yield from rows
    yield "\n</div>"
    examples = EXAMPLES.get(path.partition(" ")[2], ())
    if examples:
        yield "\n".join(["", "```console", *(f"$ {line}" for line in examples), "```"])


def _option(parameter: Any) -> str:
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name]
    values = (parameter.metavar or "") if parameter.param_type_name == "option" else ""
    given = getattr(parameter.default, "value", parameter.default)
    if isinstance(getattr(parameter, "show_default", None), str):
        given = parameter.show_default
    default = "required" if parameter.required else "" if given in (None, (), [], "", False) else f"`{given}`"
    named = ", ".join(f"`{name}`" for name in [*names, *parameter.secondary_opts])
    return "| " + " | ".join(map(_cell, (named, values, default, _plain(parameter.help or "")))) + " |"


def _plain(text: str) -> str:
    return MARKUP.sub("", text.replace("\b", ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def recipe_defaults() -> str:
    """Return the output of `sbonnx recipe` for each backend."""
    return "\n".join(
        f"\n## {backend}\n\n```yaml\n{_printed('recipe', '--backend', backend)}```\n"
        for backend in ("onnxruntime", "tensorrt", "virtual")
    )


def _printed(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as taken:
        if cli.main(list(arguments)):
            raise RuntimeError(f"sbonnx {' '.join(arguments)} failed")
    return taken.getvalue()


def lint_rules() -> str:
    """Return tables of the lint rules by family, with links to their pages."""
    parts: list[str] = []
    for family, rules in RULES.items():
        parts.append(f"\n## {family}\n\n| rule | what must hold | severity |\n|---|---|---|")
        parts += [f"| [{rule.id}]({_file(rule.id)}) | {_cell(rule.title)} | {rule.severity} |" for rule in rules]
    return "\n".join([*parts, ""])


def _file(rule: str) -> str:
    return f"lint/{rule}.md"


def rule_pages() -> Iterator[tuple[str, str]]:
    """Yield name and text of the page of each lint rule: what `sbonnx explain RULE` prints, and a drawing."""
    models = rule_models()
    for rule in (rule for rules in RULES.values() for rule in rules):
        explanation = general(rule.id)
        assert isinstance(explanation.facts, RuleFacts)
        facts = "\n".join(f"- **{name}**: {value}" for name, value in shown_facts(explanation).items())
        text = f"# {rule.id}: {rule.title}\n\n{facts}\n\n"
        text += f"`sbonnx explain {rule.id}` prints this page. [All rules](../lint_rules.md), [lint](../../lint.md).\n"
        if (example := explanation.facts.example) is not None:
            names = re.findall(r"[^\s/]+", example.finding.partition(": ")[0])
            text += f"\n## Example\n\n{drawing(models[rule.id].bad, names)}\n\n"
            text += f"```text\n{example_text(example)}\n```\n"
        yield f"reference/{_file(rule.id)}", text


def json_output() -> str:
    """Return the schema of every JSON output."""
    return "\n".join(
        f'\n## {name}\n\n{schema["description"]}\n\n??? note "Schema"\n\n{_indented(schema)}\n'
        for name, schema in ((name, json_schema(name)) for name in SCHEMAS)
    )


def _indented(schema: dict[str, Any]) -> str:
    return textwrap.indent(f"```json\n{json.dumps(schema, indent=2)}\n```", "    ")


PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/command_line.md": command_line,
    "reference/recipe_defaults.md": recipe_defaults,
    "reference/lint_rules.md": lint_rules,
    "reference/json_output.md": json_output,
}


def main() -> None:
    """Append the generated parts to their pages, and add the pages that are files outside `docs/`."""
    for page, make in PAGES.items():
        with mkdocs_gen_files.open(page, "a") as out:
            out.write(make())
    for page, text in rule_pages():
        with mkdocs_gen_files.open(page, "w") as out:
            out.write(text)
    for source, page in COPIED.items():
        with mkdocs_gen_files.open(page, "w") as out:
            out.write(copied((ROOT / source).read_text(encoding="utf-8"), source))


main()
