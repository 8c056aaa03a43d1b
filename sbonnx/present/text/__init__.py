"""Results as tables and lines for terminals."""
