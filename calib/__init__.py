"""Calibration: data in, ranges and scales out.

- `data`: data sets from files and Python objects, checked against the inputs of the model.
- `engine`: execution of the float graph over samples, in segments, and observation of its tensors.
- `sketches`, `observers`: mergeable statistics of a tensor, and the range that each method derives from them.
- `qparams`: scales and zero points from ranges.
- `quantized`: values of the simulated quantized graph.
- `storage`, `cache`: activations within a memory budget, statistics of earlier runs.
- `calibrator`: the entry point; `shared_calibration` observes for several plans at once.
- `held_out`, `recurrent`: hold-out sets for verification, and feeds with the states of recurrent models.
"""
