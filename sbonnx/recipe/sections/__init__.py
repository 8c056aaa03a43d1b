"""Sections of a recipe: their keys, defaults and allowed values."""
