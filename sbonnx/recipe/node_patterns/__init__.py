"""Patterns of a recipe that match names of nodes, tensors and torch modules."""
