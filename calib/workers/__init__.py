"""Worker processes: several processes share the samples of one calibration."""
