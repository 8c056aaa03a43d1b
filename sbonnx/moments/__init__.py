"""Statistics of the input activations of linear ops: second moments (Hessian) and means.

Second moments determine the squared output error of a layer, means determine its mean output error.
"""

from sbonnx.moments.means import Means, MeanSums
from sbonnx.moments.second import Moments, shrinkage_of
from sbonnx.moments.share import HELD, Compensation, HeldRows, compensation_of, is_held, shift_gains
from sbonnx.moments.sums import LEAST_ROWS, WIDE, MomentSums, bytes_for, rows_a_sample, sample_weights

__all__ = [
    "HELD",
    "LEAST_ROWS",
    "WIDE",
    "Compensation",
    "HeldRows",
    "MeanSums",
    "Means",
    "MomentSums",
    "Moments",
    "bytes_for",
    "compensation_of",
    "is_held",
    "rows_a_sample",
    "sample_weights",
    "shift_gains",
    "shrinkage_of",
]
