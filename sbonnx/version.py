"""Package version, the single source for the package, its metadata and written files."""

__version__ = "0.2.0"
