"""Links of the documentation site that lead to files outside `docs/`.

The documents are read on the site and in the repository. A link to a file of the repository that is no page of the site
becomes a link to the repository's host if `repo_url` is configured, and its text otherwise.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any, Final

LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")

PAGES: Final = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
}
"""Files of the repository's root that are pages of the site."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page; called by MkDocs."""
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda match: rewritten(match, folder, config.repo_url or ""), markdown)


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
