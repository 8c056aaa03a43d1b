"""JSON outputs of the command line as types, and their published schemas."""
