"""Cache of observed statistics, and resumption of an interrupted calibration."""
