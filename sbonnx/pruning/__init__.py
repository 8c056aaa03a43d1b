"""Structured pruning: channels are removed from the graph, and the remaining weights are refitted.

`removal_trace` and `removal_rules` trace which channels must be removed together and which constants are sliced,
`dimensions` collects them into dimensions, `pruning_plan` says which channels are removed, and `channel_removal`
removes them, or masks them for comparison.
"""
