"""Job files, and the steps that jobs become."""
