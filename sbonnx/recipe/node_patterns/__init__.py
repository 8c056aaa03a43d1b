"""Patterns of a recipe on names of nodes, tensors and torch modules."""
