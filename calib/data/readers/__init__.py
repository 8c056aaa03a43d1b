"""Readers of files that are no arrays: images, audio, texts, Python files."""
