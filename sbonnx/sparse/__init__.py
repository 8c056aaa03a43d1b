"""The module path of Sparsebit's `sparsebit.sparse`: the same names, from where they are in sbonnx."""

from __future__ import annotations

from sbonnx.recipe import parse_sconfig
from sbonnx.sparse_model import SparseModel

__all__ = ["SparseModel", "parse_sconfig"]
