"""Steps as processes of their own: start, limits, locks, cleanup."""
