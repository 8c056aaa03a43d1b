"""Dependency groups of channels, and their removal.

`removal_trace` and `removal_rules` trace channels and the constants that are sliced with them, `dimensions` collects
groups into dimensions, `pruning_plan` says which channels are removed, `channel_removal` removes or masks them, and
`size_constants` rewrites constants that hold sizes.
"""
