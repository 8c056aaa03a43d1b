"""Peers in environments of their own: each a script that their Python runs and that imports nothing of ours."""
