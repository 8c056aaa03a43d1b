"""Problems of a recipe and their messages: one line with the file, key path, value and fix."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sbonnx.errors import RecipeError

Path = tuple[str | int, ...]

OMITTED: Final = object()
"""Marks a value that the message omits: the text contains it, or there is none."""

SIMILAR: Final = 2 / 3
"""Ratio of `difflib` from which a name without shared parts counts as similar."""

LISTED: Final = 4
"""Problems of a recipe that one message describes."""

BITS: Final = "bits"
"""Short form that sets both widths, ``w8a8``, or both types, ``fp8``."""

COMPARED: Final = 300
"""Maximum characters of names that are compared for similarity: the time grows with the product of lengths."""

_KEY: Final = r"[A-Z][A-Z0-9_]{,40}"


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Limit the length: Python refuses to format integers of more than 4300 digits."""
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"


_SHORT = _Repr()

_SHORT.maxstring = _SHORT.maxother = 70
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4
_SHORT.maxlevel = 3


def short(value: object) -> str:
    """Format `value` as its repr, on one line and shortened to a readable length."""
    return _SHORT.repr(value)


def one_of(names: Iterable[str]) -> str:
    """Join names as ``a, b or c``."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def most_similar(word: str, names: Collection[str], *, count: int, fallback: bool = True) -> list[str]:
    """Return the names of nodes or tensors most similar to `word`: by number of shared parts, then by similarity.

    If none is similar: the first names with `fallback`, else none.

    Parts are runs of letters and digits: ``layer1_0_conv1`` shares three with ``/layer1/layer1.0/conv1/Conv``.
    """
    import difflib
    import heapq

    wanted = word[:COMPARED].lower()
    parts = set(re.findall(r"[a-z0-9]+", wanted))
    compare = difflib.SequenceMatcher(autojunk=False)
    compare.set_seq2(wanted)

    def score(name: str) -> tuple[int, float]:
        name = name[:COMPARED].lower()
        compare.set_seq1(name)
        return len(parts & set(re.findall(r"[a-z0-9]+", name))), compare.ratio()

    scored = heapq.nlargest(count, ((*score(name), -index, name) for index, name in enumerate(names)))
    similar = [name for shared, ratio, _, name in scored if shared or ratio > SIMILAR]
    return similar or (list(names)[:count] if fallback else [])


def nearest(word: str, names: Collection[str], *, count: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return those of `names` most similar to `word`, best first; case and punctuation do not count."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9+]+", " ", text[:COMPARED].lower()).strip()

    import difflib

    spelled: dict[str, list[str]] = {}
    for name in names:
        spelled.setdefault(plain(name), []).append(name)
    close = difflib.get_close_matches(plain(word), spelled, n=count, cutoff=cutoff)
    return [name for key in close for name in spelled[key]][:count]


def suggestion(word: str, names: Collection[str], *, count: int = 1, cutoff: float = 0.5) -> str:
    """Return a question with the names most similar to `word`, or ""."""
    close = nearest(word, names, count=count, cutoff=cutoff)
    return f"Did you mean {one_of(close)}?" if close else ""


def key_path(path: Path) -> str:
    """Format a path as ``W.SPECIFIC[0]['conv*'].QUANTIZER.BIT``: keys with dots, positions and patterns in brackets."""
    text = ""
    for part in path:
        if isinstance(part, str) and re.fullmatch(_KEY, part):
            text += f".{part}" if text else part
        elif isinstance(part, str) and not text:
            text = short(part)[1:-1]
        else:
            text += f"[{short(part)}]"
    return text


class Wrong(ValueError):
    """A single problem of a recipe.

    Args:
        text: continues the sentence "'KEY' in FILE ...".
        hint: a separate sentence with the fix.
        path: the key, relative to the code that raises; outer code prepends its own keys.
        value: the invalid value, if the message should repeat it.
    """

    def __init__(self, text: str, hint: str = "", *, path: Path = (), value: object = OMITTED) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint
        self.path = path
        self.value = value

    def under(self, *outer: str | int) -> Wrong:
        """Return the problem with outer keys prepended to its path."""
        return Wrong(self.text, self.hint, path=(*outer, *self.path), value=self.value)


class ManyWrong(ValueError):
    """Several problems at once, each with its own path."""

    def __init__(self, items: tuple[Wrong, ...]) -> None:
        super().__init__("; ".join(item.text for item in items))
        self.items = items


class TypedOption(str):
    """``KEY=VALUE`` of an option of the command line.

    Attributes:
        option: the option as typed: ``--observer``, ``--set W.QUANTIZER.BIT``.
    """

    option: str

    def __new__(cls, text: str, option: str) -> TypedOption:
        typed = super().__new__(cls, text)
        typed.option = option
        return typed


@dataclass(frozen=True)
class KeyOrigin:
    """Source of the keys of a recipe, for error messages.

    Attributes:
        name: the file as the user named it, or "" for a dict or the defaults.
        lines: line number (from 1) by key path, joined with dots, in lower case.
        overridden: names as typed (``--observer``, ``observer=``, ``A.OBSERVER``), by the key path, in the same form,
            that they set.
    """

    name: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)

    def where(self, path: Path) -> str:
        """Describe the place of a key: ``in resnet.yaml line 12``, ``in the recipe`` or ``in the overrides``."""
        if self._typed(path):
            return "in the overrides"
        keys = [str(part).lower() for part in path]
        prefixes = [".".join(keys[:length]) for length in range(len(keys), 0, -1)]
        if not self.name:
            return "in the recipe"
        line = next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), None)
        return f"in {self.name}" if line is None else f"in {self.name} line {line}"

    def error(self, *problems: Wrong) -> RecipeError:
        """Create the exception for the problems of a recipe, the first `LISTED` of which are described."""
        texts = [self._text(problem) for problem in problems[:LISTED]]
        if len(problems) == 1:
            return RecipeError(texts[0])
        more = f"; {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(texts, 1))
        return RecipeError(f"{len(problems)} problems: {listed}{more}")

    def _text(self, problem: Wrong) -> str:
        path, typed = key_path(problem.path), self._typed(problem.path)
        text = f"{self._subject(problem.path, path, typed)} {problem.text}"
        if problem.value is not OMITTED:
            of_side = typed.strip("-=") == BITS and path.startswith(("W.", "A.")) and isinstance(problem.value, int)
            side = path[0].lower() if of_side else ""  # of w8a8
            text += f", got {side}{short(problem.value)}"
        if problem.hint:
            text += f". {problem.hint}"
        return " ".join(text.split())

    def _typed(self, path: Path) -> str:
        """Return the option or keyword that set a key, or a section around it; "" if it is from the source."""
        keys = [str(part).lower() for part in path]
        prefixes = (".".join(keys[:length]) for length in range(len(keys), 0, -1))
        return next((self.overridden[prefix] for prefix in prefixes if prefix in self.overridden), "")

    def _subject(self, keys: Path, path: str, typed: str) -> str:
        if typed.startswith("--") or typed.endswith("="):
            name = typed.removeprefix("--set ").strip("-=").replace("-", "_")
            return typed if name.lower() == path.lower() or not path else f"{typed} ({path})"
        where = self.where(keys)
        if typed and not f"{path}.".lower().startswith(f"{typed}.".lower()):
            return f"'{typed}' ({path})"
        if path:
            return f"'{path}' {where}"
        return "the recipe" if where == "in the recipe" else f"the recipe {where}"
