"""Statistics of the input activations of linear ops: second moments (Hessian) and means.

Second moments determine the squared output error of a layer, means determine its mean output error.
"""

from sbonnx.moments.means import Means, MeanSums
from sbonnx.moments.second import Moments, shrinkage_of
from sbonnx.moments.share import Compensation, HeldRows, compensation_of, shift_gains
from sbonnx.moments.sums import MomentSums, bytes_for, sample_weights

__all__ = [
    "Compensation",
    "HeldRows",
    "MeanSums",
    "Means",
    "MomentSums",
    "Moments",
    "bytes_for",
    "compensation_of",
    "sample_weights",
    "shift_gains",
    "shrinkage_of",
]
