"""Processes that coverage does not measure."""

from __future__ import annotations

import os


def unmeasured() -> dict[str, str]:
    """Return the environment without coverage, which imports modules at the start and writes a file at the end."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
