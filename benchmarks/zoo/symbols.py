"""Inputs of networks that read bytes, letters, tokens, molecules or rows of a table."""

from __future__ import annotations

import keyword
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.zoo.corpus import WORDS, Corpus, Feed

SAMPLES: Final = 96
"""Sentences or molecules."""

HEBREW: Final = """שלום עולם הילד הלך אל בית הספר בבוקר השמש זורחת מעל הים הגדול ואנחנו קוראים ספר חדש על תולדות הארץ
היא כתבה מכתב ארוך לחברה שלה מים קרים לחם טרי אנשים רבים באו לשמוע מוזיקה יפה ביום שבת עץ גבוה דרך ארוכה מחשב קטן"""

ARABIC: Final = """ذهب الولد إلى المدرسة في الصباح كتب الطالب رسالة طويلة إلى صديقه الشمس تشرق على البحر الكبير
قرأت كتابا جديدا عن تاريخ العلوم في المدينة القديمة يعمل الناس كل يوم
والطعام لذيذ والماء بارد هذا بيت جميل وتلك شجرة عالية"""

ARABIC_LETTERS: Final = "ءآأؤإئابةتثجحخدذرزسشصضطظعغفقكلمنهوىي"
"""In the order of libtashkeel's numbers, of which the first is 18."""


class Element(NamedTuple):
    """An element: atomic number, valence, group, period, place in MiniMol's list, and share of the atoms."""

    number: int
    valence: int
    group: int
    period: int
    place: int
    share: float


ELEMENTS: Final = (
    Element(6, 4, 14, 2, 0, 0.72),
    Element(7, 3, 15, 2, 1, 0.1),
    Element(8, 2, 16, 2, 2, 0.12),
    Element(16, 2, 16, 3, 3, 0.03),
    Element(9, 1, 17, 2, 4, 0.03),
)


def file_bytes(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield the first and last bytes of files of Python's library, int32 (1, N), as Magika reads them."""
    half, end = int(length) // 2, 256
    files = sorted(path for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*") if path.is_file())
    kinds: dict[str, int] = {}
    for path in files:
        kinds[path.suffix] = kinds.get(path.suffix, 0) + 1
        if kinds[path.suffix] > 8 or not path.stat().st_size:
            continue
        content = path.read_bytes().strip()
        values = np.full(2 * half, end, np.int32)
        first, last = content[:half], content[-half:]
        values[: len(first)] = list(first)
        values[2 * half - len(last) :] = list(last)
        yield {names[0]: values[None]}


def characters(corpus: Corpus, names: list[str], count: str) -> Iterator[Feed]:
    """Yield words as one-hot characters, float32 (1, letters, N)."""
    alphabet = " !\"#%&'()*+,-./:;?@[]_~0123456789abcdefghijklmnopqrstuvwxyz"
    for word in dict.fromkeys(word.lower() for word in WORDS):
        rows = np.zeros((1, len(word), int(count)), np.float32)
        for place, letter in enumerate(word):
            rows[0, place, alphabet.index(letter) % int(count)] = 1
        yield {names[0]: rows}


def tokens(corpus: Corpus, names: list[str], first: str, last: str) -> Iterator[Feed]:
    """Yield sentences of BERT's vocabulary, ordered by frequency, (1, N), with a mask of ones."""
    rng = np.random.default_rng(29)
    for _ in range(SAMPLES):
        ranks = (rng.pareto(0.7, int(rng.integers(5, 24))) * 20).astype(np.int64) % (int(last) - int(first))
        ids = np.concatenate([[101], int(first) + ranks, [102]])[None]
        yield {name: ids if "ids" in name else np.ones_like(ids) * ("mask" in name) for name in names}


def phonemes(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield words as Piper's symbols of phonemes, (1, N), without noise."""
    rng = np.random.default_rng(31)
    codes = {chr(97 + place): 14 + place - (place > 6) for place in range(26)} | {" ": 3, "g": 66}
    for _ in range(SAMPLES):
        words = " ".join(rng.choice(WORDS, int(rng.integers(2, 6)))).lower()
        ids = [1, *(code for letter in words if letter in codes for code in (codes[letter], 0)), 2]
        scales = np.array([0, 1, 0], np.float32)
        yield dict(zip(names, (np.array([ids]), np.array([len(ids)]), scales), strict=True))


def spelled(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield words of up to 24 letters as their numbers in Hibari's vocabulary, (1, N)."""
    letters = [chr(65 + place) for place in range(26)] + ["_"] + [chr(97 + place) for place in range(26)]
    for word in sorted({*keyword.kwlist, *sys.stdlib_module_names}):
        yield {names[0]: np.array([[letters.index(letter) + 1 for letter in word[:24] if letter in letters]])}


def _sentences(words: str) -> Iterator[str]:
    rng = np.random.default_rng(37)
    for _ in range(SAMPLES):
        yield " ".join(rng.choice(words.split(), int(rng.integers(3, 12))))


def hebrew(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield Hebrew text as Nakdimon's numbers of letters, float32 (1, N)."""
    regular = str.maketrans("ךםןףץ", "כמנפצ")
    for text in _sentences(HEBREW):
        codes = [4 if letter == " " else 16 + ord(letter) - 0x5D0 for letter in text.translate(regular)]
        yield {names[0]: np.array([codes], np.float32)}


def arabic(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield Arabic text as libtashkeel's numbers of letters, (1, N), without hints."""
    for text in _sentences(ARABIC):
        ids = np.array([[1 if letter == " " else 18 + ARABIC_LETTERS.index(letter) for letter in text]])
        yield dict(zip(names, (ids, np.zeros_like(ids), np.array([ids.size])), strict=True))


def _grown(rng: np.random.Generator) -> tuple[Any, Any]:
    """Return elements, (N,) of `ELEMENTS`, and bonds, int (N, N), of a connected graph that keeps valences."""
    elements = rng.choice(len(ELEMENTS), int(rng.integers(8, 28)), p=[element.share for element in ELEMENTS])
    free = np.array([ELEMENTS[index].valence for index in elements])
    elements[0], free[0] = 0, 4
    bonds = np.zeros((len(elements), len(elements)), np.int64)
    for atom in range(1, len(elements)):
        open_atoms = np.flatnonzero(free[:atom] > (0 if free[atom] > 1 or free[:atom].sum() > 1 else 9))
        if not len(open_atoms):
            return elements[:atom], bonds[:atom, :atom]
        other = int(rng.choice(open_atoms[-6:]))
        for partner in {other, max(0, other - 4) if atom % 6 == 5 else other}:  # every sixth atom closes a ring
            if free[partner] > 0 and free[atom] > 0:
                bonds[atom, partner] = bonds[partner, atom] = 1
                free[[atom, partner]] -= 1
    for atom, other in np.argwhere(np.triu(bonds)):
        if free[atom] and free[other] and rng.random() < 0.3:
            bonds[atom, other] = bonds[other, atom] = 2
            free[[atom, other]] -= 1
    return elements, bonds


def _distances(bonds: Any) -> Any:
    """Return the numbers of bonds between atoms, (N, N)."""
    reach, distances = np.eye(len(bonds), dtype=bool), np.full(bonds.shape, len(bonds))
    for steps in range(len(bonds)):
        distances[reach & (distances > steps)] = steps
        reach = reach | (reach @ (bonds > 0))
    return distances


def reaction(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield two molecules that join by a bond, as rxnmap's atoms, neighbours, distances and roles, (1, N)."""
    rng = np.random.default_rng(41)
    for _ in range(SAMPLES):
        parts = [_grown(rng), _grown(rng)]
        count = len(parts[0][0])
        joined = np.zeros((count + len(parts[1][0]),) * 2, np.int64)
        joined[:count, :count], joined[count:, count:] = parts[0][1], parts[1][1]
        joined[0, count] = joined[count, 0] = 1
        molecules = [*parts, (np.concatenate([parts[0][0], parts[1][0]]), joined)]
        rows, sizes = [[0, 0, 1]], [1]
        for role, elements in zip((2, 2, 3), (atoms for atoms, _ in molecules), strict=True):
            atoms = [ELEMENTS[index] for index in elements]
            rows += [[1, 0, 0], *([atom.number + 2, atom.valence + 2, role] for atom in atoms)]
            sizes.append(len(atoms) + 1)
        distances = np.ones((len(rows), len(rows)), np.int64)
        distances[0, 1:] = distances[1:, 0] = 0
        for start, (_, bonds) in zip(np.cumsum(sizes)[:-1], molecules, strict=True):
            end = start + 1 + len(bonds)
            distances[start + 1 : end, start + 1 : end] = np.minimum(_distances(bonds), 10) + 2
        atoms, neighbors, roles = np.array(rows).T[:, None]
        yield dict(zip(names, (atoms, neighbors, distances[None], roles), strict=True))


def molecule(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield a molecule as MiniMol's features of atoms and bonds, its Laplacian, and returns of random walks."""
    rng = np.random.default_rng(43)
    for _ in range(SAMPLES):
        elements, bonds = _grown(rng)
        count, linked = len(elements), (bonds > 0).astype(float)
        degree = linked.sum(1)
        atoms = np.zeros((count, 85), np.float32)
        for atom, index in enumerate(elements):
            element = ELEMENTS[index]
            atoms[atom, [element.place, 44 + element.group - 1, 63 + element.period - 1, 71 + element.valence]] = 1
        atoms[:, 80] = degree
        start, end = np.nonzero(bonds)
        edges = np.zeros((len(start), 13), np.float32)
        edges[np.arange(len(start)), bonds[start, end] - 1] = edges[:, 5] = 1
        values, vectors = np.linalg.eigh(np.diag(degree) - linked)
        step, walk, returns = linked / degree[:, None], np.eye(count), []
        for _ in range(16):
            walk = walk @ step
            returns.append(np.diag(walk))
        chosen = np.zeros((2, count, 8), np.float32)
        chosen[0, :, : min(count, 8)], chosen[1, :, : min(count, 8)] = vectors[:, :8], values[:8]
        feats = (atoms, edges, np.stack([start, end]), *chosen, np.stack(returns, 1).astype(np.float32))
        yield dict(zip(names, (*feats, np.zeros(count, np.int64), np.zeros(1, np.float32)), strict=True))


def table(corpus: Corpus, names: list[str], columns: str) -> Iterator[Feed]:
    """Yield rows of numbers, float32 (1, N)."""
    rng = np.random.default_rng(11)
    for _ in range(256):
        yield {names[0]: rng.uniform(0, 10, (1, int(columns))).astype(np.float32)}
