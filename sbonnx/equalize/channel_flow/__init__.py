"""Propagation of channels through the operators between layers, so that channel scales can cancel."""
