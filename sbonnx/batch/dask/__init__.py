"""Batches on Dask clusters, and calibration split over their workers."""
