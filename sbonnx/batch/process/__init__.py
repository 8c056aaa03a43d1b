"""Steps in separate processes: start, limits, locks, cleanup."""
