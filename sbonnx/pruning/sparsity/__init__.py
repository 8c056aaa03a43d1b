"""Sparse weights: zeros in unchanged shapes, unstructured or N:M. The remaining weights are refitted.

`solver` finds the zeros and the remaining values of one layer, `choice` the layers that become sparse, and `stage`
runs them over a network.
"""
