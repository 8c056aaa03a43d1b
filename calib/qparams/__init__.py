"""Scales and zero points from observed ranges."""
