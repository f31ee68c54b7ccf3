"""The `raysearch` command."""
