"""Tables of parts that other installed packages extend through entry points.

A package adds an observer by an entry point of the group `sbonnx.observers` in its pyproject.toml:

    [project.entry-points."sbonnx.observers"]
    trimmed = "my_package.observers:Trimmed"

Names are known from the packages' metadata; the module is imported when its name is used.
"""

from __future__ import annotations

from sbonnx.plugins.registry import (
    BACKENDS,
    ENGINES,
    LINT_RULES,
    METRICS,
    MODEL_FOLDERS,
    OBSERVERS,
    READERS,
    ROUNDINGS,
    Registry,
    optional_part,
    plugins_of,
)

__all__ = [
    "BACKENDS",
    "ENGINES",
    "LINT_RULES",
    "METRICS",
    "MODEL_FOLDERS",
    "OBSERVERS",
    "READERS",
    "ROUNDINGS",
    "Registry",
    "optional_part",
    "plugins_of",
]
