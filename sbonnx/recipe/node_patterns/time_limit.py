"""Time limit for regular expressions of users: some need exponential time, and Python's `re` has no limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Final

from sbonnx.isolation import python_command

LIMIT: Final = 10.0
"""Seconds for all names of a model. Normal expressions take milliseconds."""


def first_slow(expressions: Sequence[str], names: Collection[str]) -> str | None:
    """Return the first regular expression that takes longer than `LIMIT` over all names, or None.

    They are matched in a child process, which can be killed. Only expressions with two or more repetitions can be slow:
    for others no process is started. If the system cannot start one, nothing is measured.
    """
    suspects = [text for text in dict.fromkeys(expressions) if sum(map(text.count, "*+{")) > 1]
    if not suspects or not names:
        return None
    command = python_command(__name__, "match_all")
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with process:
        try:
            process.communicate(json.dumps([suspects, sorted(set(names))]).encode(), timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            done = process.communicate()[0].count(b"\n")
            return suspects[done] if done < len(suspects) else None
        except BaseException:
            process.kill()
            raise
    return None


def match_all() -> None:
    """Match regular expressions with names, both from stdin; print a line for each finished expression."""
    expressions, names = json.loads(sys.stdin.buffer.read())
    for expression in expressions:
        matches = re.compile(expression).fullmatch
        for name in names:
            matches(name)
        print(flush=True)
