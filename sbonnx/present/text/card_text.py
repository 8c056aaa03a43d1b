"""Summaries as text: one line for ``repr``, and a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.present.html.card import Card
from sbonnx.present.html.cards import cards_of
from sbonnx.system.terminal import LINE_LENGTH, one_line

GAP = "   "
"""Space between the columns of a table."""


def headline(result: object) -> str:
    """Return the title and the sentence of a result as one line. Of several cards, the last says how it ended."""
    card = cards_of(result)[-1]
    return one_line(": ".join(filter(None, (card.title, card.sentence))), LINE_LENGTH)


def summary(result: object) -> str:
    """Return the cards of a result as lines, without a line break at the end."""
    return "\n".join(line for card in cards_of(result) for line in _lines(card))


def _lines(card: Card) -> Iterator[str]:
    yield one_line(card.title)
    if card.sentence:
        yield one_line(card.sentence)
    for name, value in card.facts:
        yield one_line(f"{name}: {value}")
    table = [[one_line(value) for value in row] for row in (card.columns, *card.shown)] if card.shown else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield GAP.join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
    if card.further > 0 and card.shown:
        yield f"{card.further} more"
