"""Discrete search of quantized weights: beam search, tabu search, coordinate descent."""
