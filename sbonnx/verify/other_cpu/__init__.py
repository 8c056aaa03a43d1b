"""Computation of what another kind of CPU than this one computes."""
