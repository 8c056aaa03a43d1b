"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sbonnx.lint.view import View

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One place where a model breaks a rule.

    Attributes:
        rule: id of the rule, such as "T02".
        severity: "error": the runtime refuses, or computes something else; "warning": slower or less accurate;
            "info": what the file alone cannot decide.
        node: name of the node, or "".
        tensor: name of the tensor, or "".
        why: what was found there.
        mend: what to do.
    """

    rule: str
    severity: Severity
    node: str
    tensor: str
    why: str
    mend: str

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """One line of a runtime's rules.

    Attributes:
        id: short and stable; the same in reports, documents and CI.
        title: what must hold.
        severity: of every finding.
        mend: what to do about a finding.
        check: yields (node, tensor, why) for each place that breaks the rule.
        versions: targets that the rule speaks of, such as "tensorrt@11"; empty for all of its family.
    """

    id: str
    title: str
    severity: Severity
    mend: str
    check: Callable[[View], Iterable[tuple[str, str, str]]]
    versions: tuple[str, ...] = ()
