"""Storage of models: mapped weights, temporary files, and atomic writes."""
