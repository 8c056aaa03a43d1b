"""TensorRT: rules of its versions, and its calibration cache."""
