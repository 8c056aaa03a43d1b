"""The version, in the one place that the package, its metadata and written files read it from."""

__version__ = "0.1.0"
