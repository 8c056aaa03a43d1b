"""Structured pruning: channels are removed from the graph, and the remaining weights are refitted.

`groups` finds which channels go together and removes them. `float_pass` measures moments of layer inputs, `criteria`
order the groups of a dimension, `curves` measure what their removal costs, `budget` and `allocate` choose the numbers,
`two_streams` refits the remaining weights by `ridge` regression. `prune` is the stage as a whole, and `verified` the
entry point with verification.
"""
