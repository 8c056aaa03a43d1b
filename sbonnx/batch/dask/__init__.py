"""Batches on Dask clusters, and calibration sharded over their workers."""
