"""Links of the documentation site that lead to files outside `docs/`, and the version in its footer.

The documents are read on the site and in the repository. A link to a file of the repository that is no page of the site
becomes a link to the repository's host if `repo_url` is configured, and its text otherwise.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from sbonnx.version import __version__

LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")

SEARCH: Final = 'data-md-component="search" role="dialog"'

ROOT: Final = Path(__file__).resolve().parents[2]

COPIED: Final = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    **{
        path.relative_to(ROOT).as_posix(): f"examples/{path.parent.name}.md"
        for path in sorted((ROOT / "examples").glob("*/README.md"))
    },
}
"""Page of each file outside `docs/` that is copied to the site."""

PAGES: Final = {**COPIED, "README.md": "index.md"}
"""Page that a link to a file outside `docs/` leads to."""


def on_config(config: Any) -> Any:
    """Name the version in the footer of each page; called by MkDocs."""
    config.copyright = f"sbonnx {__version__}, Apache-2.0"
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog of the search, which the theme leaves without a name; called by MkDocs."""
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"')


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page; called by MkDocs."""
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda match: rewritten(match, folder, config.repo_url or ""), markdown)


def copied(markdown: str, source: str) -> str:
    """Return the text of a file outside `docs/` with links relative to its page.

    Args:
        markdown: the text.
        source: path of the file, a key of `COPIED`.
    """
    folder = posixpath.join("docs", posixpath.dirname(COPIED[source]))

    def moved(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" not in target:
            target = posixpath.relpath(posixpath.join(posixpath.dirname(source), target), folder)
        return f"[{match['text']}]({target}{match['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def rewritten(match: re.Match[str], folder: str, repository: str) -> str:
    """Return one link as the site has it.

    Args:
        match: of `LINK`.
        folder: of the page, relative to `docs/`.
        repository: URL of the repository's files, or "".
    """
    text, target, anchor = match["text"], match["target"], match["anchor"] or ""
    path = posixpath.normpath(posixpath.join("docs", folder, target))
    if "://" in target or path.startswith("docs/"):
        return match[0]
    if path in PAGES:
        return f"[{text}]({posixpath.relpath(PAGES[path], folder or '.')}{anchor})"
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})" if repository else text
