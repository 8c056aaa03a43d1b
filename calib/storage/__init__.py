"""Storage of activations: memory within a budget, then a file."""
