"""Contents of an HTML file, read by the parser of the standard library."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img", "hr", "wbr"}
CLOSED = {"rect", "line", "path", "circle"}
"""Self-closing elements of SVG."""


class Page(HTMLParser):
    """Elements with their attributes, texts by element, and nesting errors."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is never closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in CLOSED | VOID:
            self.wrong.append(f"<{tag}/> does not end in itself")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.wrong.append(f"</{tag}> where {self._open[-3:]} are open")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data))

    def attributes(self, name: str) -> Iterator[str]:
        """All values of an attribute."""
        return (attrs[name] for _, attrs in self.elements if name in attrs)

    @property
    def words(self) -> str:
        """All visible text, without style and script."""
        return "\n".join(data for tag, data in self.texts if tag not in ("style", "script"))
