"""Simplification: removes no-ops and computes constants. All rewrites are bit-exact."""
