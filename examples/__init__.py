"""Runnable recipes by kind of model; examples/README.md is the index."""
