"""Rewrites that take out what computes nothing, or what can be computed now. All are exact, bit for bit."""
