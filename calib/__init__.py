"""Calibration: data in, ranges and scales out.

In the order in which data meets them: `data` (with `readers`, `feedback`), `rows`, `cutting` (with `segments`,
`branches`), `runner` (with `session`, `bound`, `blocked`), `observe` (with `lane`, `threads`, `shards`, `keeping`,
`store`, `arena`, `spill`, `nonfinite`, `progress`), `sketches`, `recall` (with `cache`), `observers`, `asym`, `solve`;
`walk` and `calibrator` lead through them, and `forward` proves the result.
"""
