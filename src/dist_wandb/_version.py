"""The version, in one place: hatchling reads it without importing the package."""

__version__ = "0.1.0.dev0"
