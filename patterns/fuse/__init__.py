"""Fusion: rewrites that merge several nodes into one equivalent node (up to float rounding)."""
