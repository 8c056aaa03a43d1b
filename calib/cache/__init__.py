"""Calibration cache: statistics of earlier runs, and resumption of an interrupted calibration."""
