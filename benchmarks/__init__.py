"""Studies that only the authors run: see README.md. Not part of the package."""
