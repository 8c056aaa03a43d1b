"""Function-preserving graph rewrites: simplification and fusion.

To add a pattern, append it to the tuples: ``apply(graph, (*FUSE, MINE))``.
"""

from __future__ import annotations

from .blocks import Block, find_blocks
from .blocks.spectra import spectra
from .fixed_point import Applied, Pattern, Sweep, apply
from .fuse.batchnorm import FUSE_BN, FUSE_BN_BEFORE
from .fuse.canonical import (
    CLIP_TO_RELU,
    EINSUM_TO_MATMUL,
    FOLD_GEMM_FACTORS,
    GEMM_WITHOUT_ADDEND,
    MATMUL_ADD_TO_GEMM,
    MATMUL_WITHOUT_UNIT_AXES,
)
from .fuse.constant import FUSE_CONSTANT, FUSE_CONSTANT_BEFORE, FUSE_SCALE_OF_BIASED
from .fuse.pad import FUSE_PAD_AVERAGE_POOL, FUSE_PAD_CONV, FUSE_PAD_MAX_POOL
from .match import Match
from .rewriting import Edit
from .simplify.axes import ALL_AXES
from .simplify.branches import INLINE_IF
from .simplify.collapse import COLLAPSE
from .simplify.fold import FOLD
from .simplify.no_ops import NO_OPS
from .simplify.redundant import DEAD, INITIALIZERS, NODES
from .simplify.shapes import SHAPES
from .tree import Any_, Const, Maybe, Op, Or, Var, X

SIMPLIFY: tuple[Pattern | Sweep, ...] = (
    FOLD,  # first: infers the shapes that the following patterns need
    INLINE_IF,  # a condition is often folded first
    DEAD,  # before the patterns: a dead reader counts as a second reader
    *NO_OPS,
    *COLLAPSE,
    *ALL_AXES,
    *SHAPES,  # their constants are folded in the next round
    NODES,
    INITIALIZERS,  # last: folding creates equal constants
)

FUSE: tuple[Pattern | Sweep, ...] = (
    # First patterns that create plain layers, into which other patterns can fold.
    EINSUM_TO_MATMUL,
    GEMM_WITHOUT_ADDEND,  # before its factor 0 is multiplied with an infinite constant
    FOLD_GEMM_FACTORS,
    MATMUL_WITHOUT_UNIT_AXES,
    MATMUL_ADD_TO_GEMM,
    FUSE_PAD_CONV,
    FUSE_PAD_AVERAGE_POOL,
    FUSE_PAD_MAX_POOL,
    # Fold into the preceding layer: between two layers it takes the BatchNormalization, which is always exact.
    FUSE_BN,
    FUSE_CONSTANT,
    FUSE_SCALE_OF_BIASED,
    # Fold into the following layer, which zero padding often prevents. After FUSE_PAD_CONV, which may add padding.
    FUSE_BN_BEFORE,
    FUSE_CONSTANT_BEFORE,
    CLIP_TO_RELU,
)

__all__ = [
    "FUSE",
    "SIMPLIFY",
    "Any_",
    "Applied",
    "Block",
    "Const",
    "Edit",
    "Match",
    "Maybe",
    "Op",
    "Or",
    "Pattern",
    "Sweep",
    "Var",
    "X",
    "apply",
    "find_blocks",
    "spectra",
]
