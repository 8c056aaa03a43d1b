"""Fusion: several nodes become one that computes the same (up to the rounding of a float)."""
