"""Jinja environment of the templates of this package."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Final

from sbonnx.present.html import formatting

if TYPE_CHECKING:
    from jinja2 import Environment

EMBEDDED: Final = {"style": "page.css", "script": "page.js", "layout": "dagre.min.js", "graph": "graph.js"}
"""Style and scripts of the pages; the last two only on pages with a graph. Layouts are computed by @dagrejs/dagre."""


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Create the Jinja environment: autoescape is on, and undefined names are errors."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_read_file),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: formatting.text(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in ("plain", "decibel", "ratio", "percent", "count", "size", "seconds", "raw", "pieces"):
        environment.filters[name] = getattr(formatting, name)
    for name, file in EMBEDDED.items():
        content = _read_file(file).strip()
        environment.globals[name] = content
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        environment.globals[f"{name}_hash"] = f"sha256-{digest}"  # hash source of the Content-Security-Policy
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _read_file(name: str) -> str:
    """Read a file of this package, which may be zipped."""
    return resources.files("sbonnx.present.html").joinpath(name).read_text(encoding="utf-8")
