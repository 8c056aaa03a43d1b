"""Model files: mapped weights, temporary files, and output that is written whole or not at all."""
