"""Moments of what a linear op reads: all that its squared output error, or its mean error, depends on."""

from sbonnx.moments.means import Means, MeanSums
from sbonnx.moments.second import Moments
from sbonnx.moments.share import share_of, shrinkage_of
from sbonnx.moments.sums import MomentSums, bytes_for

__all__ = ["MeanSums", "Means", "MomentSums", "Moments", "bytes_for", "share_of", "shrinkage_of"]
