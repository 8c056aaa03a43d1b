"""Tables of the rules and their fixes for `docs/lint.md`."""

from __future__ import annotations

from sbonnx.lint import RULES
from sbonnx.lint.fix import FIXES


def table(family: str) -> str:
    """Format the rules of one target family as a Markdown table: id, severity, requirement, effect of ``--fix``.

    Args:
        family: key of `sbonnx.lint.RULES`.
    """
    rows = ["| rule | severity | what must hold | `--fix` |", "|---|---|---|---|"]
    for rule in RULES[family]:
        mends = [one.title for one in FIXES[family] if rule.id in one.rules]
        only = f" ({', '.join(rule.versions)})" if rule.versions else ""
        rows.append(f"| {rule.id} | {rule.severity} | {rule.title}{only} | {'; '.join(mends) or '-'} |")
    return "\n".join(rows)
