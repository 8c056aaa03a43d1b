"""T01: conversion of integer operators to float operators between Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.lint.fix.bench import Bench
from sbonnx.lint.fix.types import Fixed
from sbonnx.qdq import unfold


def unfolded(bench: Bench) -> Iterator[Fixed]:
    """T01: Convert the QOperator format, dynamic quantization and MatMulNBits to float operators between pairs.

    The last two lose what no pair can express.
    """
    fired, refusals = unfold(bench.graph)
    for one in fired:
        op = one.pattern.rpartition(" ")[2]
        yield Fixed("T01", one.node, "", f"{op} written as float operator between pairs")
    for refusal in refusals:
        yield Fixed("T01", refusal.where, "", refusal.why, done=False)
