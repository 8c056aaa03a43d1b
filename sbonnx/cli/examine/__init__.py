"""Verbs that show, check and compare models."""
