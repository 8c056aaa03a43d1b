"""Refusals, notes and problems: sentences with a code.

A sentence is for people, its code for programs: code that groups, filters or explains sentences compares codes only.
Both are strings, so that a sentence is printed, joined and written to JSON as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


class Coded(str):
    """Sentence with the code of its kind.

    Operations on strings return plain strings: give the code again, as in ``Reason(why.code, f"{why}; more")``.

    Attributes:
        code: short and stable; see `sbonnx.report.explanations`.
    """

    __slots__ = ("code",)

    code: str

    def __new__(cls, code: str, text: str) -> Self:
        sentence = super().__new__(cls, text)
        sentence.code = code
        return sentence

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.code, str(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(str)  # in JSON schemas


class Reason(Coded):
    """Reason of a refusal, one clause."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str, code: str) -> Self:
        """Return a reason as it is, and a plain sentence, such as that of a plug-in, with `code`."""
        return cls(text.code if isinstance(text, Coded) else code, text)


class Note(Coded):
    """Finding or change that a report mentions, one sentence."""

    __slots__ = ()


class Problem(Coded):
    """Why a result is unusable or misses a limit, one sentence."""

    __slots__ = ()


class WithProblems:
    """Result that is good if it has no problems. Its class has the field `problems`."""

    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def problem_codes(self) -> tuple[str, ...]:
        """Codes of the problems (sbonnx explain CODE)."""
        return tuple(problem.code for problem in self.problems)


PROBLEMS: Final = MappingProxyType({"codes": "problem_codes"})
"""Metadata of the field `problems`."""


FLOAT_STEPS: Final = frozenset({"quantize", "quantize input", "quantize inputs", "quantize weight"})
"""Steps whose refusal leaves a node or tensor in float; others leave other integers, such as one scale a tensor."""


@dataclass(frozen=True)
class Refusal:
    """Something that was not done, with the reason. Nothing is skipped silently.

    Attributes:
        what: the step, pattern or site ("fuse_conv_bn", "quantize weight").
        where: the original name of the node or tensor.
        why: the reason, one clause.
        code: kind of the reason, see `sbonnx explain`.
    """

    what: str
    where: str
    why: Reason = field(metadata={"codes": "code"})
    code: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", self.why.code)

    @property
    def leaves_float(self) -> bool:
        """Whether the node or tensor stays in float."""
        return self.what in FLOAT_STEPS

    def __str__(self) -> str:
        return f"{self.what}: not at {self.where}: {self.why}"


def most_frequent(refusals: Collection[Refusal]) -> Refusal:
    """Return the first refusal with the most frequent code; there must be one."""
    kind, _ = Counter(refusal.code for refusal in refusals).most_common(1)[0]
    return next(refusal for refusal in refusals if refusal.code == kind)


AnyCoded = TypeVar("AnyCoded", bound=Coded)


def by_code(sentences: Iterable[AnyCoded]) -> list[tuple[AnyCoded, ...]]:
    """Group sentences by their codes, in order of the first of each. Equal sentences count once."""
    groups: dict[str, dict[AnyCoded, None]] = {}
    for sentence in sentences:
        groups.setdefault(sentence.code, {})[sentence] = None
    return [tuple(group) for group in groups.values()]


def summary(group: Sequence[Coded]) -> str:
    """Return the first sentence of a group, and how many more there are of its code."""
    return f"{group[0]} (and {len(group) - 1} more of this kind)" if len(group) > 1 else str(group[0])
