"""The version of the package, where every room can import it."""

__version__ = "0.1.0"  # pyproject.toml reads it from here
