"""Budgets of pruning, and the numbers of channels that meet them.

`budget` and `pruned_times` compute costs of a network, `allocate` chooses numbers of channels by sensitivity curves and
a cost, `channel_counts` has numbers that suit the kernels of a backend, and `loss_limit` searches a budget for a loss.
"""
