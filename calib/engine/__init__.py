"""Execution of a float graph over samples, and observation of its tensors."""
