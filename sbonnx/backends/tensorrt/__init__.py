"""TensorRT: what its versions read, and its calibration cache."""
