"""Second moments of what a linear op reads: all that its squared output error depends on."""

from sbonnx.moments.second import Moments
from sbonnx.moments.share import share_of
from sbonnx.moments.sums import MomentSums, bytes_for

__all__ = ["MomentSums", "Moments", "bytes_for", "share_of"]
