"""Channel ids: which channels of which tensors belong together, traced through the operators between layers.

`ids` allocates ids and merges them into groups, `trace` visits a graph with a table of rules, and `moving_ops` has the
rules of operators that move, select or average values. Equalization (groups with one scale) and pruning (groups that
are removed together) add the rules of all other operators.
"""
