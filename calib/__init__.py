"""Calibration: data in, ranges and scales out.

In the order in which data meets them: `data` (with `readers`), `rows`, `segments` (with `branches`), `runner`, `store`,
`observe` (with `observers`, `nonfinite`, `progress`), `solve`, `walk`; `forward` proves the result.
"""
