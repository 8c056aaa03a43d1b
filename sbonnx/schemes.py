"""Schemes of quantization and versions of runtimes, by the names that recipes and backends share."""

from __future__ import annotations

from typing import Final, Literal, get_args

Scheme = Literal["per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine"]
WeightScheme = Literal[Scheme, "auto"]

BY_WIDTH: Final = "auto"
"""Scheme of weights that depends on the bit width, see `sbonnx.recipe.defaults.is_symmetric`."""

Version = Literal["11", "10", "8.6"]
"""Versions of TensorRT."""

VERSIONS: Final[tuple[Version, ...]] = get_args(Version)
"""Newest first; the first is the default."""
