"""Storage of activations: in memory within a budget, else in a spill file."""
