"""Verbs that write models, recipes and jobs."""
