"""Statistics of the input activations of linear ops: second moments (Hessian) and means.

Second moments determine the squared output error of a layer, means determine its mean output error.
"""

from sbonnx.moments.means import Means, MeanSums
from sbonnx.moments.second import Moments, shrinkage_of
from sbonnx.moments.share import HeldRows, share_of
from sbonnx.moments.sums import MomentSums, bytes_for, sample_weights

__all__ = [
    "HeldRows",
    "MeanSums",
    "Means",
    "MomentSums",
    "Moments",
    "bytes_for",
    "sample_weights",
    "share_of",
    "shrinkage_of",
]
