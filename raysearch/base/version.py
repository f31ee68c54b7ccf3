"""The version of raysearch."""

__version__ = "0.1.0"
