"""Types of a rule and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sbonnx.lint.view import View

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One place where a model violates a rule.

    Attributes:
        rule: id of the rule, such as "T02".
        severity: "error": the runtime rejects the model, or computes other results; "warning": slower or less accurate;
            "info": cannot be decided from the file alone.
        node: name of the node, or "".
        tensor: name of the tensor, or "".
        why: description of the violation.
        mend: recommended action.
    """

    rule: str
    severity: Severity
    node: str
    tensor: str
    why: str
    mend: str

    def to_dict(self) -> dict[str, str]:
        """Convert to plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """One rule of a runtime.

    Attributes:
        id: short and stable; the same in reports, documents and CI.
        title: the requirement.
        severity: severity of every finding.
        mend: recommended action for a finding.
        check: yields (node, tensor, why) for each violation.
        versions: targets that the rule applies to, such as "tensorrt@11"; empty for all of its family.
    """

    id: str
    title: str
    severity: Severity
    mend: str
    check: Callable[[View], Iterable[tuple[str, str, str]]]
    versions: tuple[str, ...] = ()
